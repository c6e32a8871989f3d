"""Parts of command lines that several verbs share."""

from __future__ import annotations

import argparse
import math
from typing import Any, NoReturn

from miles_hpc.cli.exits import refuse


class Parser(argparse.ArgumentParser):
    """An argument parser whose refusals are one line, like every other bad input."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Here, where the verb is known: argparse itself would point at the help of the whole command.
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise SystemExit(refuse(f"{message}: see `{self.prog} --help`"))


def count(text: str) -> int:
    """A number of things."""
    found = int(text)
    if found < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return found


def seconds(text: str) -> float:
    """A time to wait."""
    found = float(text)
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return found


class Verbs(argparse._SubParsersAction):  # type: ignore[type-arg]
    """Verbs whose own help begins with what the list of them says."""

    def add_parser(self, name: str, **given: Any) -> Any:
        given.setdefault("description", given.get("help"))
        return super().add_parser(name, **given)


def add_files(parser: argparse.ArgumentParser) -> None:
    """Run files and `--set`."""
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE_OR_RECIPE",
        help="run files, or recipes that come with us (quickstart, reasoning-gym, smoke); later ones win",
    )
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one setting, such as rollout.batch_size=64",
    )
