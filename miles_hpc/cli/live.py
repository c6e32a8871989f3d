"""What a run looks like while it runs: a live table on a terminal, one plain line a step in a pipe."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, TextIO

from miles_hpc.postmortem.report import shown

_ROWS_ON_SCREEN = 12


class View(Protocol):
    """Shows a run. All methods are called from one thread."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def progress(self, text: str) -> None:
        """What the run is doing now; the same text twice is shown once."""

    def step(self, row: dict[str, Any], steps: int) -> None:
        """A finished step, a line of metrics.jsonl; `steps` is how many the run has."""

    def close(self) -> None:
        """Leave the terminal as it was; what was said stays."""


def make_view(out: TextIO | None = None) -> View:
    """The view that fits where the output goes."""
    out = out or sys.stdout
    if out.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return TableView(out)
    return LinesView(out)


class LinesView:
    """Plain lines, flushed one by one."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = ""

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def progress(self, text: str) -> None:
        if text != self._last:
            self._last = text
            self.say(text)

    def step(self, row: dict[str, Any], steps: int) -> None:
        self.say(step_line(row, steps))

    def close(self) -> None:
        self._out.flush()


def step_line(row: dict[str, Any], steps: int) -> str:
    """`step 3/20  reward 0.41  tokens/s 1234  weights 4  healed 0  2.1 s`, with what the row has."""
    parts = [f"step {row.get('step', '?')}/{steps}"]
    parts += [f"{title} {_number(key, row[key])}" for key, title in _SHOWN if row.get(key) is not None]
    seconds = row.get("seconds")
    if isinstance(seconds, dict):
        parts.append(f"{sum(value for value in seconds.values() if isinstance(value, int | float)):.1f} s")
    return "  ".join(parts)


_SHOWN = (
    ("reward", "reward"),
    ("heldout", "held-out"),
    ("tokens_per_s", "tokens/s"),
    ("weight_version", "weights"),
    ("healed", "healed"),
)


def _number(key: str, value: Any) -> str:
    if key == "tokens_per_s" and isinstance(value, int | float):
        return f"{value:.0f}"
    if key in ("reward", "heldout") and isinstance(value, int | float):
        return f"{value:.3f}"
    return shown(value)


class TableView:
    """A table that is redrawn in place; drawn with rich, from this thread only."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=out)
        self._rows: deque[dict[str, Any]] = deque(maxlen=_ROWS_ON_SCREEN)
        self._steps = 0
        self._now = ""
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def progress(self, text: str) -> None:
        if text != self._now:
            self._now = text
            self._draw()

    def step(self, row: dict[str, Any], steps: int) -> None:
        self._rows.append(row)
        self._steps = steps
        self._draw()

    def close(self) -> None:
        self._now = ""
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        from rich.console import Group, RenderableType
        from rich.table import Table
        from rich.text import Text

        parts: list[RenderableType] = []
        if self._rows:
            table = Table(box=None, pad_edge=False)
            table.add_column("step", justify="right")
            columns = [(key, title) for key, title in _SHOWN if any(row.get(key) is not None for row in self._rows)]
            for _, title in columns:
                table.add_column(title, justify="right")
            for row in self._rows:
                cells = [_number(key, row[key]) if row.get(key) is not None else "" for key, _ in columns]
                table.add_row(f"{row.get('step', '?')}/{self._steps}", *cells)
            parts.append(table)
        if self._now:
            parts.append(Text(self._now, style="dim"))
        self._live.update(Group(*parts), refresh=True)


def topology(rows: Iterable[dict[str, Any]], nodes: Iterable[dict[str, Any]]) -> list[str]:
    """One line a node with its cells, from the `cells` and `nodes` of a status."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        ranks = len(row.get("workers", []))
        name = str(row.get("cell"))
        cells.setdefault(str(row.get("node")), []).append(f"{name} ({ranks} ranks)" if ranks > 1 else name)
    lines = []
    for node in nodes:
        name = str(node.get("node"))
        lines.append(f"  {name}  {node.get('address', '')}  {', '.join(cells.get(name, [])) or '(nothing)'}")
    return lines
