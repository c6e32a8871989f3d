"""The two ends of the control plane: HubSocket binds, HubLink connects.

Both are plain ZeroMQ sockets for a poll loop; nothing here blocks except `connect_hub`, which has a deadline. Agents,
programs and operators open a link like this:

    found = wait_for_rendezvous(run_dir, attempt, deadline)
    link, answer = connect_hub(found, load_client(run_dir, attempt, "agent"), hello, timeout_s=10)

and then poll `link.socket` and `link.monitor`, call `link.receive()` and `link.events()`, send a heartbeat each
interval, and say hello again after each `up` event, because what was under way when the connection broke is lost.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import zmq

from miles_hpc.wire import codec
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import (
    ClientHeartbeat,
    Done,
    FinishRun,
    Heartbeat,
    HeartbeatSeen,
    HoldCells,
    Message,
    Refused,
    ReplaceCell,
)
from miles_hpc.wire.rendezvous import Rendezvous
from miles_hpc.wire.security import KeyPair, authenticator, sender_may_send
from miles_hpc.wire.socket_options import (
    CURVE_ADDS,
    LINK_EVENTS,
    Context,
    Socket,
    bind,
    drain_monitor,
    give_up_lost_peers,
    milliseconds,
    prepare,
    prepare_client,
    prepare_server,
)

log = logging.getLogger(__name__)

QUEUE_LIMIT = 10_000
"""Messages that wait for one peer before more to it are dropped and counted."""
# Plain ints: a hub receives and sends thousands of messages a second, and each operation on pyzmq's enums costs as
# much as taking a frame.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_WRONG_HUB_AFTER_S = 1.5
"""How long handshakes may be cut off before the peer is called another run's hub; a dying hub looks the same once."""


class HubError(Exception):
    """The hub cannot be used; the subclass says why."""


class HubUnreachable(HubError):
    """No hub answered in time."""


class WrongKey(HubError):
    """The hub does not know our key."""


class WrongHub(HubError):
    """What listens at the hub's address is not the hub that the rendezvous file names."""


class HubRefused(HubError):
    """The hub answered that it does not accept us. `code` as in messages.Refused."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"the hub refused this process ({code}): {text}")
        self.code = code


def _is_oversized(message: Message, body: bytes) -> bool:
    """Whether the other end would drop a message, and with it the connection."""
    if len(body) <= codec.MAX_MESSAGE_BYTES:
        return False
    what, limit = type(message).__name__, codec.MAX_MESSAGE_BYTES
    log.error("a %s of %d bytes was not sent: a control message holds at most %d", what, len(body), limit)
    return True


# ---------------------------------------------------------------------------------------------- the hub's end
class Received(NamedTuple):
    """A message that its sender was allowed to send. `peer` is where an answer goes."""

    peer: bytes
    role: str
    message: Message


class HubSocketCounters(msgspec.Struct):
    """What did not get through, since the socket was bound."""

    malformed: int = 0
    forbidden: int = 0
    """Messages that the sender's role may not send."""
    unroutable: int = 0
    """Sends to a peer that is gone."""
    full: int = 0
    """Sends to a peer whose queue is full."""
    oversized: int = 0
    """Sends of more than a frame may hold."""


