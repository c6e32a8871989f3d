"""CURVE keys by role, and the ZAP handler that admits only them.

Without a ZAP handler libzmq admits any client that knows the server's public key. With ours, each server socket has a
domain, a domain lists the public keys that it admits, and each admitted connection carries its role as ZeroMQ user id:
`frame.get("User-Id")` on any received frame. `sender_may_send` says which messages a role may send.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec
import zmq
import zmq.utils.z85

from miles_hpc.wire import messages
from miles_hpc.wire.messages import Message

log = logging.getLogger(__name__)

Role = Literal["agent", "worker", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
DATA = "data"
"""Name of the key pair that all RPC servers of an attempt share; clients get only its public half to connect to."""

_ALLOWED: dict[str, tuple[type, ...]] = {
    "agent": get_args(messages.FromAgent),
    "worker": get_args(messages.FromClient),
    "operator": get_args(messages.FromOperator),
}
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_RENEW_AFTER = 64
"""Connections that one ZAP socket looks at before another takes its place."""
_RETIRE_S = 1.0
"""How long a replaced ZAP socket still answers; what was under way to it takes milliseconds."""


class SecurityError(Exception):
    """Keys are missing or unreadable; the text names the file."""


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, Z85 text."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, secret=…)"

    @classmethod
    def generate(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


def sender_may_send(role: str, message: Message) -> bool:
    """Whether a connection of this role may send this message to the hub."""
    return isinstance(message, _ALLOWED.get(role, ()))


def secrets_dir(run_dir: Path, attempt: int) -> Path:
    """`<run_dir>/secrets/attempt-<n>`."""
    return run_dir / "secrets" / f"attempt-{attempt}"


def http_key_path(run_dir: Path, attempt: int) -> Path:
    """The file of the key that the run's HTTP servers ask for."""
    return secrets_dir(run_dir, attempt) / "http.key"


def sglang_config_path(run_dir: Path, attempt: int) -> Path:
    """The file that SGLang reads the key from (`--config`): on a command line everyone could read it."""
    return secrets_dir(run_dir, attempt) / "sglang.yaml"


def load_http_key(run_dir: Path, attempt: int) -> str:
    """The key that the run's HTTP servers ask for, as `Authorization: Bearer <key>`.

    Raises:
        SecurityError: when its file is missing or unreadable, or others may read it.
    """
    path = http_key_path(run_dir, attempt)
    try:
        return _read_private(path).decode().strip()
    except OSError as failure:
        raise SecurityError(f"no HTTP key of attempt {attempt} in {path}: {failure}") from failure


