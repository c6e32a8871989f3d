from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from miles_hpc.postmortem.reading import Tail, read_json
from miles_hpc.postmortem.report import committed_steps, heldout_points, write_report

pytestmark = pytest.mark.unit

SUMMARY = {
    "outcome": "finished",
    "reason": "",
    "reward": {"first": 0.1, "last": 0.9, "best": 0.9},
    "heldout": {"first": 0.05, "last": 0.85},
    "groups": {"dispatched": 8, "committed": 8, "returned": 0, "dropped": {}},
}


def rows(steps: int, attempt: int = 0, start: int = 1) -> list[dict]:
    return [
        {
            "step": step,
            "attempt": attempt,
            "reward": step / 10,
            "tokens_per_s": 1234.5,
            "weight_version": step,
            "healed": 0,
            "seconds": {"rollout": 1.0, "train": 2.0, "update": 0.1, "save": 0.0},
        }
        for step in range(start, start + steps)
    ]


def lay(directory: Path, steps: list[dict], summary: dict | None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if steps:
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def test_a_report_is_one_page_with_the_picture_inside_and_no_other_resource(tmp_path):
    pytest.importorskip("matplotlib")
    run = lay(tmp_path / "my <run>", rows(5), SUMMARY)
    written = write_report(run)
    assert written.picture is not None and written.picture.read_bytes().startswith(b"\x89PNG")
    page = written.page.read_text()
    inside = re.search(r"src='data:image/png;base64,([^']+)'", page)
    assert inside is not None and base64.b64decode(inside[1]) == written.picture.read_bytes()
    assert not re.search(r"https?://|<script|<link|src='(?!data:)|url\(", page)
    assert "my &lt;run&gt;" in page and "my <run>" not in page
    assert "heldout.last" in page and "0.85" in page and page.count("<tr>") == 5 + 1 + 10
    assert sorted(path.name for path in run.iterdir()) == [
        "metrics.jsonl",
        "report.html",
        "reward.png",
        "summary.json",
    ]


def test_a_report_of_an_empty_directory_says_what_is_missing(tmp_path):
    written = write_report(lay(tmp_path / "run", [], None))
    page = written.page.read_text()
    assert written.picture is None and "no step has a reward" in written.note
    assert "no summary.json" in page and "No step was finished" in page


def test_what_is_not_json_or_has_other_fields_takes_nothing_away(tmp_path):
    run = lay(tmp_path / "run", [{"step": 1, "reward": None}, {"step": True}, {"other": 1}], None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": 2, "reward": 0.5}\n{"step": 3, "rew')
    (run / "summary.json").write_text("{broken")
    page = write_report(run).page.read_text()
    assert "<td>2</td>" in page and "<td>3</td>" not in page


def test_steps_that_a_later_attempt_did_again_count_once_as_done_last():
    before, after = rows(6), [{**row, "reward": -1} for row in rows(3, attempt=1, start=4)]
    steps = committed_steps([*before, *after[:2]])
    assert [(row["step"], row["attempt"]) for row in steps] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]


def test_heldout_points_start_before_the_first_step():
    steps = [{"step": 1}, {"step": 2, "heldout": 0.5}, {"step": 3}]
    assert heldout_points(steps, SUMMARY) == [(0, 0.05), (2, 0.5), (3, 0.85)]
    assert heldout_points(steps, {}) == [(2, 0.5)]
    assert heldout_points([], {"heldout": {"first": None, "last": None}}) == []


def test_a_tail_reads_each_complete_line_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(b'{"step": 1}\n{"step"')
    assert tail.read() == [{"step": 1}]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b': 2}\nnot json\n{"step": 3}\n')
    assert tail.read() == [{"step": 2}, {"step": 3}]
    path.write_bytes(b'{"step": 9}\n')
    assert tail.read() == [{"step": 9}]


def test_json_that_is_missing_or_no_object_is_empty(tmp_path):
    (tmp_path / "list").write_text("[1]")
    assert read_json(tmp_path / "none") == read_json(tmp_path / "list") == {}