class HubSocket:
    """The hub's ROUTER: authenticated peers, bounded queues, sends that fail at once.

    Refuses by itself, with a named code, what does not decode, belongs to another run or protocol, or is not for the
    sender's role; the caller sees only good messages. Receipts (HeartbeatSeen for heartbeats; Done for FinishRun and
    ReplaceCell with a call id) leave at the *next* `drain`, hence after the caller's loop has handled the message: call
    `drain` once each turn, also when nothing is readable.

    Args:
        listen: where to bind; port 0 picks a free one.
        also: more addresses of this machine, bound to the same port where that is free.
        keys: this epoch's server key pair; its public half goes into the rendezvous file.
        roles: client public key -> role (`security.role_keys`).
        domain: ZAP domain; the default is one of its own.
        bulk: peers may be busy for a while before they read.

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
        domain: str = "",
        queue_limit: int = QUEUE_LIMIT,
        bulk: bool = False,
    ) -> None:
        context = context or zmq.Context.instance()
        self.counters = HubSocketCounters()
        self.answer_every = 1
        """Of an agent's heartbeats in a row, every how many-th is answered: an answer is a third of the work."""
        self._run_id = run_id
        self._header = codec.header(run_id)
        self._receipts: list[tuple[bytes, Message]] = []
        self._logged = -1.0
        self._domain = domain or f"hub-{os.urandom(4).hex()}"
        self._zap = authenticator(context)
        self._zap.allow(self._domain, roles)
        self.socket: Socket = context.socket(zmq.ROUTER)
        """For a poller; readable means `drain` has work."""
        try:
            prepare(self.socket, listen)
            if not bulk:
                give_up_lost_peers(self.socket)
            self.socket.ipv6 = any(":" in host for host in (listen.host, *also))
            prepare_server(self.socket, keys, self._domain)
            self.socket.set(zmq.ROUTER_MANDATORY, 1)
            # Ids are random per incarnation, so a second connection with one is the same peer coming back.
            self.socket.set(zmq.ROUTER_HANDOVER, 1)
            self.socket.set(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES + CURVE_ADDS)
            self.socket.set(zmq.BACKLOG, 4096)
            self.socket.sndhwm = self.socket.rcvhwm = queue_limit
            self.address = bind(self.socket, listen)
            self.hosts = [listen.host, *(host for host in also if self._bind_also(host))]
            """Addresses that are listened on, all with the same port."""
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> HubSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind_also(self, host: str) -> bool:
        try:
            bind(self.socket, HostAndPort(host, self.address.port))
        except OSError as failure:
            log.warning("%s", failure)
            return False
        return True

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self.address.port

    @property
    def denied(self) -> int:
        """Connections turned away for an unknown key."""
        return self._zap.denied(self._domain)

    def drain(self, limit: int = 512) -> list[Received]:
        """Send the receipts of the last drain, then take up to `limit` messages without waiting."""
        receipts, self._receipts = self._receipts, []
        for peer, receipt in receipts:
            self.send(peer, receipt)
        good: list[Received] = []
        receive = self.socket.recv
        for _ in range(limit):
            try:
                sender = receive(_NOBLOCK)
            except zmq.Again:
                break
            frames = [frame := receive(0, copy=False)]
            while frame.more:
                frames.append(frame := receive(0, copy=False))
            received = self._admit(sender, frames)
            if received is not None:
                good.append(received)
        return good

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue a message for a peer. False, and counted, when the peer is gone, its queue full, or it is too large."""
        send, body = self.socket.send, codec.encode_body(message)
        if _is_oversized(message, body):
            self.counters.oversized += 1
            return False
        try:
            send(peer, _NOBLOCK_MORE)
            send(self._header, _NOBLOCK_MORE)
            send(body, _NOBLOCK)
        except zmq.Again:
            self.counters.full += 1
        except zmq.ZMQError as failure:
            if failure.errno != zmq.EHOSTUNREACH:
                raise
            self.counters.unroutable += 1
        else:
            return True
        return False

    def close(self) -> None:
        """Send what receipts are left, as far as that needs no waiting, and close."""
        if self.socket.closed:
            return
        for peer, receipt in self._receipts:
            self.send(peer, receipt)
        # In this order: who reconnects in between finds nobody, and is not told that its key is unknown.
        self.socket.close(linger=0)
        self._zap.forbid(self._domain)

    def _admit(self, peer: bytes, frames: list[zmq.Frame]) -> Received | None:
        role = str(frames[-1].get("User-Id")) if frames else ""
        try:
            message = codec.decode_to_hub([frame.buffer for frame in frames], self._run_id)
        except codec.DecodeError as failure:
            self.counters.malformed += 1
            self._refuse(peer, Refused(code=failure.code, text=str(failure)), role)
            return None
        if not sender_may_send(role, message):
            self.counters.forbidden += 1
            text = f"a {type(message).__name__} is not for role {role!r}"
            self._refuse(peer, Refused(code="role", text=text), role)
            return None
        if isinstance(message, Heartbeat):
            if message.seq % self.answer_every == 0:
                self._receipts.append((peer, HeartbeatSeen(seq=message.seq)))
        elif isinstance(message, ClientHeartbeat):
            self._receipts.append((peer, HeartbeatSeen(seq=message.seq)))
        elif isinstance(message, FinishRun | ReplaceCell | HoldCells) and message.call_id:
            self._receipts.append((peer, Done(call_id=message.call_id)))
        return Received(peer, role, message)

    def _refuse(self, peer: bytes, refusal: Refused, role: str) -> None:
        self.send(peer, refusal)
        now = time.monotonic()
        if now - self._logged >= 1.0:
            self._logged = now
            log.warning("refused a message of %s %s: %s (%s)", role, peer.hex()[:8], refusal.text, self.counters)


# ---------------------------------------------------------------------------------------------- the other end
class LinkEvent(NamedTuple):
    """A change of a link: `up` (handshake done: say hello), `down` (ZeroMQ reconnects by itself), or a handshake that
    failed because the peer does not know our key (`wrong_key`) or cut it off (`wrong_hub`)."""

    kind: Literal["up", "down", "wrong_key", "wrong_hub"]
    text: str


class HubLink:
    """A DEALER to one hub, with a random routing id, and the monitor that tells how the connection fares.

    ZeroMQ reconnects it to the same hub by itself; a hub of a higher epoch needs a new link.

    Args:
        bulk: it leads to the socket for operators, which may send while this end is busy.
    """

    def __init__(
        self,
        endpoint: HostAndPort,
        *,
        hub_key: str,
        keys: KeyPair,
        run_id: str,
        context: Context | None = None,
        bulk: bool = False,
    ) -> None:
        context = context or zmq.Context.instance()
        self.endpoint = endpoint
        self.dropped = 0
        """Sends that failed because the link was down or full, or the message too large, and messages that did not
        decode."""
        self._run_id = run_id
        self._header = codec.header(run_id)
        self.last_failure: codec.DecodeError | None = None
        """Why the last dropped message did not decode: the peer may be of another run or version."""
        self._made = time.monotonic()
        self.heard_at: float | None = None
        """When the hub was last heard on this link, on the monotonic clock."""
        self.socket: Socket = context.socket(zmq.DEALER)
        prepare(self.socket, endpoint)
        if not bulk:
            give_up_lost_peers(self.socket)
        prepare_client(self.socket, keys, hub_key)
        self.socket.set(zmq.ROUTING_ID, b"L" + os.urandom(15))
        self.socket.set(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES + CURVE_ADDS)
        self.socket.sndhwm = self.socket.rcvhwm = QUEUE_LIMIT
        self.monitor: Socket = self.socket.get_monitor_socket(LINK_EVENTS)
        self.socket.connect(endpoint.zmq)

    def __enter__(self) -> HubLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Message) -> bool:
        """Queue a message. False, and counted, when the link is down or its queue full: say it again later. One that is
        too large is counted and gone, since it would never get through."""
        frames = [self._header, codec.encode_body(message)]
        if _is_oversized(message, frames[1]):
            self.dropped += 1
            return True
        for last in (False, True):
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK)
                return True
            except zmq.Again:
                if not last:
                    self.socket.get(zmq.EVENTS)  # lets the socket take in a connection that has just come up
        self.dropped += 1
        return False

    def receive(self, limit: int = 512) -> list[Message]:
        """Take up to `limit` messages without waiting; HeartbeatSeen only counts for `silent_for`."""
        good: list[Message] = []
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.heard_at = time.monotonic()
            try:
                message = codec.decode_from_hub(frames, self._run_id)
            except codec.DecodeError as failure:
                self.dropped += 1
                self.last_failure = failure
                log.warning("a message of the hub at %s was dropped: %s", self.endpoint.netloc, failure)
                continue
            if not isinstance(message, HeartbeatSeen):
                good.append(message)
        return good

    def events(self) -> list[LinkEvent]:
        """What happened to the connection since the last call."""
        return [_link_event(event, self.endpoint) for event in drain_monitor(self.monitor)]

    def silent_for(self) -> float:
        """Seconds since the hub was last heard (each heartbeat of ours is answered), or since the link was made.

        Call `receive` first: what waits in the socket has not been heard.
        """
        return time.monotonic() - (self._made if self.heard_at is None else self.heard_at)

    def close(self) -> None:
        """Close without waiting; what was not sent is lost."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=0)


