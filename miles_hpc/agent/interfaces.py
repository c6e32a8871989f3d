"""Which network interface has this node's address: asked from the kernel, without a library that an agent has no other
use for."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator

_GET, _ADDRESS, _END, _ERROR = 22, 20, 3, 2  # RTM_GETADDR, RTM_NEWADDR, NLMSG_DONE, NLMSG_ERROR
_REQUEST, _DUMP = 0x1, 0x300
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER, _IFADDR, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
_PATIENCE_S = 2.0


def interface_of(address: str) -> str:
    """Name of the interface that a local address belongs to; "" when there is none, or the kernel does not say."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 4 and wanted.is_loopback:
        # The whole of 127.0.0.0/8 belongs to the loopback interface, which lists 127.0.0.1 alone.
        wanted = ipaddress.ip_address("127.0.0.1")
    try:
        return next((socket.if_indextoname(index) for index, found in _addresses() if found == wanted.packed), "")
    except OSError:
        return ""


def collective_variables(interface: str) -> dict[str, str]:
    """What makes collectives of several nodes use this interface; without it each library picks one by itself."""
    # NCCL takes a bare name for the beginning of one.
    return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface} if interface else {}


def _addresses() -> Iterator[tuple[int, bytes]]:
    """(index of the interface, address) of every address of this machine."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(_PATIENCE_S)
        body = _IFADDR.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _GET, _REQUEST | _DUMP, 1, 0) + body)
        while True:
            data = kernel.recv(1 << 16)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_END, _ERROR):
                    return
                if kind == _ADDRESS:
                    yield from _of_message(data[_HEADER.size : length])
                data = data[_aligned(length) :]


def _of_message(message: bytes) -> Iterator[tuple[int, bytes]]:
    *_, index = _IFADDR.unpack_from(message)
    rest = message[_IFADDR.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        # Of a point-to-point interface, the plain address is that of the other end.
        if kind in (_IFA_ADDRESS, _IFA_LOCAL):
            yield index, rest[_ATTRIBUTE.size : length]
        rest = rest[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
