"""The report of a run directory: a picture of the reward curve, and one page that needs no other file.

Works with whatever pieces are there.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_hpc.postmortem.reading import Tail, read_json

PICTURE = "reward.png"
PAGE = "report.html"
_MOST_ROWS = 2000


@dataclass(frozen=True)
class Written:
    """What a report left; `picture` is None when it could not be drawn, `note` then says why."""

    page: Path
    picture: Path | None
    note: str = ""


def write_report(run_dir: str | Path) -> Written:
    """Write `reward.png` and `report.html` from metrics.jsonl and summary.json.

    Raises:
        OSError: when the run directory cannot be written.
    """
    directory = Path(run_dir)
    steps = committed_steps(Tail(directory / "metrics.jsonl").read())
    summary = read_json(directory / "summary.json")
    picture, note = _draw(directory, steps, summary)
    page = _page(directory, summary, steps, picture, note)
    _replace(directory / PAGE, page.encode())
    return Written(directory / PAGE, picture, note)


def committed_steps(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a step, in order: a step that a later attempt did again counts as the later one did it."""
    last: dict[int, dict[str, Any]] = {}
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        # An attempt goes back to the last commit: what an earlier one did at or after this step is undone.
        attempt = row.get("attempt", 0)
        last = {s: r for s, r in last.items() if s < step or r.get("attempt", 0) == attempt}
        last[step] = row
    return [last[step] for step in sorted(last)]


def rewards(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`{"steps", "reward": {first, last, best}}` of finished steps, as summary.json has them; empty without a step."""
    values = [row["reward"] for row in steps if _is_number(row.get("reward"))]
    if not steps:
        return {}
    ends = {"first": values[0], "last": values[-1], "best": max(values)} if values else {}
    return {"steps": steps[-1]["step"], "reward": ends}


def _draw(directory: Path, steps: list[dict[str, Any]], summary: dict[str, Any]) -> tuple[Path | None, str]:
    points = [(row["step"], row["reward"]) for row in steps if _is_number(row.get("reward"))]
    if not points:
        return None, "no step has a reward yet, so there is no picture"
    if importlib.util.find_spec("matplotlib") is None:
        return None, "matplotlib is missing, so there is no picture: pip install 'miles-hpc[report]'"
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except Exception as error:  # a broken installation must not take the page away
        return None, f"matplotlib does not import ({type(error).__name__}: {error}), so there is no picture"

    # Figure with a canvas of its own: pyplot would keep global state and could ask for a display.
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True), marker=".", color="#2563eb", label="training reward (mean of a step)")
    heldout = heldout_points(steps, summary)
    if heldout:
        axes.plot(*zip(*heldout, strict=True), "o--", color="#16a34a", label="held-out accuracy (greedy)")
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    axes.set_title(directory.resolve().name)
    target = directory / PICTURE
    temporary = target.with_name(f".{os.getpid()}.{PICTURE}")
    figure.savefig(temporary, format="png")
    temporary.replace(target)
    return target, ""


def heldout_points(steps: Sequence[dict[str, Any]], summary: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, accuracy) of each held-out evaluation; the one before the first step comes from the summary, at step 0."""
    points = [(row["step"], row["heldout"]) for row in steps if _is_number(row.get("heldout"))]
    ends = summary.get("heldout")
    if isinstance(ends, dict):
        if _is_number(ends.get("first")) and (not points or points[0][0] > 0):
            points.insert(0, (0, ends["first"]))
        final = steps[-1]["step"] if steps else 0
        if _is_number(ends.get("last")) and points and points[-1][0] < final:
            points.append((final, ends["last"]))
    return points


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1f2937;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}img{max-width:100%}
table{border-collapse:collapse;font-size:.9em;font-variant-numeric:tabular-nums}
td,th{white-space:nowrap;padding:.2rem .5rem;border-bottom:1px solid #e5e7eb;text-align:right}
td:first-child,th:first-child{text-align:left}code{background:#f3f4f6;padding:0 .3rem}
.finished{color:#15803d}.failed{color:#b91c1c}
.cancelled,.drained{color:#a16207}
"""


def _page(
    directory: Path, summary: dict[str, Any], steps: list[dict[str, Any]], picture: Path | None, note: str
) -> str:
    name = html.escape(directory.resolve().name)
    outcome = str(summary.get("outcome", "running"))
    parts = [
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
        f"<title>{name}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{name}: <span class='{html.escape(outcome)}'>{html.escape(outcome)}</span></h1>",
    ]
    if summary.get("reason"):
        parts.append(f"<p>{html.escape(str(summary['reason']))}</p>")
    if picture is not None:
        data = base64.b64encode(picture.read_bytes()).decode()
        parts.append(f"<img alt='reward by step' src='data:image/png;base64,{data}'>")
    else:
        parts.append(f"<p>{html.escape(note)}</p>")
    parts += ["<h2>Summary</h2>", _summary_table(summary), "<h2>Steps</h2>", _steps_table(steps)]
    parts.append(f"<h2>Files</h2><p><code>{html.escape(str(directory.resolve()))}</code></p></body></html>\n")
    return "\n".join(parts)


def _summary_table(summary: dict[str, Any]) -> str:
    if not summary:
        return "<p>There is no summary.json yet: the run is still going, or ended without a verdict.</p>"
    rows = "".join(f"<tr><td>{html.escape(key)}</td><td>{html.escape(text)}</td></tr>" for key, text in _flat(summary))
    return f"<table>{rows}</table>"


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        elif not isinstance(inner, dict):
            yield f"{prefix}{key}", shown(inner)


def shown(value: Any) -> str:
    """A value for people: numbers short, nothing as a dash."""
    if value is None or value == "":
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_COLUMNS = (
    ("step", "step"),
    ("reward", "reward"),
    ("heldout", "held-out"),
    ("tokens_per_s", "tokens/s"),
    ("weight_version", "weights"),
    ("healed", "healed"),
    ("loss", "loss"),
    ("grad_norm", "grad norm"),
)
_TIMES = ("rollout", "train", "update", "save")


def _steps_table(steps: list[dict[str, Any]]) -> str:
    if not steps:
        return "<p>No step was finished.</p>"
    columns = [(key, title) for key, title in _COLUMNS if any(row.get(key) is not None for row in steps)]
    head = "".join(f"<th>{title}</th>" for _, title in columns) + "".join(f"<th>{name} s</th>" for name in _TIMES)
    body = []
    for row in steps[-_MOST_ROWS:]:
        found = row.get("seconds")
        seconds = found if isinstance(found, dict) else {}
        cells = [shown(row.get(key)) for key, _ in columns] + [shown(seconds.get(name)) for name in _TIMES]
        body.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    left_out = len(steps) - len(body)
    more = f"<p>The first {left_out} steps are in metrics.jsonl only.</p>" if left_out else ""
    return f"{more}<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{os.getpid()}.{target.name}")
    temporary.write_bytes(data)
    temporary.replace(target)
