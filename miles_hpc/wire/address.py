"""HostAndPort: the only place that knows IPv6 brackets."""

from __future__ import annotations

import msgspec


class HostAndPort(msgspec.Struct, frozen=True):
    """A listening address. `host` is an IP literal or a name, never in brackets."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if self.host.startswith("[") or not self.host:
            raise ValueError(f"host {self.host!r} must be a bare name or IP literal")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port} is outside 0..65535")

    @property
    def netloc(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def addr(self) -> str:
        """`http://host:port`."""
        return f"http://{self.netloc}"

    @property
    def zmq(self) -> str:
        """`tcp://host:port`; a ZeroMQ socket that meets an IPv6 host needs its IPV6 option set."""
        return f"tcp://{self.netloc}"

    @classmethod
    def parse(cls, text: str) -> HostAndPort:
        """Read `host:port`, `[v6]:port`, with or without a scheme.

        Raises:
            ValueError: when host or port is missing, or an IPv6 host has no brackets.
        """
        rest = text.split("://", 1)[-1]
        host, colon, port = rest.rpartition(":")
        if not colon or not port.isdigit():
            raise ValueError(f"{text!r} is not host:port")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"{text!r}: an IPv6 host needs brackets")
        return cls(host, int(port))
