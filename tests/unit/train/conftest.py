"""A driver's surroundings in memory: every part writes what it was asked into one list."""

import asyncio
import hashlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from miles_hpc.config.schema import Config
from miles_hpc.rollout.client import CommitData, EvalResult, RolloutResult
from miles_hpc.rollout.commits import CommitLog, ManifestFile
from miles_hpc.train.driver import Driver
from miles_hpc.train.progress import MetricsFile


@dataclass
class Surroundings:
    """Executor, ranks, publisher and hub of one attempt."""

    run_dir: Path
    calls: list = field(default_factory=list)
    heldout: list = field(default_factory=lambda: [0.1, 0.2, 0.3, 0.4, 0.5])
    fail_at: tuple = ()
    drain_at: tuple = ()
    """The call during which the run begins to drain."""
    drain_s: float = 1000.0
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    progress: list = field(default_factory=list)
    healed: int = 0
    trainer_generation: str = "1-1"
    place: int = 0
    done: int = 0

    def said(self, *call):
        self.calls.append(call)
        if call == self.fail_at:
            raise RuntimeError("the script says so")
        if call == self.drain_at:
            self.drained.set()

    # executor
    async def open(self, incarnation, state):
        self.place = (state or {}).get("place", 0)
        self.said("open", incarnation, state)
        return {"prompts": 10, "heldout": 5}

    async def generate(self, rollout_id, weight_version):
        self.said("generate", rollout_id, weight_version)
        if self.drained.is_set():
            await asyncio.Event().wait()  # a rollout that takes longer than the drain
        self.place += 1
        group = f"e00000-i{self.place:09d}"
        return RolloutResult(rollout_id=rollout_id, groups=[group], reward_mean=rollout_id / 10, tokens=100)

    async def evaluate(self, weight_version, limit=0):
        self.said("evaluate", weight_version)
        return EvalResult(accuracy=self.heldout.pop(0), n=5)

    async def prepare_commit(self, rollout_id):
        self.said("prepare_commit", rollout_id)
        ledger = [{"step": step, "group": f"g{step}"} for step in range(self.done + 1, rollout_id + 1)]
        return CommitData(ledger=ledger, data_state={"place": self.place}, counts={"committed": rollout_id})

    async def committed(self, rollout_id):
        self.said("committed", rollout_id)
        self.done = rollout_id

    async def counts(self, *, final=False):
        return {"dispatched": self.place, "committed": self.done, "returned": self.place - self.done, "dropped": {}}

    # hub
    def drain_left(self):
        return self.drain_s if self.drained.is_set() else None

    async def until_drained(self):
        await self.drained.wait()

    def on_progress(self, summary):
        self.progress.append(summary.to_dict())


class FakeRanks:
    def __init__(self, around):
        self.around = around

    async def init(self, incarnation, resume):
        self.around.said("init", incarnation, None if resume is None else resume.step)

    async def warm_start(self):
        self.around.said("warm_start")
        return {}

    async def train(self, rollout_id):
        self.around.said("train", rollout_id)
        return {"loss": 0.5, "grad_norm": 1.0}

    async def save(self, path):
        self.around.said("save", path.name)
        data = path.name.encode()
        (path / "state").write_bytes(data)
        return [ManifestFile(file="state", size=len(data), sha256=hashlib.sha256(data).hexdigest())]

    async def export_weights(self, path):
        self.around.said("export", path.name)

    async def close(self):
        pass


class FakePublisher:
    def __init__(self, around):
        self.around = around

    async def publish(self, above):
        self.around.said("publish", above + 1)
        return above + 1


def config(**train):
    sections = {"train": {"save_every": 2, **train}, "data": {"prompts": "p", "heldout": "h"}, "steps": 4}
    return msgspec.convert(sections, Config)


@pytest.fixture
def surroundings(tmp_path):
    def make(**values):
        return Surroundings(tmp_path, **values)

    return make


@pytest.fixture
def driver():
    """driver(surroundings, config, attempt) -> Driver"""

    def make(around, settings=None, attempt=0):
        return Driver(
            settings or config(),
            around.run_dir,
            attempt,
            hub=around,
            executor=around,
            ranks=FakeRanks(around),
            publisher=FakePublisher(around),
            commits=CommitLog(around.run_dir, attempt=attempt, epoch=1, generation="1-1"),
            metrics=MetricsFile(around.run_dir),
            clock=itertools.count().__next__,
        )

    return make
