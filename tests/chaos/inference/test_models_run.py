"""Whole runs beside which somebody has engines of his own, or gives a second model its weights."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request

import pytest

from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.weights import update_from_disk
from miles_hpc.train.make_model import make_model
from miles_hpc.wire.operator import OperatorClient
from miles_hpc.wire.security import load_http_key

from ..conftest import wait_for
from .clients import Book
from .test_external import External

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]

JUDGED = """
import json
import os
from pathlib import Path

from miles_hpc.rollout.generate import single_turn

async def generate(sample, context):
    await single_turn(sample, context)
    judge = context.services.model("judge")
    said = await judge.generate([5, 6, 7], context.sampling(sample), deadline_s=200)
    versions = [version for version, _, _ in said.weight_versions]
    with open(Path(__file__).with_name(f"said-{os.getpid()}"), "a") as file:
        file.write(f"{versions}\\n")
"""


def seen(directory):
    """The weight versions of all answers of the judge so far."""
    lines = [line for path in directory.glob("said-*") for line in path.read_text().splitlines() if line.endswith("]")]
    return {version for line in lines for version in json.loads(line)}


def test_a_second_model_gets_its_weights_in_windows_of_its_own_beside_those_of_the_policy(smoke, tmp_path):
    paths = [make_model(MakeModelConfig(hidden_size=16, layers=1, heads=2), n, tmp_path / f"m{n}") for n in range(4)]
    (tmp_path / "judged.py").write_text(JUDGED)
    run = smoke(
        *(
            "steps=100000",
            f"models.judge.path={paths[0]}",
            "models.judge.engines=2",
            "models.judge.update_weights=true",
        ),
        *(f'python_path=["{tmp_path}"]', "rollout.generate=judged:generate", "rollout.session_every=0"),
        *("data.heldout=", "session.servers=0", "heal.budget=20"),
    )
    book = Book(run)
    try:
        asyncio.run(asyncio.wait_for(publish_to_the_judge(run, book, paths, tmp_path), 400))
        with OperatorClient(run.run_dir) as operator:
            operator.drain("enough")
    finally:
        book.close()
    summary = run.end()
    groups = summary["groups"]
    assert summary["outcome"] == "drained", run.tail()
    assert groups["dispatched"] == groups["committed"] + groups["returned"] + sum(groups["dropped"].values())
    # Both are counted apart: the policy's go up by one a step, whatever the judge's do.
    ledger = sorted(run.ledger_lines(), key=lambda line: line["step"])
    assert all(line["weight_versions"] == [line["step"]] for line in ledger), ledger[-1]
    assert seen(tmp_path) == {1, 2, 3}
    assert run.left() == []


async def publish_to_the_judge(run, book, paths, directory):
    await asyncio.to_thread(wait_for, lambda: book.controller, "the controller")
    judge = ControllerClient.at(lambda: book.controller, run.run_dir, 0, model="judge")
    policy = ControllerClient.at(lambda: book.controller, run.run_dir, 0)
    async with open_http(load_http_key(run.run_dir, 0)) as http, judge, policy:

        async def publish(version, meanwhile=None):
            window = await judge.start_update_weights(120)
            assert [engine.cell for engine in window.engines] == ["engine-judge-0-00000", "engine-judge-0-00001"]
            if meanwhile is not None:
                await meanwhile()
            result = await update_from_disk(window.engines, str(paths[version]), version, http=http)
            ended = await judge.end_update_weights(window.window_id, version, str(paths[version]), result.failed)
            assert (result.failed, ended) == ({}, {})
            await judge.wait_serving(2, 60)

        # Nobody is judged by weights that nobody published: the first step waits.
        await policy.wait_serving(2, 120)
        assert run.step() == 0 and (await judge.status()).published == 0
        await publish(1)
        await asyncio.to_thread(run.reach, 2, 120)

        async def steps_go_on():
            await asyncio.to_thread(run.reach, run.step() + 2, 120)

        await publish(2, steps_go_on)
        # What comes after is told what each model serves: an engine of the judge, and a controller.
        healed = (await judge.statuses())["engine-judge-0-00000"].generation
        await asyncio.to_thread(run.kill, "engine-judge-0-00000-00000")
        await asyncio.to_thread(wait_for, lambda: generation(run, "engine-judge-0-00000") not in (None, healed), "heal")
        status = await judge.wait_serving(2, 120)
        assert {row.weight_version for row in status.engines} == {2}
        before = generation(run, "controller-00000")
        await asyncio.to_thread(run.kill, "controller-00000-00000")
        await asyncio.to_thread(wait_for, lambda: generation(run, "controller-00000") not in (None, before), "heal")
        status = await judge.wait_serving(2, 120)
        assert (status.published, {row.weight_version for row in status.engines}) == (2, {2})
        await publish(3)
        await asyncio.to_thread(wait_for, lambda: 3 in seen(directory), "answers of the third weights")
        await asyncio.to_thread(run.reach, run.step() + 1, 120)


def generation(run, cell):
    row = run.cell(cell)
    return row.generation if row is not None and row.state == "ready" else None


class Embedded(External):
    """An embedded engine that a test starts."""

    def start(self):
        argv = [sys.executable, "-m", "miles_hpc.engine.serve", "--port", str(self.port)]
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                [*argv, "--model-path", str(self._model)], stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        try:
            wait_for(lambda: self.get("/health") is not None, "the external engine", 500)
        except BaseException:
            self.process.kill()
            self.process.wait(10)
            raise

    def post(self, path, **body):
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.loads(answer.read())

    def checksums(self):
        return self.post("/weights_checker", action="checksum")["ranks"]


def test_the_trainer_broadcasts_into_an_engine_of_somebody_else(smoke, tmp_path):
    model = make_model(MakeModelConfig(hidden_size=64), 0, tmp_path / "model")
    engine = Embedded(model, tmp_path / "external.log")
    try:
        started_with = engine.checksums()
        run = smoke(
            *("steps=4", f"model.path={model}", "model.make=none", f"inference.external.mine.url={engine.url}"),
            *("train.trainer=torch", "train.ranks=1", "train.weight_transfer=distributed"),
            # No answer is right, so only the decay changes the weights.
            *("train.learning_rate=0.01", "train.weight_decay=0.5"),
            *("inference.engine=embedded", "rollout.batch_size=4", "rollout.samples_per_prompt=2"),
            *("rollout.session_every=0", "session.servers=0", "data.heldout=", "cluster.local_nodes=1"),
        )
        summary = run.end(900)
        assert (summary["outcome"], summary["steps"], summary["cells"]["healed"]) == ("finished", 4, 0), run.tail()
        assert summary["groups"]["committed"] == summary["groups"]["dispatched"] == 16
        assert [line["weight_versions"] for line in sorted(run.ledger_lines(), key=lambda line: line["step"])] == [
            [step] for step in (1, 2, 3, 4) for _ in range(4)
        ]
        # It holds what the trainer holds: the same as what the newest directory has, bit by bit.
        sent = engine.checksums()
        assert json.loads(engine.get("/model_info"))["weight_version"] == "5" and engine.get("/ready") is not None
        (log,) = (run.run_dir / "logs" / "attempt-0").rglob("controller-00000-00000.g*.log")
        assert "weights 5 are published" in log.read_text() and "took weights" not in log.read_text()
        newest = run.run_dir / "weights" / "00005"
        engine.post("/update_weights_from_disk", model_path=str(newest), weight_version="6")
        assert sent == engine.checksums() != started_with
        assert engine.process.poll() is None and run.left() == []
    finally:
        engine.process.send_signal(signal.SIGKILL)
        engine.process.wait(10)