def _link_event(kind: int, endpoint: HostAndPort) -> LinkEvent:
    if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return LinkEvent("up", f"connected to {endpoint.netloc}")
    if kind == zmq.EVENT_DISCONNECTED:
        return LinkEvent("down", f"the connection to {endpoint.netloc} broke")
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return LinkEvent(
            "wrong_key",
            f"the hub at {endpoint.netloc} does not know this process's key: it belongs to another attempt or run, "
            "or secrets/ was replaced",
        )
    return LinkEvent(
        "wrong_hub",
        f"what listens at {endpoint.netloc} ended the handshake: it is not the hub of the rendezvous file, "
        "but another run's, an older epoch's, or no hub at all",
    )


def connect_hub(
    rendezvous: Rendezvous,
    keys: KeyPair,
    hello: Message,
    *,
    timeout_s: float,
    context: Context | None = None,
    bulk: bool = False,
) -> tuple[HubLink, Message]:
    """Try all addresses of a hub at once, keep the first that completes the handshake, say hello, and take the answer.

    Args:
        bulk: connect to the socket for operators.

    Returns:
        The link and the hub's first message; the caller owns the link.

    Raises:
        WrongKey: at once when the hub does not know `keys`.
        WrongHub: within 3 s when only strangers answer at the addresses.
        HubRefused: when the hub refuses the hello, or is of another run or version.
        HubUnreachable: after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    links = [
        HubLink(
            endpoint, hub_key=rendezvous.public_key, keys=keys, run_id=rendezvous.run_id, context=context, bulk=bulk
        )
        for endpoint in (rendezvous.bulk_endpoints if bulk else rendezvous.endpoints)
    ]
    winner: HubLink | None = None
    try:
        winner = _first_up(links, deadline)
        if winner is None:
            tried = ", ".join(link.endpoint.netloc for link in links)
            raise HubUnreachable(
                f"no answer from the hub of epoch {rendezvous.epoch} at {tried} within {timeout_s:g} s: "
                "is its process alive, and is the network between the nodes open?"
            )
        answer = _greet(winner, hello, deadline)
        if answer is None:
            raise HubUnreachable(f"the hub at {winner.endpoint.netloc} took the connection but left a hello unanswered")
        if isinstance(answer, Refused):
            raise HubRefused(answer.code, answer.text)
    except BaseException:
        winner = None
        raise
    finally:
        for link in links:
            if link is not winner:
                link.close()
    return winner, answer


def _first_up(links: list[HubLink], deadline: float) -> HubLink | None:
    poller = zmq.Poller()
    for link in links:
        poller.register(link.monitor, zmq.POLLIN)
    cut_off_since: float | None = None
    while (now := time.monotonic()) < deadline:
        limit = deadline if cut_off_since is None else min(deadline, cut_off_since + _WRONG_HUB_AFTER_S)
        poller.poll(milliseconds(limit - now))
        for link in links:
            for event in link.events():
                if event.kind == "up":
                    return link
                if event.kind == "wrong_key":
                    raise WrongKey(event.text)
                if event.kind == "wrong_hub":
                    cut_off_since = cut_off_since or time.monotonic()
                    if time.monotonic() - cut_off_since >= _WRONG_HUB_AFTER_S:
                        raise WrongHub(event.text)
    return None


def _greet(link: HubLink, hello: Message, deadline: float) -> Message | None:
    poller = zmq.Poller()
    poller.register(link.socket, zmq.POLLIN)
    poller.register(link.monitor, zmq.POLLIN)
    said = link.send(hello)
    while (left := deadline - time.monotonic()) > 0:
        poller.poll(milliseconds(left))
        if any(event.kind == "up" for event in link.events()) or not said:
            said = link.send(hello)
        answers = link.receive(limit=1)
        if answers:
            return answers[0]
        if link.last_failure is not None:
            raise HubRefused(link.last_failure.code, str(link.last_failure))
    return None
