"""A hub whose surroundings are bad: its address, its limits, its file system."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
from concurrent import futures

import pytest

from miles_hpc.config.load import write_resolved
from miles_hpc.config.node import NetworkConfig
from miles_hpc.config.schema import ClusterConfig, Config
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import Done, FinishRun, PoolAddrs, Shutdown
from miles_hpc.wire.operator import OperatorClient
from miles_hpc.wire.security import create_secrets
from tests.disks import FrozenDisk, SmallDisk

from .test_hub_process import started

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def hub_alone(run_dir, nodes=1, address="127.0.0.1", limits=None, network=None):
    """Run a hub that is expected to end by itself; returns its exit code and its log."""
    run_dir.mkdir()
    write_resolved(Config(cluster=ClusterConfig(local_nodes=nodes), network=network or NetworkConfig()), run_dir)
    create_secrets(run_dir, 0)
    argv = [sys.executable, "-m", "miles_hpc.hub.run", "--run-dir", str(run_dir), "--attempt", "0"]
    lower = None if limits is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    done = subprocess.run(
        [*argv, "--address", address], preexec_fn=lower, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, [json.loads(line) for line in read_events(run_dir)]


def read_events(run_dir):
    return (run_dir / "logs" / "attempt-0" / "hub.jsonl").read_text().splitlines()


def test_an_address_that_is_not_this_machine_s_is_named(tmp_path):
    code, events = hub_alone(tmp_path / "run", address="192.0.2.77")
    assert code == 1
    assert events[-1]["event"] == "hub_failed" and "cannot listen on 192.0.2.77" in events[-1]["reason"]
    assert not (tmp_path / "run" / "rendezvous" / "0" / "epoch-00001.json").exists()


@pytest.fixture
def busy_ports():
    """Two ports in a row that somebody listens on, at the end of a range whose other ports are below them."""
    for first in range(20500, 32000, 7):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in (first, first + 1):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            yield first, first + 1
            return


def test_a_hub_listens_in_the_range_of_the_run_and_leaves_out_a_port_that_is_taken(busy_ports, start_hub):
    taken, last = busy_ports
    low = taken - 100
    hub = start_hub(network=NetworkConfig(port_range=(low, last)))
    http = json.loads(read_events(hub.run_dir)[0])["http"]
    ports = {hub.rendezvous.port, hub.rendezvous.bulk_port, HostAndPort.parse(http).port}
    assert len(ports) == 3 and all(low <= port < taken for port in ports)


def test_a_range_without_a_free_port_is_named_in_one_line(busy_ports, tmp_path):
    code, events = hub_alone(tmp_path / "run", network=NetworkConfig(port_range=busy_ports))
    assert code == 1 and events[-1]["event"] == "hub_failed"
    first, last = busy_ports
    wanted = f"no free port for the hub in network.port_range = [{first}, {last}] on 127.0.0.1: widen the range"
    assert wanted in events[-1]["reason"]
    assert not (tmp_path / "run" / "rendezvous" / "0" / "epoch-00001.json").exists()


def test_a_hard_limit_of_open_files_below_the_need_is_refused_with_the_number(tmp_path):
    code, events = hub_alone(tmp_path / "run", nodes=1000, limits=(256, 256))
    assert code == 1 and events[-1]["event"] == "hub_failed"
    assert "open files, but the limit is 256 and the hard limit 256" in events[-1]["reason"]
    assert "1000 nodes" in events[-1]["reason"]


def test_a_soft_limit_below_the_need_is_raised(start_hub):
    hub = start_hub(nodes=1000, parent=["/bin/sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh"])
    soft, _ = resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE)
    assert soft > 1000


@pytest.fixture
def small_disk(tmp_path):
    disk = SmallDisk(tmp_path, mebibytes=2)
    yield disk
    disk.close()


def healed(hub, agent, driver, worker):
    before = driver.of(PoolAddrs)[-1].healed
    agent.worker_dies(worker)
    hub.pump(lambda: driver.of(PoolAddrs)[-1].healed == before + 1, "the heal")
    hub.pump(lambda: worker in agent.running, "the next generation")


def test_on_a_full_disk_the_run_goes_on_and_ends(small_disk, start_hub_in):
    hub = start_hub_in(small_disk.path / "run")
    agent = hub.agent(0)
    driver = started(hub, agent)
    small_disk.fill()
    healed(hub, agent, driver, "engine-policy-0-00001-00000")
    driver.send(FinishRun(outcome="finished", call_id="f"))
    assert hub.end() == 1, "the verdict could not be written, and the hub's exit code says so"
    assert driver.of(Done) == [Done(call_id="f")]
    assert agent.of(Shutdown) == [Shutdown(reason="finished", exit_code=0)]


@pytest.fixture
def frozen_disk(tmp_path):
    disk = FrozenDisk(tmp_path)
    yield disk
    disk.close()


def test_a_file_system_that_stands_still_holds_up_no_heal(frozen_disk, start_hub_in):
    hub = start_hub_in(frozen_disk.path / "run")
    agent = hub.agent(0)
    driver = started(hub, agent)
    frozen_disk.freeze(25)
    healed(hub, agent, driver, "engine-policy-0-00001-00000")
    healed(hub, agent, driver, "engine-policy-0-00000-00000")
    with OperatorClient(hub.run_dir, timeout_s=20.0) as operator, futures.ThreadPoolExecutor(1) as thread:
        generation = agent.running["session-server-00000-00000"].generation
        answer = thread.submit(operator.stop_cell, "session-server-00000", generation)
        hub.pump(lambda: "session-server-00000-00000" not in agent.running, "the order to be carried out")
        with pytest.raises(futures.TimeoutError):
            answer.result(0.5)
        frozen_disk.thaw()
        answer.result(20)
    (kept,) = (hub.run_dir / "journal").glob("*.json")
    assert json.loads(kept.read_text())["stopped"] == ["session-server-00000"]
    driver.send(FinishRun(outcome="finished", call_id="f"))
    assert hub.end() == 0
    assert json.loads((frozen_disk.path / "run" / "summary.json").read_text())["outcome"] == "finished"
