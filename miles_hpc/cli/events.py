"""`miles-hpc events`: what the hub has seen and decided, from itself, else from the log that it wrote."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_hpc.cli.exits import FINISHED, refuse
from miles_hpc.cli.signs import Watch
from miles_hpc.cli.source import ask, find_run, newest_claim, note_fallback, said_over
from miles_hpc.config.errors import ConfigError
from miles_hpc.launch.attempts import AttemptError
from miles_hpc.postmortem.reading import Tail

if TYPE_CHECKING:
    import argparse

_LOOK_EVERY_S = 1.0
_KEPT_BY_HUB = 2000

Line = dict[str, Any]


def events(arguments: argparse.Namespace) -> int:
    """Print the newest events of a run; with `--follow` those to come, until its end.

    Returns 1 when what was followed died without a verdict.
    """
    try:
        run_dir = find_run(arguments.run)
        claim = newest_claim(run_dir)
        log = run_dir / "logs" / f"attempt-{claim.number}" / "hub.jsonl"
        follower = Follower(lambda since, limit: ask(run_dir, lambda hub: hub.events(since, limit)), log)
        # One is needed to go on from.
        lines = follower.new(max(1, arguments.lines))
        if follower.why_no_hub:
            note_fallback(follower.why_no_hub, log)
        _print(lines[max(0, len(lines) - arguments.lines) :], arguments.json)
        if not arguments.follow:
            return FINISHED
        pause, watch = threading.Event(), Watch(run_dir, claim)
        while True:
            # Looked at first: what was written before the end is then read by the last turn.
            sign = watch.look()
            _print(follower.new(), arguments.json)
            if not follower.why_no_hub:
                watch.heard()
            if sign.over:
                return said_over(claim, sign)
            pause.wait(_LOOK_EVERY_S)
    except (ConfigError, AttemptError) as error:
        return refuse(str(error))


class Follower:
    """Gives each event once, whoever tells it: this hub, the one that has taken over, the log that they wrote.

    Each hub numbers its own events from 0, and their clocks may go back: an event is known again by what it says.

    Args:
        ask: events from a number on, at most so many, and the number to go on from; raises HubError.
    """

    def __init__(self, ask: Callable[[int, int], tuple[list[Line], int]], log: Path) -> None:
        self._ask, self._log = ask, Tail(log)
        self._since = 0
        self._known: set[str] = set()
        self._order: deque[str] = deque()
        self.why_no_hub = ""

    def new(self, limit: int = _KEPT_BY_HUB) -> list[Line]:
        """Those that were not given yet, oldest first; of the hub's the newest `limit`."""
        from miles_hpc.wire.sockets import HubError

        try:
            lines = self._from_hub(limit)
            self.why_no_hub = ""
        except HubError as error:
            self.why_no_hub = str(error)
            lines = self._log.read()
        keys = [_key(line) for line in lines]
        # What stands before a known one is older than all that was given.
        first = max((index + 1 for index, key in enumerate(keys) if key in self._known), default=0)
        self._keep(keys)
        return lines[first:]

    def _from_hub(self, limit: int) -> list[Line]:
        # One that is known comes along; if it does not, this is another hub, or more has happened than it keeps.
        lines, following = self._ask(max(0, self._since - 1), limit)
        if self._since and not (lines and _key(lines[0]) in self._known):
            lines, following = self._ask(0, limit)
        self._since = following
        return lines

    def _keep(self, keys: list[str]) -> None:
        for key in keys:
            if key not in self._known:
                self._known.add(key)
                self._order.append(key)
        while len(self._order) > 4 * _KEPT_BY_HUB:
            self._known.discard(self._order.popleft())


def _key(line: Line) -> str:
    return json.dumps(line, sort_keys=True, default=str)


def _print(lines: list[Line], as_json: bool) -> None:
    from miles_hpc.hub.eventlog import for_people

    for line in lines:
        print(json.dumps(line) if as_json else for_people(line), flush=True)
