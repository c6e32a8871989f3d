"""Which ports of a range a hub tries, and what it says when there is none."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from miles_hpc.agent.ports import PortLocks
from miles_hpc.hub.ports import HubPorts

pytestmark = pytest.mark.unit


@pytest.fixture
def locks(tmp_path: Path):
    made = PortLocks(str(tmp_path))
    yield made
    made.close()


def refuse(*busy: int, error: int = errno.EADDRINUSE):
    def open_at(port: int) -> int:
        if port in busy:
            raise OSError(error, "busy")
        return port

    return open_at


def test_without_a_range_any_port_will_do():
    assert HubPorts("10.0.0.1", None).listen(refuse()) == 0


def test_ports_come_from_the_end_of_the_range_each_once_and_taken_ones_are_left_out(locks):
    ports = HubPorts("10.0.0.1", (64000, 64004), locks)
    assert [ports.listen(refuse(64003)) for _ in range(3)] == [64004, 64002, 64001]


def test_a_range_that_is_used_up_is_named(locks):
    ports = HubPorts("10.0.0.1", (64000, 64001), locks)
    with pytest.raises(OSError, match=r"network.port_range = \[64000, 64001\] on 10.0.0.1: widen"):
        ports.listen(refuse(64000, 64001))


def test_an_address_that_is_no_good_is_not_tried_at_every_port(locks):
    tried = []

    def open_at(port: int) -> int:
        tried.append(port)
        raise OSError(errno.EADDRNOTAVAIL, "no such address")

    with pytest.raises(OSError, match="no such address"):
        HubPorts("10.0.0.1", (64000, 64004), locks).listen(open_at)
    assert tried == [64004]


def test_closing_it_gives_its_locks_back(locks):
    ports = HubPorts("10.0.0.1", (64000, 64004), locks)
    assert ports.listen(refuse()) == 64004 and locks._fd >= 0
    ports.close()
    assert locks._fd == -1


def test_without_a_range_there_is_nothing_to_close():
    HubPorts("10.0.0.1", None).close()
