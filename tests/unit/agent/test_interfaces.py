"""The interface of an address, and what it means for collectives."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from miles_hpc.agent import cgroups
from miles_hpc.agent.interfaces import collective_variables, interface_of
from miles_hpc.agent.log_files import LogFiles
from miles_hpc.agent.scratch import Scratch
from miles_hpc.agent.surroundings import NodeSurroundings
from miles_hpc.launch.node_address import addresses
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import Probe, StartWorker

pytestmark = pytest.mark.unit


def test_each_address_of_this_machine_has_the_interface_that_psutil_names():
    found = {address: name for name, address in addresses()}
    assert found and {address: interface_of(address) for address in found} == found


def test_any_loopback_address_is_the_loopback_interface_s_and_a_foreign_one_is_nobody_s():
    loopback = next(name for name, address in addresses() if address == "127.0.0.1")
    assert interface_of("127.0.0.77") == loopback
    assert interface_of("192.0.2.1") == interface_of("2001:db8::1") == ""
    assert set(psutil.net_if_addrs()) >= {loopback}


@pytest.mark.parametrize(
    ("environ", "ordered", "expected"),
    [
        ({}, {}, ("=ib0", "ib0")),
        ({"NCCL_SOCKET_IFNAME": "eth"}, {}, ("eth", "ib0")),
        ({"GLOO_SOCKET_IFNAME": "a"}, {"NCCL_SOCKET_IFNAME": "hsn"}, ("hsn", "a")),
    ],
)
def test_collectives_use_the_node_s_interface_unless_the_user_has_chosen(tmp_path: Path, environ, ordered, expected):
    node = NodeSurroundings(
        LogFiles(tmp_path / "local", tmp_path),
        Scratch("k", {"TMPDIR": str(tmp_path)}),
        groups=cgroups.WorkerGroups("unused", []),
        environ=environ,
        interface="ib0",
    )
    order = StartWorker(
        worker="pool-00000-00000", generation=Generation(1, 1), argv=["x"], env=ordered, ports={}, probe=Probe()
    )
    made = node.make(order)
    assert (made.env["NCCL_SOCKET_IFNAME"], made.env["GLOO_SOCKET_IFNAME"]) == expected
    node.remove(made)
    node.close()


def test_without_an_interface_the_libraries_choose():
    assert collective_variables("") == {}
