"""`mode = "eval"`: one evaluation; when the run drains before its end, it says that nothing of it is kept."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from miles_hpc.config.schema import Config
from miles_hpc.rollout.client import EvalResult
from miles_hpc.rollout.commits import CommitLog
from miles_hpc.train.driver_external import ExternalDriver

pytestmark = pytest.mark.unit


def evaluated(tmp_path, *, drained):
    """The driver's summary of a run that drains in the middle of its evaluation, or does not."""
    drain = asyncio.Event()

    async def nothing(*_):
        return {}

    async def evaluate(version, limit):
        if drained:
            drain.set()
            await asyncio.Event().wait()
        return EvalResult(accuracy=0.5, n=4)

    async def publish(version):
        return version + 1

    driver = ExternalDriver(
        msgspec.convert({"mode": "eval", "model": {"path": str(tmp_path)}}, Config),
        tmp_path,
        0,
        SimpleNamespace(async_until_drained=drain.wait),
        SimpleNamespace(open=nothing, evaluate=evaluate),
        SimpleNamespace(publish=publish, path_of=lambda version: tmp_path / str(version)),
        CommitLog(tmp_path, attempt=0, epoch=1, generation="1-1"),
    )
    return asyncio.run(asyncio.wait_for(driver.run(), 20))


def test_a_drain_ends_an_evaluation_at_once(tmp_path):
    summary = evaluated(tmp_path, drained=True)
    assert "the evaluation had not ended" in summary.drained and not (tmp_path / "metrics.jsonl").exists()


def test_an_evaluation_that_ends_is_a_finished_run(tmp_path):
    summary = evaluated(tmp_path, drained=False)
    assert not summary.drained and summary.to_dict()["heldout"] == {"first": 0.5, "last": 0.5}
