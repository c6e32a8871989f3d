"""HubClient in a process of its own, and hubs that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_hpc import wire
from miles_hpc.wire.client import HubClient
from miles_hpc.wire.security import secrets_dir

pytestmark = pytest.mark.process

HUB = """
    import sys
    from pathlib import Path
    from miles_hpc.wire.address import HostAndPort
    from miles_hpc.wire.messages import ClientHello, ClientWelcome, PoolAddrs, Progress, Superseded
    from miles_hpc.wire.rendezvous import Rendezvous, publish
    from miles_hpc.wire.security import KeyPair, role_keys
    from miles_hpc.wire.sockets import HubSocket

    run_dir, epoch, superseded = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "superseded"
    keys = KeyPair.generate()
    with HubSocket(HostAndPort("127.0.0.1", 0), run_id="r1", keys=keys, roles=role_keys(run_dir, 1)) as hub:
        publish(run_dir, Rendezvous(run_id="r1", attempt=1, epoch=epoch, addresses=["127.0.0.1"], port=hub.port,
                                    public_key=keys.public))
        print("up")
        while True:
            hub.socket.poll(100)
            for peer, role, message in hub.drain():
                if isinstance(message, ClientHello):
                    hub.send(peer, ClientWelcome(epoch=epoch, run_id="r1", attempt=1))
                    hub.send(peer, PoolAddrs(revision=1, pools={f"epoch-{epoch}": []}))
                elif isinstance(message, Progress) and superseded:
                    hub.send(peer, Superseded(reason="the test says so"))
"""

PROGRAM = """
    import threading
    from miles_hpc.wire.client import HubClient
    from miles_hpc.wire.messages import Progress
    from miles_hpc.wire.program import setup_logging
    from miles_hpc.wire.worker_env import WorkerEnv

    setup_logging()
    with HubClient(WorkerEnv.from_environ()) as client:
        print("welcomed")
        client.progress(Progress(step=1, weight_version=1))
        threading.Event().wait(100)
"""


def test_a_superseded_program_exits_at_once_with_its_reason_in_the_log(start, run_dir, worker_env, monkeypatch, capfd):
    hub = start(HUB, run_dir, 1, "superseded")
    assert hub.line() == "up"
    for name, value in worker_env.to_environ().items():
        monkeypatch.setenv(name, value)
    program = start(PROGRAM)
    assert program.line() == "welcomed"
    assert program.process.wait(30) == 1
    assert "leaving at once: superseded: the test says so" in capfd.readouterr().err


def test_a_hub_killed_and_started_again_is_followed(start, run_dir, worker_env):
    first = start(HUB, run_dir, 1, "")
    assert first.line() == "up"
    with HubClient(worker_env) as client:
        client.wait_for(lambda pools: "epoch-1" in pools, "the first hub's book", 30)
        first.kill()
        second = start(HUB, run_dir, 2, "")
        assert second.line() == "up"
        client.wait_for(lambda pools: "epoch-2" in pools, "the second hub's book", 30)
        assert client.epoch == 2


def test_a_hub_that_has_nothing_new_to_say_is_not_taken_for_lost(start, run_dir, worker_env):
    hub = start(HUB, run_dir, 1, "")
    assert hub.line() == "up"
    lost = threading.Event()
    timing = SimpleNamespace(heartbeat=0.05, fence=2.0)
    with HubClient(worker_env, timing=timing, on_fatal=lambda reason: lost.set()):
        assert not lost.wait(3.0)
        hub.process.send_signal(signal.SIGSTOP)
        try:
            assert lost.wait(30)
        finally:
            hub.process.send_signal(signal.SIGCONT)


def test_a_program_started_by_hand_says_that_it_was(tmp_path):
    script = "from miles_hpc.wire.worker_env import WorkerEnv; WorkerEnv.from_environ()"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MILES_HPC_")}
    found = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "MILES_HPC_WORKER is not set: this program is started by an agent" in found.stderr


def test_keys_are_never_in_the_environment_of_a_worker(worker_env):
    secrets = [path.read_text() for path in secrets_dir(worker_env.run_dir, 1).iterdir()]
    environ = " ".join(worker_env.to_environ().values())
    assert not any(secret in environ for secret in secrets)


MODULES = sorted(path.stem for path in Path(wire.__file__).parent.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("order", [MODULES, MODULES[::-1]], ids=["forwards", "backwards"])
def test_each_module_imports_alone_and_light(order):
    script = """
import importlib, sys
heavy = {"aiohttp", "numpy", "torch", "transformers", "psutil", "rich", "jinja2", "submitit", "hypothesis"}
for name in sys.argv[1:]:
    for loaded in [key for key in sys.modules if key.startswith("miles_hpc")]:
        del sys.modules[loaded]
    importlib.import_module(f"miles_hpc.wire.{name}")
    above = {key.split(".")[1] for key in sys.modules if key.startswith("miles_hpc.")} - {"wire", "config"}
    assert not above, (name, above)
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script, *order], check=True, timeout=60)
