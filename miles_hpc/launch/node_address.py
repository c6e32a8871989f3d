"""The address at which this node's workers are reached by the other nodes of a run."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence

import psutil

_VIRTUAL = ("docker", "virbr", "veth", "cni", "flannel", "podman", "br-")
_ANY_PORT = 9


class NoAddress(Exception):
    """No address of this node fits `network.interface` and `network.subnet`; the text lists what there is."""


def choose_address(interface: str = "", subnet: str = "", peers: Sequence[str] = ()) -> str:
    """An IP literal of this node.

    Args:
        interface: only addresses of this interface; empty: of any.
        subnet: CIDR that the address must lie in; empty: any.
        peers: names of the other nodes. Of several addresses the one is taken from which the kernel reaches them.

    Raises:
        NoAddress: when none fits.
    """
    found = list(addresses())
    allowed = [
        (name, address)
        for name, address in found
        if (not interface or name == interface)
        and (not subnet or ipaddress.ip_address(address) in ipaddress.ip_network(subnet, strict=False))
        and not ipaddress.ip_address(address).is_link_local
        # Loopback only for who names it: other nodes never reach it.
        and (bool(interface) or not ipaddress.ip_address(address).is_loopback)
    ]
    if not allowed:
        wanted = " and ".join(
            text
            for text in (interface and f"network.interface = {interface!r}", subnet and f"network.subnet = {subnet!r}")
            if text
        )
        there = ", ".join(f"{name} {address}" for name, address in found) or "none"
        raise NoAddress(f"no address of {socket.gethostname()} fits {wanted or 'a network'}; it has: {there}")
    fit = {address for _, address in allowed}
    for peer in peers:
        source = source_towards(peer)
        if source in fit:
            return source
    # Bridges of container engines have an address that every node has.
    return min(allowed, key=lambda pair: (pair[0].startswith(_VIRTUAL), ":" in pair[1]))[1]


def other_addresses(chosen: str, interface: str = "", subnet: str = "") -> list[str]:
    """More addresses at which other nodes may reach this one; none when `network` names one interface or subnet.

    Never loopback (some hosts files give a node's own name 127.0.1.1), link-local, or those of a container engine's
    bridges, which every node has.
    """
    if interface or subnet:
        return []
    return [
        address
        for name, address in addresses()
        if address != chosen and not name.startswith(_VIRTUAL) and _is_reachable(ipaddress.ip_address(address))
    ]


def _is_reachable(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return not (address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast)


def addresses() -> Iterable[tuple[str, str]]:
    """(interface, IP literal) of every interface that is up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name in up and entry.family in (socket.AF_INET, socket.AF_INET6):
                yield name, entry.address.partition("%")[0]


def source_towards(peer: str) -> str:
    """The address that the kernel would send from to reach `peer`; "" when it has no route or the name is unknown.

    Nothing is sent: connecting a datagram socket only looks up the route.
    """
    try:
        found = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                source = str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
        # Some hosts files give a node's own name, or worse its neighbour's, a loopback address.
        if not ipaddress.ip_address(source).is_loopback:
            return source
    return ""
