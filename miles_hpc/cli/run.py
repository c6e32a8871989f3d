"""`miles-hpc run`: from run files to a verdict, with nothing left behind."""

from __future__ import annotations

import argparse
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.cli.apart import ApartFailed, apart
from miles_hpc.cli.exits import BY_OUTCOME, CANCELLED, FAILED, FINISHED, one_line, refuse
from miles_hpc.cli.preflight import claim_run_dir, preflight, resolve
from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import Loaded, read_resolved, write_resolved
from miles_hpc.config.node import RESOLVED
from miles_hpc.config.schema import Config


def run(arguments: argparse.Namespace) -> int:
    """Run, or say why not. Returns the exit code of the outcome."""
    # Until a run is started there is nothing to clean up: SIGTERM ends the command like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        loaded = loaded_files(arguments)
        run_dir = default_run_dir(arguments.run_dir, loaded.config)
        if arguments.dry_run:
            return _dry_run(loaded, run_dir)
        notes = apart(preflight, loaded)
        claim_run_dir(run_dir, resume=arguments.resume)
        return _start(loaded, run_dir, notes, arguments)
    except ConfigError as error:
        return refuse(str(error))
    except ApartFailed as error:  # a look at the input that broke off
        print(f"miles-hpc: failed: nothing was started: {one_line(error)}", file=sys.stderr, flush=True)
        return FAILED
    except KeyboardInterrupt:
        print("miles-hpc: cancelled before anything was started", file=sys.stderr, flush=True)
        return CANCELLED


def loaded_files(arguments: argparse.Namespace) -> Loaded:
    """The composed and checked run files of a command line. Raises ConfigError."""
    files, sets = list(arguments.files), list(arguments.sets)
    if not files and arguments.resume and arguments.run_dir:
        # A resumed run needs no files again: its resolved config has everything, and the path of a model that was made.
        files = [str(Path(arguments.run_dir) / RESOLVED)]
        if read_resolved(arguments.run_dir).model.make is not None:
            sets.insert(0, 'model.path=""')
    if not files:
        raise ConfigError("run: name a recipe or a run file, such as `miles-hpc run quickstart`")
    if arguments.resume and not arguments.run_dir:
        raise ConfigError("run: --resume needs --run-dir: name the directory of the run to continue")
    return resolve(files, sets)


def default_run_dir(given: str, config: Config) -> Path:
    """The directory that was given, or a new one below `runs/`."""
    if given:
        return Path(given).expanduser().absolute()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", config.name).strip("-.") or "run"
    return Path("runs").absolute() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def with_model(config: Config, run_dir: Path) -> Config:
    """The config with the path of the model that will be made in the run directory."""
    if config.model.make is None:
        return config
    model = msgspec.structs.replace(config.model, path=str(run_dir / "model"))
    return msgspec.structs.replace(config, model=model)


def _dry_run(loaded: Loaded, run_dir: Path) -> int:
    from miles_hpc.cli.dry_run import NotPlaceable, show

    notes = apart(preflight, loaded)
    try:
        for line in show(with_model(loaded.config, run_dir), run_dir):
            print(line)
    except NotPlaceable as error:
        raise ConfigError(f"{loaded.origin(['cluster.local_nodes'])}: cluster.local_nodes: {error}") from error
    for note in notes:
        print(f"# note: {note}")
    return FINISHED


def make_model_in(config: Config, run_dir: Path) -> str:
    """Build the model of `[model.make]` in the run directory, unless it is there; complete or not at all."""
    from miles_hpc.train.make_model import make_model

    target = run_dir / "model"
    if config.model.make is not None and not (target / "config.json").is_file():
        draft = run_dir / f".model-{secrets.token_hex(4)}"
        make_model(config.model.make, config.seed, draft)
        shutil.rmtree(target, ignore_errors=True)
        draft.replace(target)
    return str(target)


def _start(loaded: Loaded, run_dir: Path, notes: list[str], arguments: argparse.Namespace) -> int:
    from miles_hpc.cli.environment import write_environment
    from miles_hpc.cli.follow import Follower
    from miles_hpc.cli.live import make_view
    from miles_hpc.launch.attempts import AttemptError, claim_attempt, register
    from miles_hpc.launch.local import start_local
    from miles_hpc.wire.security import create_secrets

    config = with_model(loaded.config, run_dir)
    try:
        # Before the claim: the claim is for a process that can start, and building a model may fail.
        if config.model.make is not None:
            apart(make_model_in, config, run_dir)
        attempt = claim_attempt(run_dir, resume=arguments.resume)
        register(run_dir, attempt)
        create_secrets(run_dir, attempt.number)
        write_resolved(config, run_dir)
        write_environment(run_dir, sys.argv)
    except AttemptError as error:
        return refuse(f"--run-dir: {error}")
    except (OSError, RuntimeError) as error:
        print(f"miles-hpc: failed: {run_dir} could not be prepared: {one_line(error)}", file=sys.stderr, flush=True)
        return FAILED
    view = make_view()
    try:
        view.say(f"run {attempt.run_id}, attempt {attempt.number}, in {run_dir}")
        for note in notes:
            view.say(f"note: {note}")
        # The signals are taken over before the first process exists, so that none can be left behind.
        with (
            Follower(config, run_dir, attempt.number, view) as follower,
            start_local(config, run_dir, attempt) as local,
        ):
            summary = follower.follow(local)
    except OSError as error:
        view.say(
            f"miles-hpc: failed: the run could not be started: {one_line(error)}; next: {_again(arguments, run_dir)}"
        )
        return FAILED
    finally:
        view.close()
    return _finish(summary, run_dir, arguments)


