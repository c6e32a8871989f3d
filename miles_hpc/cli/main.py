"""`miles-hpc`: parses, and hands over to one module per verb, which is imported only then."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from miles_hpc.cli.exits import BAD_INPUT, CANCELLED, FAILED
from miles_hpc.cli.live_verbs import add_live_verbs
from miles_hpc.cli.parsing import Parser, Verbs, add_files
from miles_hpc.cli.slurm_verbs import add_slurm_verbs

# Started by programs, with arguments of their own: module that holds `main(argv)`.
_PROGRAMS = {"agent": "miles_hpc.cli.node", "hub": "miles_hpc.cli.hub"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 finished, 1 failed, 2 bad input, 75 drained, 130 cancelled."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in _PROGRAMS:
        return importlib.import_module(_PROGRAMS[given[0]]).main(given[1:]) or 0
    arguments = _parser().parse_args(given)
    if arguments.verb is None:
        _parser().print_help()
        return BAD_INPUT
    module, function = arguments.call.split(":")
    importlib.import_module("miles_hpc.wire.lean")  # not above: help needs none of it
    try:
        return int(getattr(importlib.import_module(f"miles_hpc.cli.{module}"), function)(arguments))
    except KeyboardInterrupt:
        return CANCELLED
    except BrokenPipeError:
        # The reader of our output (head, less) is gone; nothing is left to say to it.
        sys.stderr.close()
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="miles-hpc",
        description="LLM reinforcement-learning rollouts and training, with no Ray.",
        epilog="exit codes: 0 finished, 1 failed, 2 bad input, 75 drained, 130 cancelled",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser, action=Verbs)

    run = verbs.add_parser("run", help="run a recipe or your own run files on this machine")
    run.set_defaults(call="run:run")
    add_files(run)
    run.add_argument("--run-dir", metavar="DIR", default="", help="where the run lives (default: runs/<run id>)")
    run.add_argument("--resume", action="store_true", help="continue the run in --run-dir from its last commit")
    run.add_argument("--dry-run", action="store_true", help="print config, placement and commands; start nothing")

    config = verbs.add_parser("config", help="show a resolved config, or every setting there is")
    actions = config.add_subparsers(
        dest="action", metavar="show|schema", parser_class=Parser, action=Verbs, required=True
    )
    show = actions.add_parser("show", help="the config that these files give, defaults included, as TOML")
    show.set_defaults(call="config:show")
    add_files(show)
    schema = actions.add_parser("schema", help="every setting with its type, default and meaning")
    schema.set_defaults(call="config:schema")
    form = schema.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON schema, for editors")
    form.add_argument("--markdown", action="store_true", help="as the page docs/configuration.md")

    add_slurm_verbs(verbs)
    add_live_verbs(verbs)

    model = verbs.add_parser("make-model", help="build a tiny model with tokenizer and chat template")
    model.set_defaults(call="make_model:make_model")
    model.add_argument("out", metavar="OUT", help="directory to write, must not hold a model")
    model.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    model.add_argument("--hidden-size", type=int, default=None, help="width")
    model.add_argument("--layers", type=int, default=None, help="depth")
    model.add_argument("--heads", type=int, default=None, help="attention heads")

    postmortem = verbs.add_parser(
        "postmortem", aliases=["report"], help="how a run ended; writes report.html and the reward picture"
    )
    postmortem.set_defaults(call="postmortem:postmortem")
    postmortem.add_argument("run_dir", metavar="RUN_DIR", help="its directory, also of a run that is long over")

    rollouts = verbs.add_parser("rollouts", help="look at a saved rollout")
    actions = rollouts.add_subparsers(dest="action", metavar="show", parser_class=Parser, action=Verbs, required=True)
    shown = actions.add_parser("show", help="prompts, responses with log-probs and masks, rewards, weight versions")
    shown.set_defaults(call="rollouts:show")
    shown.add_argument("file", metavar="FILE", help="<run_dir>/rollouts/<id>.parcel, of rollout.save_debug = true")
    shown.add_argument("--group", metavar="ID", default="", help="only this group")
    shown.add_argument("--limit", type=int, default=8, help="samples that are shown (default: 8; 0: all)")
    shown.add_argument("--plain", action="store_true", help="no colours: |text| is masked out, tokens are not split")

    verbs.add_parser("agent", help="one node of a Slurm job (started by srun)")
    verbs.add_parser("hub", help="a run's hub (started by the first node's agent)")
    return parser
