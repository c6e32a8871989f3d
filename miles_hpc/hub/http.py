"""HTTP on the hub for people, scripts and Prometheus: `/status`, `/events`, `/metrics`, with the run's key.

Served by threads from copies that the hub's loop leaves here: no request touches the state or holds up the loop, and
http.server and prometheus_client are imported when the first request comes, so that a hub that nobody asks pays
nothing for them.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from miles_hpc.wire.address import HostAndPort

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler

log = logging.getLogger(__name__)

Events = Callable[[int, int], tuple[list[dict[str, Any]], int]]
"""`EventLog.recent`."""

REQUESTS_AT_ONCE = 8
"""More are closed unanswered: a hub is no web server."""
PATIENCE_S = 5.0
"""A client that sends or takes nothing for this long is cut off."""
_FULL_S = 1.0
_REALM = 'Bearer realm="secrets/attempt-<n>/http.key of the run directory"'


class HubHttp:
    """Listens at once, answers until `close`.

    Args:
        key: what clients send as `Authorization: Bearer <key>`.
        events: called by request threads.

    Raises:
        OSError: when the address cannot be bound.
    """

    def __init__(self, listen: HostAndPort, key: str, events: Events) -> None:
        self._key, self._events = key, events
        self._status: Mapping[str, Any] = {}
        self._counters: Mapping[str, int] = {}
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self._listener = socket.create_server((listen.host, listen.port), family=family, backlog=64)
        self._listener.setblocking(False)
        self.address = HostAndPort(listen.host, self._listener.getsockname()[1])
        self._stop_in, self._stop_out = socket.socketpair()
        self._slots = threading.BoundedSemaphore(REQUESTS_AT_ONCE)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def __enter__(self) -> HubHttp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, status: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        """What is shown from now on. The caller changes neither any more."""
        self._status, self._counters = status, counters

    def close(self) -> None:
        """Take no more requests; those that are being answered end with their threads."""
        self._stop_in.close()
        self._thread.join()

    def _run(self) -> None:
        with self._listener, self._stop_out:
            # Not select(): with a large fleet descriptors are beyond its 1024.
            poller, only_stop = select.poll(), select.poll()
            for each in (self._listener, self._stop_out):
                poller.register(each, select.POLLIN)
            only_stop.register(self._stop_out, select.POLLIN)
            while True:
                ready = [descriptor for descriptor, _ in poller.poll()]
                if self._stop_out.fileno() in ready:
                    return
                try:
                    connection, peer = self._listener.accept()
                except (BlockingIOError, ConnectionError):
                    continue  # it left again
                except OSError as error:
                    # No descriptor is free: whoever waits stays there, and must not be asked about again at once.
                    log.warning("HTTP requests wait for %g s: %s", _FULL_S, error)
                    if only_stop.poll(_FULL_S * 1000):
                        return
                    continue
                if not self._slots.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._serve, args=(connection, peer), name="http-request", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: Any) -> None:
        try:
            with connection:
                connection.settimeout(PATIENCE_S)
                _handler(self)(connection, peer, None)  # type: ignore[arg-type]
        except OSError:
            return  # the client left
        except Exception:
            log.exception("an HTTP request of %s failed", peer)
        finally:
            self._slots.release()

    # ------------------------------------------------------------------------------------------ requests
    def answer(self, target: str, authorization: str) -> tuple[int, str, bytes]:
        """Status code, content type and body of a GET."""
        import hmac  # here, because it brings OpenSSL

        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key.encode()):
            return 401, "text/plain", b"the run's key is needed: Authorization: Bearer <secrets/attempt-<n>/http.key>\n"
        parts = urlsplit(target)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        if parts.path == "/status":
            age = round(max(0.0, time.time() - float(self._status.get("written_at", time.time()))), 3)
            return 200, "application/json", msgspec.json.encode({**self._status, "age_s": age}) + b"\n"
        if parts.path == "/events":
            try:
                lines, following = self._events(int(query.get("since", 0)), int(query.get("limit", 1000)))
            except ValueError:
                return 400, "text/plain", b"since and limit are whole numbers\n"
            return 200, "application/json", json.dumps({"events": lines, "next": following}).encode() + b"\n"
        if parts.path == "/metrics":
            from miles_hpc.hub import metrics

            return 200, metrics.CONTENT_TYPE, metrics.render(self._status, self._counters, os.getpid())
        return 404, "text/plain", b"there are /status, /events and /metrics\n"


def _handler(http: HubHttp) -> type[BaseHTTPRequestHandler]:
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "miles-hpc", ""
        timeout = PATIENCE_S

        def do_GET(self) -> None:
            code, kind, body = http.answer(self.path, self.headers.get("Authorization", ""))
            self.send_response(code)
            if code == 401:
                self.send_header("WWW-Authenticate", _REALM)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are no events of the run."""

    return Handler
