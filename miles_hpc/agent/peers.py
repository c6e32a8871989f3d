"""Agents among each other: who still hears the hub, and where the new one is. Independent of hub and file system."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import zmq

from miles_hpc.wire import codec
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import Message, Peer, PeerAsk, PeerHub, PeerSays
from miles_hpc.wire.rendezvous import Rendezvous
from miles_hpc.wire.security import KeyPair, authenticator
from miles_hpc.wire.socket_options import (
    CURVE_ADDS,
    Context,
    Socket,
    bind,
    give_up_lost_peers,
    prepare,
    prepare_client,
    prepare_server,
)

_BATCH = 64
_QUEUE = 100


class Peers:
    """This agent's peer port, and its links to those of the roster. Only holders of the agents' key get in.

    Args:
        answer: says whether this agent hears a hub of at least the asked epoch, and which epoch it obeys.
    """

    def __init__(
        self,
        node: str,
        address: str,
        run_id: str,
        keys: KeyPair,
        answer: Callable[[int], tuple[bool, int]],
        context: Context | None = None,
    ) -> None:
        self._node, self._keys, self._answer = node, keys, answer
        self._context = context or zmq.Context.instance()
        self._run_id, self._header = run_id, codec.header(run_id)
        self._links: dict[str, tuple[Peer, Socket]] = {}
        self.undecoded = 0
        domain = f"peers-{os.urandom(4).hex()}"
        authenticator(self._context).allow(domain, {keys.public.encode(): "agent"})
        self._port: Socket = self._context.socket(zmq.ROUTER)
        listen = HostAndPort(address, 0)
        prepare(self._port, listen)
        give_up_lost_peers(self._port)
        prepare_server(self._port, keys, domain)
        self._port.set(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES + CURVE_ADDS)
        self._port.sndhwm = self._port.rcvhwm = _QUEUE
        self.port = bind(self._port, listen).port

    def pollable(self) -> list[Any]:
        """Sockets to wait for."""
        return [self._port, *(link for _, link in self._links.values())]

    @property
    def nodes(self) -> list[str]:
        """The other agents of the roster."""
        return list(self._links)

    def set_roster(self, peers: list[Peer]) -> None:
        """Keep links to these agents, and no others."""
        wanted = {peer.node: peer for peer in peers if peer.node != self._node}
        for node, (peer, link) in list(self._links.items()):
            if wanted.get(node) != peer:
                link.close(linger=0)
                del self._links[node]
        for node, peer in wanted.items():
            if node not in self._links:
                self._links[node] = (peer, self._connect(peer))

    def _connect(self, peer: Peer) -> Socket:
        link: Socket = self._context.socket(zmq.DEALER)
        address = HostAndPort(peer.address, peer.port)
        prepare(link, address)
        give_up_lost_peers(link)
        # All agents hold one key pair: its public half is also what a peer port is known by.
        prepare_client(link, self._keys, self._keys.public)
        link.set(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES + CURVE_ADDS)
        link.sndhwm = link.rcvhwm = _QUEUE
        link.connect(address.zmq)
        return link

    def ask_all(self, epoch: int) -> None:
        """Ask every agent of the roster whether it hears the hub of this epoch; who cannot be reached is not asked."""
        for node in self._links:
            self._send(node, PeerAsk(call_id=os.urandom(4).hex(), node=self._node, epoch=epoch))

    def tell_all(self, hub: Rendezvous) -> None:
        """Tell every agent that can be reached where the hub is now."""
        for node in self._links:
            self._send(node, PeerHub(hub=hub))

    def _send(self, node: str, message: Message) -> None:
        try:
            self._links[node][1].send_multipart([self._header, codec.encode_body(message)], zmq.NOBLOCK)
        except zmq.Again:
            return  # not connected: silence is an answer too

    def receive(self) -> list[PeerSays | PeerHub]:
        """Answer what was asked, and return what others said."""
        found: list[PeerSays | PeerHub] = []
        for socket in (self._port, *(link for _, link in self._links.values())):
            for _ in range(_BATCH):
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                sender = frames.pop(0) if socket is self._port else b""
                try:
                    message = codec.decode_from_peer(frames, self._run_id)
                except codec.DecodeError:
                    self.undecoded += 1
                    continue
                if isinstance(message, PeerAsk):
                    self._reply(sender, message)
                elif isinstance(message, PeerSays | PeerHub):
                    found.append(message)
        return found

    def _reply(self, sender: bytes, question: PeerAsk) -> None:
        hears, epoch = self._answer(question.epoch)
        says = PeerSays(call_id=question.call_id, node=self._node, epoch=epoch, hears=hears)
        try:
            self._port.send_multipart([sender, self._header, codec.encode_body(says)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # it is gone or does not read; it will ask again

    def close(self) -> None:
        """Close the port and all links."""
        for _, link in self._links.values():
            link.close(linger=0)
        self._port.close(linger=0)
