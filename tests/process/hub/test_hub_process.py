"""A real hub with scripted agents, clients and operators."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from miles_hpc.config.timing import Timing
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    AgentHello,
    ClientWelcome,
    Done,
    FinishRun,
    Heartbeat,
    LeaseRenewed,
    PoolAddrs,
    Progress,
    Refused,
    ReplaceCell,
    ReservePorts,
    Shutdown,
    StartWorker,
    Superseded,
    Welcome,
)
from miles_hpc.wire.operator import OperatorClient
from miles_hpc.wire.rendezvous import newest
from miles_hpc.wire.security import load_http_key
from miles_hpc.wire.sockets import HubRefused

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]


def all_ready(client):
    books = client.of(PoolAddrs)
    return books and all(cells and all(c.ready for c in cells) for cells in books[-1].pools.values())


def started(hub, *agents):
    """Every pool of the default config runs; returns the driver's link."""
    hub.pump(lambda: any("driver-00000-00000" in a.running for a in agents), "the driver's start")
    driver = hub.client("driver-00000-00000")
    hub.pump(lambda: all_ready(driver), "all cells ready")
    return driver


def read(path):
    return json.loads(path.read_text())


def test_a_run_from_hello_to_verdict(start_hub):
    hub = start_hub(nodes=2)
    first = hub.agent(0)
    assert isinstance(first.answer, Welcome) and first.answer.node == "node-00000"
    second = hub.agent(1)
    driver = started(hub, first, second)
    assert isinstance(driver.answer, ClientWelcome)
    assert "driver-00000-00000" in second.running, "stateful cells avoid the hub's node"
    driver.send(Progress(step=1, weight_version=2, summary={"steps": 1}))
    hub.pump(lambda: read(hub.run_dir / "status.json")["step"] == 1, "status.json")
    driver.send(FinishRun(outcome="finished", summary={"steps": 20, "weight_version": 21}, call_id="f"))
    assert hub.end() == 0
    assert driver.of(Done) == [Done(call_id="f")]
    assert [a.of(Shutdown) for a in (first, second)] == [[Shutdown(reason="finished", exit_code=0)]] * 2
    summary = read(hub.run_dir / "summary.json")
    assert summary == read(hub.run_dir / "verdicts" / "attempt-0.json")
    assert (summary["outcome"], summary["steps"], summary["weight_version"]) == ("finished", 20, 21)
    assert summary["cells"] == {"started": 11, "healed": 0}
    seconds = summary["seconds"]
    assert 0 < seconds["ready"] <= seconds["first_step"] <= seconds["total"]
    assert read(hub.run_dir / "status.json")["outcome"] == "finished"
    events = [json.loads(line)["event"] for line in (hub.run_dir / "logs/attempt-0/hub.jsonl").read_text().splitlines()]
    assert events[0] == "hub_started" and events.count("verdict") == 1 and events.count("cell_ready") == 11


def test_a_dead_worker_is_healed_and_clients_are_told(start_hub):
    hub = start_hub()
    agent = hub.agent(0)
    driver = started(hub, agent)
    agent.worker_dies("engine-policy-0-00001-00000", exit_code=None, signal=9)

    def healed():
        cells = driver.of(PoolAddrs)[-1].pools["engine-policy-0"]
        return len(cells) == 2 and cells[1].generation == Generation(1, 2) and cells[1].ready

    hub.pump(healed, "the heal")
    assert driver.of(PoolAddrs)[-1].healed == 1
    orders = [o for o in agent.of(ReservePorts) if o.worker == "engine-policy-0-00001-00000"]
    assert orders[-1].keep, "a cell that starts again on its node keeps its ports"
    controller = hub.client("controller-00000-00000")
    controller.send(ReplaceCell(cell="engine-policy-0-00000", generation=Generation(1, 1), reason="sick", call_id="r"))
    hub.pump(lambda: driver.of(PoolAddrs)[-1].healed == 2, "the replacement")
    assert controller.of(Done) == [Done(call_id="r")]


def test_a_driver_that_always_ends_without_finish_fails_the_run(start_hub):
    hub = start_hub()
    agent = hub.agent(0)
    started(hub, agent)
    for generation in range(1, 7):
        hub.pump(lambda n=generation: runs(agent, "driver-00000-00000", n), f"generation {generation}", 40)
        agent.worker_dies("driver-00000-00000", exit_code=3, log_path="/logs/driver.log")
    assert hub.end() == 0
    summary = read(hub.run_dir / "summary.json")
    assert (summary["outcome"], summary["exit_code"]) == ("failed", 1)
    for part in ("group training ended 6 times", "driver-00000", "exit code 3", "/logs/driver.log"):
        assert part in summary["reason"]
    assert agent.of(Shutdown) == [Shutdown(reason="failed", exit_code=1)]