def _finish(summary: dict[str, Any], run_dir: Path, arguments: argparse.Namespace) -> int:
    outcome = str(summary.get("outcome", "failed"))
    for line in closing_lines(summary, run_dir, _report(run_dir)):
        print(line)
    if outcome != "finished":
        print(last_line(summary, run_dir, _again(arguments, run_dir)))
    sys.stdout.flush()
    return BY_OUTCOME.get(outcome, FAILED)


def _report(run_dir: Path) -> dict[str, Path]:
    """Write the report; what goes wrong is said and takes nothing from the run."""
    from miles_hpc.postmortem.report import write_report

    try:
        written = write_report(run_dir)
    except Exception as error:
        print(f"note: no report was written: {type(error).__name__}: {one_line(error)}")
        return {}
    if written.note:
        print(f"note: {written.note}")
    return {"report": written.page, **({"picture": written.picture} if written.picture else {})}


def _again(arguments: argparse.Namespace, run_dir: Path) -> str:
    """The command that goes on with this run."""
    sets = [word for text in arguments.sets for word in ("--set", text)]
    return shlex.join(["miles-hpc", "run", *arguments.files, *sets, "--run-dir", str(run_dir), "--resume"])


def closing_lines(summary: dict[str, Any], run_dir: Path, made: dict[str, Path]) -> list[str]:
    """What a run has reached and where everything is."""
    from miles_hpc.postmortem.report import shown

    def part(name: str) -> dict[str, Any]:
        found = summary.get(name)
        return found if isinstance(found, dict) else {}

    reward, heldout, groups, cells, seconds = map(part, ("reward", "heldout", "groups", "cells", "seconds"))
    lines = ["", f"{summary.get('outcome', 'failed')} after {summary.get('steps', 0)} steps"]
    if reward.get("last") is not None:
        lines[-1] += (
            f", reward {shown(reward.get('first'))} -> {shown(reward['last'])} (best {shown(reward.get('best'))})"
        )
    if heldout.get("last") is not None:
        # An evaluation alone has one.
        before = f"{shown(heldout.get('first'))} -> " if summary.get("steps") else ""
        lines.append(f"held-out accuracy {before}{shown(heldout['last'])}")
    dropped = part("groups").get("dropped") or {}
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items()))
    lines.append(
        f"groups: {groups.get('dispatched', 0)} dispatched, {groups.get('committed', 0)} committed, "
        f"{groups.get('returned', 0)} returned, {sum(dropped.values())} dropped{f' ({reasons})' if reasons else ''}; "
        f"cells: {cells.get('started', 0)} started, {cells.get('healed', 0)} healed; "
        f"seconds: ready {shown(seconds.get('ready'))}, first step {shown(seconds.get('first_step'))}, "
        f"total {shown(seconds.get('total'))}"
    )
    places = {
        "logs": run_dir / "logs" / "latest",
        "checkpoint": newest_checkpoint(run_dir),
        "metrics": run_dir / "metrics.jsonl",
        "ledger": run_dir / "ledger.jsonl",
        "summary": run_dir / "summary.json",
        **made,
    }
    lines += [f"{name:<12}{path}" for name, path in places.items() if path is not None and path.exists()]
    return lines


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint directory of the highest step."""
    found = []
    for path in (run_dir / "checkpoints").glob("*"):
        step = path.name.partition(".")[0]
        if step.isdigit() and path.is_dir():
            found.append((int(step), path.stat().st_mtime, path))
    return max(found)[2] if found else None


def last_line(summary: dict[str, Any], run_dir: Path, again: str) -> str:
    """Cause, log file, next command: the last line of every run that did not finish."""
    reason = one_line(summary.get("reason") or "no reason was given")
    cause, found, log = reason.rpartition("; log ")
    if found:
        said = _last_said(Path(log))
        reason = f"{cause}{f' ({said})' if said and said not in cause else ''}; log {log}"
    else:
        reason = f"{reason}; log {run_dir / 'logs' / 'latest'}"
    return f"miles-hpc: {summary.get('outcome', 'failed')}: {reason}; next: {again}"


def _last_said(log: Path) -> str:
    """The last words of a program's log, where an exception stands; empty when there are none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((one_line(line)[:300] for line in reversed(lines) if line.strip()), "")
