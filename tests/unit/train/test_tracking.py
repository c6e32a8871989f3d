from __future__ import annotations

import sys
import types

import pytest

from miles_hpc.config.load import load
from miles_hpc.train.tracking import Trackers, numbers

pytestmark = pytest.mark.unit


def test_without_trackers_nothing_is_imported_or_written(tmp_path):
    with Trackers(load([]), tmp_path) as trackers:
        trackers.log(1, {"reward": 1.0})
        assert trackers.names == []
    assert not list(tmp_path.iterdir())


def test_numbers_of_nested_metrics_get_paths():
    found = dict(numbers({"reward": 1, "ok": True, "name": "x", "seconds": {"train": 2.5}, "none": None}))
    assert found == {"reward": 1.0, "seconds/train": 2.5}


def test_tensorboard_events_are_written(tmp_path):
    pytest.importorskip("tensorboard")
    with Trackers(load([], ["tracking.tensorboard=true"]), tmp_path) as trackers:
        trackers.log(1, {"reward": 0.25, "seconds": {"train": 1}})
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    assert [(event.step, [value.tag for value in event.summary.value]) for event in events] == [
        (1, ["reward", "seconds/train"])
    ]


def test_a_tracker_that_is_missing_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    trackers = Trackers(load([], ["tracking.wandb_project=p"]), tmp_path)
    trackers.log(1, {"reward": 1.0})
    assert trackers.names == [] and "no metrics go to wandb" in caplog.text


def test_a_tracker_that_fails_is_off_and_the_step_goes_on(tmp_path, monkeypatch, caplog):
    class Run:
        calls = 0

        def log(self, values, step):
            Run.calls += 1
            raise OSError("disk full")

        def finish(self):
            raise AssertionError("a tracker that is off is not closed")

    asked = {}
    wandb = types.SimpleNamespace(init=lambda **given: asked.update(given) or Run())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Trackers(load([], ["tracking.wandb_project=p"]), tmp_path) as trackers:
        trackers.log(1, {"reward": 1.0})
        trackers.log(2, {"reward": 1.0})
    assert (asked["project"], asked["mode"]) == ("p", "offline")
    assert Run.calls == 1 and "disk full" in caplog.text
