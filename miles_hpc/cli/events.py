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
        follower = Follower(lambda since, limit: ask(run_dir, lambda hub: hub.events(since, limit), claim=claim), log)
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
            answered = not follower.why_no_hub
            if answered:
                watch.heard()
            if sign.verdict or (sign.over and not answered):
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
        new = self._behind_known(lines)
        self._keep([_key(line) for line in lines])
        return new

    def _from_hub(self, limit: int) -> list[Line]:
        # One that is known comes along; if it does not, this is another hub, or more has happened than it keeps.
        lines, following = self._ask(max(0, self._since - 1), limit)
        if self._known and not (lines and _key(lines[0]) in self._known):
            lines, following = self._ask(0, limit)
            # The log has what the hub before said last, and may lag behind this one.
            logged = self._behind_known(self._log.read())
            written = {_key(line) for line in logged}
            lines = logged + [line for line in self._behind_known(lines) if _key(line) not in written]
        self._since = following
        return lines

    def _behind_known(self, lines: list[Line]) -> list[Line]:
        """Those behind the last that is known: what stands before it is older than all that was given."""
        known = (index + 1 for index, line in enumerate(lines) if _key(line) in self._known)
        return lines[max(known, default=0) :]

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
