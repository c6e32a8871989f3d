"""The hub's two sockets: control for agents and programs, bulk for operators. Neither can block the other.

What operators ask for is large (tables, events, dumps) and may be asked for often, by scripts that read slowly. It
has a socket, queues and a share of each turn of its own, so that a heartbeat never waits behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import zmq

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import Message
from miles_hpc.wire.security import KeyPair
from miles_hpc.wire.socket_options import Context, Socket, copy_what_comes
from miles_hpc.wire.sockets import HubSocket, HubSocketCounters, Received

BULK_QUEUE_LIMIT = 100
"""Answers that wait for one operator before more to it are dropped and counted."""
BULK_TURN = 16
"""Questions of operators that are taken in one turn of the hub's loop."""


class BulkPeer(bytes):
    """A peer of the bulk socket; on the control socket the same bytes would be another one."""


Place = Callable[[Callable[[int], HubSocket]], HubSocket]
"""Binds a socket: calls what it is given with a port, with another one where that is taken, and returns the socket."""


class HubSockets:
    """Both as one: what is received says by its peer where the answer goes.

    Args:
        listen: where to bind both; port 0 picks a free one for each.
        place: chooses the port of each, in place of `listen`.
        also: more addresses of this machine, for both.
        keys: this epoch's server key pair.
        roles: client public key -> role; operators are admitted to the bulk socket only, all others to control only.

    Raises:
        OSError: when the address cannot be bound.
    """

    def __init__(
        self,
        listen: HostAndPort,
        *,
        run_id: str,
        keys: KeyPair,
        roles: Mapping[bytes, str],
        also: Sequence[str] = (),
        context: Context | None = None,
        place: Place | None = None,
    ) -> None:
        context = context or zmq.Context.instance()
        copy_what_comes(context)  # the hub has a connection to every agent
        operators = {key: role for key, role in roles.items() if role == "operator"}
        others = {key: role for key, role in roles.items() if role != "operator"}

        def control(port: int) -> HubSocket:
            at = HostAndPort(listen.host, port)
            return HubSocket(at, run_id=run_id, keys=keys, roles=others, also=also, context=context)

        def bulk(port: int) -> HubSocket:
            return HubSocket(
                HostAndPort(listen.host, port),
                run_id=run_id,
                keys=keys,
                roles=operators,
                also=also,
                context=context,
                queue_limit=BULK_QUEUE_LIMIT,
                bulk=True,
            )

        self._control = control(listen.port) if place is None else place(control)
        try:
            self._bulk = bulk(0) if place is None else place(bulk)
        except BaseException:
            self._control.close()
            raise

    def __enter__(self) -> HubSockets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pollable(self) -> tuple[Socket, Socket]:
        """For a poller; readable means `drain` has work."""
        return self._control.socket, self._bulk.socket

    @property
    def address(self) -> HostAndPort:
        """Of the control socket."""
        return self._control.address

    @property
    def hosts(self) -> list[str]:
        """Addresses that both listen on."""
        return [host for host in self._control.hosts if host in self._bulk.hosts]

    @property
    def port(self) -> int:
        return self._control.port

    @property
    def bulk_port(self) -> int:
        return self._bulk.port

    def answer_every(self, count: int) -> None:
        """Answer every `count`-th of an agent's heartbeats in a row."""
        self._control.answer_every = count

    @property
    def counters(self) -> HubSocketCounters:
        """Of both."""
        names = HubSocketCounters.__struct_fields__
        pair = self._control.counters, self._bulk.counters
        return HubSocketCounters(**{name: sum(getattr(counters, name) for counters in pair) for name in names})

    @property
    def denied(self) -> int:
        """Connections turned away for an unknown key."""
        return self._control.denied + self._bulk.denied

    def drain(self, limit: int = 512) -> list[Received]:
        """Send the receipts of the last drain, then take up to `limit` messages, few of them operators', unwaited."""
        received = self._control.drain(limit)
        for peer, role, message in self._bulk.drain(min(limit, BULK_TURN)):
            received.append(Received(BulkPeer(peer), role, message))
        return received

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue a message for a peer. False, and counted, when the peer is gone or its queue is full."""
        return (self._bulk if isinstance(peer, BulkPeer) else self._control).send(peer, message)

    def close(self) -> None:
        """Send what receipts are left, as far as that needs no waiting, and close."""
        self._control.close()
        self._bulk.close()
