"""`miles-hpc logs`: the output of a cell's processes, of a node's agent or of the hub.

Logs are files in the run directory while the run goes on and after it, so they are read there, hub or no hub.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.cli.exits import FINISHED, refuse
from miles_hpc.cli.signs import Watch
from miles_hpc.cli.source import ask, find_run, is_run, newest_claim, note_fallback, said_over
from miles_hpc.config.errors import ConfigError
from miles_hpc.launch.attempts import AttemptError, read_attempts
from miles_hpc.wire.ids import Generation

_LOOK_EVERY_S = 0.3
_BLOCK = 1 << 16
_NAME = re.compile(r"(?P<worker>.+)\.g(?P<generation>\d+-\d+)\.log")


@dataclass
class LogFile:
    """One file and how far it was read. `generation` is None for what has none: agents, the hub."""

    path: Path
    name: str
    node: str
    generation: Generation | None
    offset: int = 0
    rest: bytes = field(default=b"", repr=False)

    def tail(self, lines: int) -> list[str]:
        """The last lines; `read` goes on behind them. Reads no more of the file than it must."""
        with self.path.open("rb") as file:
            end = start = file.seek(0, 2)
            data, size = b"", _BLOCK
            while start > 0 and data.count(b"\n") <= lines:
                # Twice as much each time: progress bars write lines of any length.
                start, size = max(0, end - size), 2 * size
                file.seek(start)
                data = file.read(end - start)
        self.offset = end
        *whole, self.rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in whole[-lines:]] if lines > 0 else []

    def read(self) -> list[str]:
        """Complete lines that were added since the last call; a file that became shorter is read from its start."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.offset:
                    self.offset, self.rest = 0, b""
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self.offset += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def logs(arguments: argparse.Namespace) -> int:
    """Print the end of the logs that the target names; with `--follow` what is added, until the run's end.

    Returns 1 when what was followed died without a verdict.
    """
    target, run = arguments.target, arguments.run
    if target and not run and is_run(target):
        target, run = "", target
    try:
        run_dir = find_run(run)
        claim = newest_claim(run_dir)
        if arguments.attempt is not None:
            claim = next((each for each in read_attempts(run_dir) if each.number == arguments.attempt), claim)
            if claim.number != arguments.attempt:
                raise ConfigError(f"--attempt {arguments.attempt}: the newest attempt of {run_dir} is {claim.number}")
        root = run_dir / "logs" / f"attempt-{claim.number}"
        files = choose(root, target, all_generations=arguments.all)
        _say_when_no_hub(run_dir, files)
        known = {log.path: log for log in files}
        for log in files:
            _print(log, log.tail(arguments.lines), len(known) > 1, arguments.json)
        if not arguments.follow:
            return FINISHED
        pause, watch = threading.Event(), Watch(run_dir, claim)
        while True:
            # Looked at first: what was written before the end is then read by the last turn.
            sign = watch.look()
            for log in choose(root, target, all_generations=arguments.all):
                known.setdefault(log.path, log)
            for log in known.values():
                _print(log, log.read(), len(known) > 1, arguments.json)
            if sign.over:
                return said_over(claim, sign)
            pause.wait(_LOOK_EVERY_S)
    except (ConfigError, AttemptError) as error:
        return refuse(str(error))


def choose(root: Path, target: str, all_generations: bool = False) -> list[LogFile]:
    """The logs that a target means: a cell, a worker, a pool, a node (everything on it), `hub`, or all for "".

    Of each worker only the newest generation, unless all are asked for.

    Raises:
        ConfigError: when there is none; the text says what there is.
    """
    everything = list(_list(root))
    newest: dict[tuple[str, str], LogFile] = {}
    for log in everything:
        key = (log.name, str(log.path) if all_generations or log.generation is None else "")
        other = newest.get(key)
        if other is None or (log.generation or Generation(0, 0)) > (other.generation or Generation(0, 0)):
            newest[key] = log
    chosen = [
        log for log in newest.values() if not target or target in (log.name, log.node) or _below(log.name, target)
    ]
    if not chosen:
        names = sorted({log.name for log in everything} | {log.node for log in everything if log.node})
        there = ", ".join(names[:20]) if names else "no log at all"
        raise ConfigError(f"no log of {target or 'this run'} in {root}; there is {there}")
    return sorted(chosen, key=lambda log: (log.name, str(log.path)))


def _below(name: str, target: str) -> bool:
    """Whether a worker belongs to a cell or a pool of that name: the rest is one or two padded numbers."""
    return re.fullmatch(re.escape(target) + r"(-\d{5}){1,2}", name) is not None


def _list(root: Path) -> Iterable[LogFile]:
    for path in sorted(root.glob("*.jsonl")):
        yield LogFile(path, path.stem, "", None)
    for path in sorted(root.glob("*/*")):
        match = _NAME.fullmatch(path.name)
        if match:
            yield LogFile(path, match["worker"], path.parent.name, Generation.parse(match["generation"]))
        elif path.suffix in (".jsonl", ".log"):
            yield LogFile(path, f"{path.parent.name}/{path.stem}", path.parent.name, None)


def _say_when_no_hub(run_dir: Path, files: list[LogFile]) -> None:
    from miles_hpc.wire.sockets import HubError

    try:
        ask(run_dir, lambda hub: hub.events(limit=0))
    except (HubError, ConfigError, AttemptError) as error:
        note_fallback(str(error), max((log.path for log in files), key=lambda path: path.stat().st_mtime))


def _print(log: LogFile, lines: list[str], with_name: bool, as_json: bool) -> None:
    for line in lines:
        if as_json:
            generation = str(log.generation) if log.generation else ""
            row = {"name": log.name, "node": log.node, "generation": generation, "log": str(log.path), "line": line}
            print(json.dumps(row), flush=True)
        else:
            print(f"{log.name} | {line}" if with_name else line, flush=True)