def runs(agent, worker, n):
    return worker in agent.running and agent.running[worker].generation.n == n


def test_an_operator_sees_the_run_and_cancels_it(start_hub):
    hub = start_hub()
    agent = hub.agent(0)
    started(hub, agent)
    with OperatorClient(hub.run_dir) as operator:
        status = operator.status()
        assert [n.node for n in status.nodes] == ["node-00000"] and status.epoch == 1
        assert {c.cell for c in operator.cells()} == {c.cell for c in status.cells}
        operator.cancel("enough")
    assert hub.end() == 0
    summary = read(hub.run_dir / "summary.json")
    assert (summary["outcome"], summary["reason"], summary["exit_code"]) == ("cancelled", "enough", 130)


def test_garbage_and_messages_above_a_role_never_end_the_loop(start_hub, raw_link):
    hub = start_hub()
    worker, operator = raw_link(hub, "worker"), raw_link(hub, "operator")
    for frames in ([b""], [b"x" * 1000], [b"a", b"b", b"c"], [worker._header, b"\xc1\xff"], [worker._header, b"\x80"]):
        for _ in range(20):
            worker.socket.send_multipart(frames)
    hello = AgentHello(
        incarnation="x",
        node_index=0,
        node_key="k",
        host="h",
        pid=1,
        address="127.0.0.1",
        package_version="",
        digest="",
    )
    for link in (worker, operator):
        assert link.send(hello)
        deadline, codes = time.monotonic() + 10, []
        while "role" not in codes:
            assert time.monotonic() < deadline, codes
            link.socket.poll(200)
            codes += [m.code for m in link.receive() if isinstance(m, Refused)]
    agent = hub.agent(0)
    started(hub, agent)
    assert hub.process.poll() is None
    lines = (hub.run_dir / "logs/attempt-0/hub.jsonl").read_text().splitlines()
    assert sum('"refused a message' in line for line in lines) <= 10, "logged once a second at most"


def test_a_second_agent_for_a_node_is_refused_with_the_firsts_pid(start_hub):
    hub = start_hub()
    agent = hub.agent(0)
    with pytest.raises(HubRefused, match="pid 10 on h0"):
        hub.agent(0, incarnation="other")
    started(hub, agent)


def test_an_agent_with_another_config_is_refused(start_hub):
    hub = start_hub()
    with pytest.raises(HubRefused, match=r"config\.resolved\.toml"):
        hub.agent(0, digest="0" * 64)
    with pytest.raises(HubRefused, match=r"9\.9"):
        hub.agent(0, package_version="9.9")


def test_a_client_of_an_old_generation_is_superseded(start_hub):
    hub = start_hub()
    agent = hub.agent(0)
    started(hub, agent)
    late = hub.client("engine-policy-0-00000-00000", Generation(0, 9))
    assert isinstance(late.answer, Superseded)


def test_a_term_signal_cancels_the_run(start_hub):
    hub = start_hub()
    agent = hub.agent(0)
    started(hub, agent)
    hub.process.send_signal(signal.SIGTERM)
    assert hub.end() == 0
    assert read(hub.run_dir / "summary.json")["outcome"] == "cancelled"
    assert agent.of(Shutdown) == [Shutdown(reason="cancelled", exit_code=130)]


def test_a_silent_node_loses_its_stateless_cells_while_the_lease_is_renewed(start_hub):
    hub = start_hub(nodes=2)
    first, second = hub.agent(0), hub.agent(1)
    started(hub, first, second)
    lost = {worker for worker in second.running if worker.startswith(("engine", "router", "session"))}
    hub.peers.remove(second)

    def replaced():
        first.send(LeaseRenewed(counter=1))
        return lost <= set(first.running)

    hub.pump(replaced, "the cells of the lost node", 30)
    second.link.close()
    assert not first.of(Shutdown)
    assert not any(worker.startswith("driver") for worker in first.running), "it waits for the fence"


def test_what_cannot_be_killed_costs_an_engine_its_node_and_a_driver_the_run(start_hub):
    """The engine goes on elsewhere after its patience; the driver must not run twice, so the run drains."""
    timing = Timing(
        suspect=4.0, dead=6.0, failover_max=7.0, hub_stall=8.0, fence=13.5, stop_grace=1.0, replace_timeout=35.0
    )
    hub = start_hub(nodes=2, timing=timing)
    first, second = hub.agent(0), hub.agent(1)
    started(hub, first, second)
    engine = next(worker for worker in second.running if worker.startswith("engine-policy"))
    begun = time.monotonic()
    second.worker_hangs(engine)
    second.worker_hangs("driver-00000-00000")

    def moved():
        second.send(second.table())
        return runs(first, engine, 2)

    hub.pump(moved, "the engine on the other node", 50)
    assert time.monotonic() - begun > timing.stop_grace + timing.fence
    assert not any("driver-00000-00000" in agent.running for agent in (first, second))
    hub.pump(lambda: second.of(Shutdown), "the verdict", 60)
    summary = read(hub.run_dir / "summary.json")
    assert (summary["outcome"], summary["exit_code"]) == ("drained", 75)
    assert "driver-00000-00000 (pid " in summary["reason"] and "on node-00001 (h1) has not ended" in summary["reason"]
    lines = (hub.run_dir / "logs/attempt-0/hub.jsonl").read_text().splitlines()
    named = [event for event in map(json.loads, lines) if event["event"] == "worker_does_not_end"]
    assert {(event["worker"], event["node"], event["host"]) for event in named} == {
        (worker, "node-00001", "h1") for worker in (engine, "driver-00000-00000")
    }
    assert hub.end() == 0