def read_engine_key(path: Path) -> str:
    """The key of an engine that somebody else runs, from a file of the user's.

    Raises:
        SecurityError: when it is missing, unreadable, empty, or others may read it.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as failure:
        raise SecurityError(f"{path}: the key cannot be read: {failure}") from failure
    if mode & 0o077:
        raise SecurityError(f"{path} has mode {mode:04o}: others may read the key; chmod it to 0600")
    if not key or not key.isascii() or not key.isprintable():
        raise SecurityError(f"{path}: expected one line with a key")
    return key


def create_secrets(run_dir: Path, attempt: int) -> None:
    """Make the keys of an attempt: a pair per client role, one for RPC servers, one for HTTP. What exists is kept.

    Raises:
        OSError: when the run directory cannot be written.
    """
    directory = secrets_dir(run_dir, attempt)
    directory.parent.mkdir(parents=True, exist_ok=True)
    for path in (directory.parent, directory):
        path.mkdir(exist_ok=True)
        path.chmod(0o700)
    for name in (*ROLES, DATA):
        _write_once(directory / f"{name}.json", msgspec.json.encode(KeyPair.generate()))
    # Hexadecimal: SGLang hands the key to its own argument parser, where one that begins with "-" is taken for a flag.
    _write_once(http_key_path(run_dir, attempt), os.urandom(32).hex().encode())
    _write_once(sglang_config_path(run_dir, attempt), f"api-key: {load_http_key(run_dir, attempt)}\n".encode())


def _write_once(target: Path, content: bytes) -> None:
    """A complete file of mode 0600; one that exists is kept."""
    draft = target.with_name(f".{target.name}-{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    try:
        os.link(draft, target)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def _read_private(path: Path) -> bytes:
    """The content of a file that nobody else may read or replace.

    Raises:
        SecurityError: when its permission bits, or its directory's, let others in, or it belongs to somebody else.
        OSError: when it cannot be read.
    """
    with path.open("rb") as file:
        for name, status in ((path, os.fstat(file.fileno())), (path.parent, path.parent.stat())):
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o077:
                raise SecurityError(
                    f"{name} has mode {mode:04o}: others may get at the keys of this run; chmod it to "
                    f"{'0700' if stat.S_ISDIR(status.st_mode) else '0600'}, and start a new attempt, "
                    "which has new ones, if somebody may have read them"
                )
            if os.getuid() not in (0, status.st_uid):
                raise SecurityError(f"{name} belongs to user {status.st_uid}, and this process runs as {os.getuid()}")
        return file.read()


def load_keys(run_dir: Path, attempt: int, name: str) -> KeyPair:
    """The key pair of a role or of `DATA`.

    Raises:
        SecurityError: when its file is missing, unreadable or broken, or others may read it.
    """
    path = secrets_dir(run_dir, attempt) / f"{name}.json"
    try:
        return msgspec.json.decode(_read_private(path), type=KeyPair)
    except (OSError, msgspec.MsgspecError) as failure:
        raise SecurityError(f"no {name} key of attempt {attempt} in {path}: {failure}") from failure


def load_client(run_dir: Path, attempt: int, role: Role) -> KeyPair:
    """The client key pair of a role. Raises SecurityError as `load_keys`."""
    return load_keys(run_dir, attempt, role)


def role_keys(run_dir: Path, attempt: int, roles: tuple[Role, ...] = ROLES) -> dict[bytes, str]:
    """What `Authenticator.allow` takes: public key (Z85) -> role. Raises SecurityError as `load_keys`."""
    return {load_keys(run_dir, attempt, role).public.encode(): role for role in roles}


class Authenticator:
    """The ZAP handler of one ZeroMQ context: a thread that admits the keys of each domain and nothing else.

    Get it by `authenticator(context)`; libzmq knows one handler per context.

    libzmq keeps the pipe of a connection's ZAP request as long as both ends of it live: two queues of 16 KiB, a third
    of what a connection takes. So the handler's socket, which is one end of all of them, is replaced now and then.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._lock = threading.Lock()
        self._domains: dict[str, Mapping[bytes, str]] = {}
        self._denied: dict[str, int] = {}
        self._last_log = 0.0
        self._context = context
        self._asked = 0
        """How often the present socket was."""
        self._retired: zmq.Socket[bytes] | None = None
        self._socket = self._new_socket()
        self._stop_in, self._stop_out = socket.socketpair()
        self._socket.bind(_ZAP_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="zap", daemon=True)
        self._thread.start()

    def allow(self, domain: str, roles: Mapping[bytes, str]) -> None:
        """Admit these public keys (Z85) to sockets of `domain`, each under its role; replaces an earlier list."""
        with self._lock:
            self._domains[domain] = dict(roles)

    def forbid(self, domain: str) -> None:
        """Admit nobody to `domain` any more; open connections stay."""
        with self._lock:
            self._domains.pop(domain, None)

    def denied(self, domain: str) -> int:
        """How many connections were turned away from `domain`."""
        with self._lock:
            return self._denied.get(domain, 0)

    def close(self) -> None:
        """End the thread; from then on the context's servers admit nobody. The end of the context does the same."""
        self._stop_in.close()
        self._thread.join()

    def _new_socket(self) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.REP)
        made.linger = 0
        return made

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_out, zmq.POLLIN)
        retired_at = 0.0
        try:
            while True:
                ready = dict(poller.poll(None if self._retired is None else int(_RETIRE_S * 1000)))
                if self._stop_out.fileno() in ready:
                    return
                for each in (self._retired, self._socket):
                    if each is not None and each in ready:
                        self._asked += 1
                        self._answer(each, each.recv_multipart())
                if self._retired is None:
                    if self._asked >= _RENEW_AFTER:
                        self._renew()
                        if self._retired is not None:
                            poller.register(self._socket, zmq.POLLIN)
                            retired_at = time.monotonic()
                elif self._retired not in ready and time.monotonic() - retired_at >= _RETIRE_S:
                    poller.unregister(self._retired)
                    self._retired.close()
                    self._retired = None
        except zmq.ContextTerminated:
            return
        finally:
            for each in (self._retired, self._socket):
                if each is not None:
                    each.close(linger=0)
            self._stop_out.close()

    def _renew(self) -> None:
        """Let another socket answer from now on, beside the old one.

        Between the two calls there is no handler and nobody is admitted: a client whose handshake is cut off there
        connects anew within 0.1 s.
        """
        self._asked = 0
        try:
            made = self._new_socket()
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError as trouble:  # no descriptor is left: later, perhaps
            log.warning("the ZAP handler keeps its socket: %s", trouble)
            return
        self._retired, self._socket = self._socket, made
        self._retired.unbind(_ZAP_ENDPOINT)
        self._socket.bind(_ZAP_ENDPOINT)

    def _answer(self, via: zmq.Socket[bytes], request: list[bytes]) -> None:
        version, request_id, raw_domain, address = [*request[:4], *[b""] * (4 - len(request[:4]))]
        mechanism = request[5] if len(request) > 5 else b""
        domain = raw_domain.decode(errors="backslashreplace")
        role = None
        if mechanism == b"CURVE" and len(request) > 6 and len(request[6]) == 32:
            with self._lock:
                role = self._domains.get(domain, {}).get(zmq.utils.z85.encode(request[6]))
        if role is None:
            self._count_denied(domain, address.decode(errors="backslashreplace"))
            via.send_multipart([version, request_id, b"400", b"unknown key", b"", b""])
        else:
            via.send_multipart([version, request_id, b"200", b"OK", role.encode(), b""])

    def _count_denied(self, domain: str, address: str) -> None:
        with self._lock:
            self._denied[domain] = count = self._denied.get(domain, 0) + 1
        now = time.monotonic()
        if now - self._last_log >= 1.0:
            self._last_log = now
            log.warning("refused a connection from %s to %r: unknown key (%d so far)", address, domain, count)


_authenticators: dict[tuple[int, int], Authenticator] = {}
_authenticators_lock = threading.Lock()


def authenticator(context: zmq.Context[zmq.Socket[bytes]] | None = None) -> Authenticator:
    """The one handler of a context (default: the process-wide one), started on the first call."""
    context = context or zmq.Context.instance()
    key = (os.getpid(), context.underlying)
    with _authenticators_lock:
        found = _authenticators.get(key)
        if found is None or not found._thread.is_alive():
            found = _authenticators[key] = Authenticator(context)
        return found
