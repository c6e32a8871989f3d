"""Which addresses of a node others may use."""

from __future__ import annotations

import pytest

from miles_hpc.launch import node_address
from miles_hpc.launch.node_address import NoAddress, choose_address, other_addresses

pytestmark = pytest.mark.unit

FOUND = [
    ("lo", "127.0.0.1"),
    ("lo", "127.0.1.1"),
    ("lo", "::1"),
    ("docker0", "172.17.0.1"),
    ("eth0", "10.0.0.7"),
    ("eth0", "fe80::1"),
    ("eth0", "fd00::7"),
    ("ib0", "192.168.5.7"),
    ("ib0", "169.254.3.3"),
]


@pytest.fixture(autouse=True)
def interfaces(monkeypatch):
    monkeypatch.setattr(node_address, "addresses", lambda: iter(FOUND))


def test_loopback_link_local_and_bridges_are_never_chosen():
    assert choose_address() == "10.0.0.7"
    assert other_addresses("10.0.0.7") == ["fd00::7", "192.168.5.7"]


def test_interface_and_subnet_narrow_the_choice_to_one():
    assert choose_address(interface="ib0") == "192.168.5.7"
    assert choose_address(subnet="fd00::/8") == "fd00::7"
    assert other_addresses("192.168.5.7", interface="ib0") == other_addresses("fd00::7", subnet="fd00::/8") == []


def test_loopback_is_for_who_names_it():
    assert choose_address(interface="lo") == "127.0.0.1"


def test_where_nothing_fits_what_there_is_is_listed():
    with pytest.raises(NoAddress, match=r"network\.subnet = '10\.9\.0\.0/16'.*eth0 10\.0\.0\.7"):
        choose_address(subnet="10.9.0.0/16")


def test_of_several_the_one_is_taken_that_reaches_the_peers(monkeypatch):
    monkeypatch.setattr(
        node_address, "source_towards", lambda peer: {"a": "127.0.1.1", "b": "192.168.5.7"}.get(peer, "")
    )
    assert choose_address(peers=["unknown", "b"]) == "192.168.5.7"
    assert choose_address(peers=["a"]) == "10.0.0.7"
