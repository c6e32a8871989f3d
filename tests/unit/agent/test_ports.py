"""Choosing ports, on real sockets of this process."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from miles_hpc.agent import ports as module
from miles_hpc.agent.ports import PortError, PortLocks, Ports, default_range, start_offset
from miles_hpc.wire.messages import PortInfo

pytestmark = pytest.mark.unit

A, B = "pool-00000-00000", "pool-00001-00000"
SECOND_RANK = "pool-00000-00001"


@pytest.fixture
def ports(tmp_path: Path):
    made = Ports("127.0.0.9", run_id="r", attempt=0, node="node-00000", locks=PortLocks(str(tmp_path)))
    yield made
    made.close()


@pytest.fixture
def busy_port():
    with socket.create_server(("127.0.0.9", 0)) as server:
        yield server.getsockname()[1]


def test_the_default_range_stays_out_of_the_ephemeral_ports():
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first, last = default_range()
    assert first < last < low or first > low


def test_runs_and_nodes_start_at_different_places_and_always_at_the_same():
    keys = [(run, attempt, node) for run in ("a", "b") for attempt in (0, 1) for node in ("n0", "n1")]
    offsets = [start_offset(*key, 12768) for key in keys]
    assert len(set(offsets)) == len(keys) and all(0 <= offset < 12768 for offset in offsets)
    assert offsets == [start_offset(*key, 12768) for key in keys]


def test_workers_get_different_ports(ports):
    infos = [PortInfo(name="a"), PortInfo(name="b")]
    first, second = ports.reserve(A, infos, 0, {}), ports.reserve(B, infos, 1, {})
    assert len({*first.values(), *second.values()}) == 4


def test_a_block_is_consecutive_and_belongs_to_one_worker(ports):
    block = ports.reserve(A, [PortInfo(name="nccl", num_consecutive=5)], 0, {})["nccl"]
    others = {ports.reserve(f"pool-{i:05d}-00000", [PortInfo(name="p")], i, {})["p"] for i in range(1, 20)}
    assert not others & set(range(block, block + 5))


def test_a_block_that_does_not_fit_at_the_end_of_the_range_begins_anew(tmp_path):
    ports = Ports(
        "127.0.0.9", run_id="r", attempt=0, node="n", port_range=(21000, 21009), locks=PortLocks(str(tmp_path))
    )
    block = PortInfo(name="p", num_consecutive=4)
    found = [ports.reserve(f"pool-{i:05d}-00000", [block], i, {})["p"] for i in range(2)]
    assert all(21000 <= first <= 21006 for first in found) and abs(found[0] - found[1]) >= 4
    with pytest.raises(PortError, match=r"no 4 consecutive free ports in 21000\.\.21009"):
        ports.reserve("pool-00009-00000", [PortInfo(name="p", num_consecutive=4)], 9, {})
    ports.close()


def test_an_empty_range_is_refused():
    with pytest.raises(PortError, match="port_range"):
        Ports("127.0.0.9", run_id="r", attempt=0, node="n", port_range=(5, 4))


def test_a_busy_dynamic_port_is_passed_over(tmp_path, busy_port):
    ports = Ports(
        "127.0.0.9",
        run_id="r",
        attempt=0,
        node="n",
        # Wide enough that what else this machine does there leaves some free.
        port_range=(busy_port - 100, min(65535, busy_port + 100)),
        locks=PortLocks(str(tmp_path)),
    )
    ports._cursor = busy_port - 1 - ports.first
    for i in range(3):
        assert ports.reserve(f"pool-{i:05d}-00000", [PortInfo(name="p")], i, {})["p"] != busy_port
    ports.close()


def test_a_fixed_port_is_offset_by_the_cell(ports):
    info = PortInfo(name="http", static_port=23456, allow_dynamic=False, offset_by_cell=True)
    assert ports.reserve("pool-00003-00000", [info], 3, {}) == {"http": 23459}


def test_two_workers_cannot_have_one_fixed_port(ports):
    info = PortInfo(name="http", static_port=23456, allow_dynamic=False)
    ports.reserve(A, [info], 0, {})
    with pytest.raises(PortError, match=f"reserved for {A}"):
        ports.reserve(B, [info], 1, {})


def test_a_failed_reservation_holds_nothing(ports, busy_port):
    infos = [PortInfo(name="a", static_port=23456), PortInfo(name="b", static_port=busy_port, allow_dynamic=False)]
    with pytest.raises(PortError):
        ports.reserve(A, infos, 0, {})
    assert ports.reserve(B, [infos[0]], 1, {}) == {"a": 23456}


def test_kept_ports_are_taken_where_they_are_free(ports, busy_port):
    infos = [PortInfo(name="a"), PortInfo(name="b")]
    again = ports.reserve(A, infos, 0, {"a": 23999, "b": busy_port})
    assert again["a"] == 23999 and again["b"] != busy_port


def test_released_ports_can_be_reserved_again(ports):
    info = PortInfo(name="p", static_port=23456, allow_dynamic=False)
    ports.reserve(A, [info], 0, {})
    ports.release(A)
    assert ports.reserve(B, [info], 0, {}) == {"p": 23456}


def test_only_worker_0_of_a_cell_has_its_master_ports(ports):
    infos = [PortInfo(name="rpc"), PortInfo(name="master", mode="master")]
    assert set(ports.reserve(A, infos, 0, {})) == {"rpc", "master"}
    assert set(ports.reserve(SECOND_RANK, infos, 0, {})) == {"rpc"}


def test_busy_names_the_port_and_its_holder(ports):
    port = ports.reserve(A, [PortInfo(name="http")], 0, {})["http"]
    assert ports.busy(A) == ""
    with socket.create_server(("127.0.0.9", port)):
        assert f"port {port} ('http')" in ports.busy(A) and "pid " in ports.busy(A)
    assert ports.busy("pool-00077-00000") == ""


def test_an_address_of_another_machine_is_named(ports):
    ports.address = "192.0.2.1"
    with pytest.raises(PortError, match=r"192\.0\.2\.1"):
        ports.reserve(A, [PortInfo(name="p")], 0, {})


def test_without_a_place_for_locks_ports_are_still_given(tmp_path):
    ports = Ports("127.0.0.9", run_id="r", attempt=0, node="n", locks=PortLocks(str(tmp_path / "missing")))
    assert ports.reserve(A, [PortInfo(name="p")], 0, {})["p"] > 0
    ports.close()


def test_a_link_in_place_of_the_lock_file_is_not_followed(tmp_path, monkeypatch):
    target = tmp_path / "victim"
    target.write_text("x")
    (tmp_path / f"miles-hpc-{module.os.getuid()}.ports").symlink_to(target)
    assert PortLocks(str(tmp_path))._fd == -1


def test_a_server_of_a_process_is_told_from_a_stranger_s(busy_port):
    assert module.is_served_by(busy_port, [module.os.getpid()])
    assert not module.is_served_by(busy_port, [1 << 23])