def test_of_two_claimants_of_an_epoch_one_is_the_hub(start_hub):
    hub = start_hub()
    argv = [sys.executable, "-m", "miles_hpc.hub.run", "--run-dir", str(hub.run_dir), "--attempt", "0"]
    argv += ["--address", "127.0.0.1", "--epoch", "2", "--node"]
    claimants = [subprocess.Popen([*argv, f"node-0000{i}"], stderr=subprocess.DEVNULL) for i in (1, 2)]
    try:
        (ended,) = wait_for_one(claimants)
        assert ended.returncode == 3
        (winner,) = [claimant for claimant in claimants if claimant is not ended]
        assert winner.poll() is None
        published = newest(hub.run_dir, 0)
        assert published.epoch == 2 and published.node == f"node-0000{claimants.index(winner) + 1}"
    finally:
        for claimant in claimants:
            claimant.kill()
            claimant.wait()


def wait_for_one(processes):
    deadline = time.monotonic() + 20
    while not (ended := [process for process in processes if process.poll() is not None]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return ended


def test_a_hub_that_read_another_configuration_does_not_claim(start_hub):
    hub = start_hub()
    resolved = hub.run_dir / "config.resolved.toml"
    resolved.chmod(0o644)
    resolved.write_text(resolved.read_text() + "\n# changed by hand\n")
    argv = [sys.executable, "-m", "miles_hpc.hub.run", "--run-dir", str(hub.run_dir), "--attempt", "0"]
    done = subprocess.run([*argv, "--address", "127.0.0.1"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1 and "must not change during an attempt" in done.stderr
    assert newest(hub.run_dir, 0).epoch == 1


def test_the_hub_dies_with_its_agent(start_hub):
    parent = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    hub = start_hub(parent=parent)
    (child,) = psutil.Process(hub.process.pid).children()
    hub.process.kill()
    hub.process.wait()
    child.wait(timeout=10)


def test_the_hub_is_small_and_starts_fast(start_hub):
    hub = start_hub(nodes=2)
    process = psutil.Process(hub.process.pid)
    cpu = process.cpu_times()
    assert cpu.user + cpu.system <= 0.5, "seconds of CPU until the rendezvous file stands"
    first, second = hub.agent(0), hub.agent(1)
    started(hub, first, second)
    assert process.memory_full_info().pss <= 40 * 2**20


def test_ten_thousand_heartbeats_do_not_keep_the_hub_from_its_clock(start_hub):
    hub = start_hub()
    agent = hub.agent(0)
    started(hub, agent)
    for seq in range(10_000):
        agent.link.send(Heartbeat(seq=seq))
    before = time.monotonic()
    with OperatorClient(hub.run_dir) as operator:
        operator.status()
    assert time.monotonic() - before < 5.0
    assert agent.of(StartWorker)


def fetch(hub, path, key):
    url = read(hub.run_dir / "status.json")["http"] + path
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as answer:
        return answer.read().decode()


def test_status_events_and_metrics_are_served_over_http_to_those_with_the_run_s_key(start_hub):
    hub = start_hub()
    agent = hub.agent(0)
    driver = started(hub, agent)
    driver.send(Progress(step=3, weight_version=4))
    hub.pump(lambda: read(hub.run_dir / "status.json")["step"] == 3, "status.json")
    key = load_http_key(hub.run_dir, 0)
    status = json.loads(fetch(hub, "/status", key))
    assert status["step"] == 3 and status["nodes"][0]["state"] == "alive" and status["age_s"] < 5
    events = json.loads(fetch(hub, "/events", key))
    assert events["events"][0]["event"] == "hub_started" and events["next"] == len(events["events"])
    metrics = fetch(hub, "/metrics", key)
    assert 'miles_hpc_nodes{state="alive"} 1.0' in metrics and "miles_hpc_step 3.0" in metrics
    with pytest.raises(urllib.error.HTTPError, match="401"):
        fetch(hub, "/status", "guessed")
    assert psutil.Process(hub.process.pid).memory_full_info().uss < 40e6
