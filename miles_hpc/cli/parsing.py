"""Parts of command lines that several verbs share."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from miles_hpc.cli.exits import refuse


class Parser(argparse.ArgumentParser):
    """An argument parser whose refusals are one line, like every other bad input."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise SystemExit(refuse(f"{message}: see `{self.prog} --help`"))


def add_files(parser: argparse.ArgumentParser) -> None:
    """Run files and `--set`."""
    parser.add_argument("files", nargs="*", metavar="FILE_OR_RECIPE", help="run files or recipes; later ones win")
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one setting, such as rollout.batch_size=64",
    )
