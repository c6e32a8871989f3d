"""A run that only generates, on an engine that somebody else runs, with a judge of its own.

The engine is lost under load, comes back by its owner's hand, takes the weights and goes on; the run starts and stops
nothing of it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.train.make_model import make_model

from ..conftest import SmokeRun, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

JUDGED = """
from miles_hpc.rollout.generate import single_turn

async def generate(sample, context):
    await single_turn(sample, context)
    said = await context.services.model("judge").generate([5, 6, 7], context.sampling(sample), deadline_s=60)
    assert said.token_ids
"""


class External:
    """An engine that a test starts, and starts again on its port."""

    def __init__(self, model, log):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._model, self._log = model, log
        self.start()

    def start(self):
        argv = [sys.executable, "-m", "miles_hpc.engine.fake", "--port", str(self.port), "--token-ms", "60"]
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                [*argv, "--model-path", str(self._model)], stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        wait_for(lambda: self.get("/health") is not None, "the external engine")

    def get(self, path):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.url + path, timeout=5) as answer:
                return answer.read()
        except OSError:
            return None

    def running(self):
        return json.loads(self.get("/v1/loads") or '{"loads": [{"num_running_reqs": 0}]}')["loads"][0][
            "num_running_reqs"
        ]


def test_an_external_engine_lost_under_load_takes_the_weights_when_it_is_back_and_outlives_the_run(tmp_path):
    model = make_model(MakeModelConfig(hidden_size=16, layers=1, heads=2), 0, tmp_path / "model")
    (tmp_path / "judged.py").write_text(JUDGED)
    engine = External(model, tmp_path / "external.log")
    run = SmokeRun(
        tmp_path / "run",
        *("mode=rollout", "steps=4", f"model.path={model}", "model.make=none", f"models.judge.path={model}"),
        *(
            f"inference.external.mine.url={engine.url}",
            f'python_path=["{tmp_path}"]',
            "rollout.generate=judged:generate",
        ),
        *("rollout.session_every=0", "data.heldout=", "cluster.local_nodes=1"),
    )
    try:
        run.reach(1)
        wait_for(lambda: engine.running() >= 8, "requests in flight")
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait(10)
        engine.start()
        summary = run.end(90)
        assert (summary["outcome"], summary["steps"], summary["cells"]["healed"]) == ("finished", 4, 0), run.tail()
        assert summary["groups"]["committed"] == summary["groups"]["dispatched"] == 32
        lines = [json.loads(line) for line in (run.run_dir / "ledger.jsonl").read_text().splitlines()]
        assert {version for line in lines for version in line["weight_versions"]} == {1}
        assert engine.process.poll() is None and engine.get("/ready") is not None
        assert json.loads(engine.get("/model_info"))["weight_version"] == "1"
        assert run.left() == []
    finally:
        run.close()
        engine.process.kill()
        engine.process.wait(10)
