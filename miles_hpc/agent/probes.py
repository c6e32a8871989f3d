"""Does a worker serve? A connection to its port, or HTTP 200 from a path, asked without ever blocking the agent's loop.

`Probes` owns the sockets; `Verdict` decides, without I/O, what a row of answers means. The sockets are plain and
non-blocking: the agent polls `fileno`s together with its other descriptors and calls `advance`.

A busy worker may be too busy to answer. So a failed probe does not count while the worker's progress counter moves, and
one without a counter may be silent for `Probe.silence`, which other bad answers do not shorten. A port on which nobody
listens is no sign of work.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable
from typing import Literal

import msgspec

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import Probe

START_INTERVAL = 0.1
"""Seconds between two probes of a worker that has not served yet, for its first `START_EAGER` seconds."""
START_EAGER = 20.0
START_PATIENT = 0.5

Reason = Literal["wrong", "silent", "refused"]
"""What is wrong with an answer: its content, that there is none in time, or that nobody listens."""


class Finding(msgspec.Struct, frozen=True):
    """What the probes of one worker led to."""

    worker: str
    generation: Generation
    kind: Literal["ready", "probe_failed", "start_deadline", "process_lost"]
    text: str = ""
    signal: int | None = None
    """What killed the process that was lost."""


class Verdict:
    """What the answers of one worker mean: ready at the first good one, failed after `threshold` bad ones in a row.

    Where `Probe.silence` grants patience, silent ones are counted apart and judged by that time.

    Args:
        moved: whether the worker's progress counter has moved since this was last asked; False without a counter.
    """

    def __init__(
        self,
        worker: str,
        generation: Generation,
        probe: Probe,
        now: float,
        moved: Callable[[], bool] = lambda: False,
    ) -> None:
        self.worker = worker
        self.generation = generation
        self.probe = probe
        self.started = now
        self.ready = False
        self.failures = 0
        self.silent = 0
        """Silent ones that `Probe.silence` covers; not among `failures`."""
        self.sign_at = now
        """When it last gave a sign of life."""
        self.last_error = "not probed yet"
        self._moved = moved

    def on_answer(self, error: str, now: float, reason: Reason = "wrong") -> Finding | None:
        """Take one answer, "" for a good one; `reason` is that of a bad one."""
        if not error:
            self._on_sign(now)
            if not self.ready:
                self.ready = True
                return Finding(self.worker, self.generation, "ready")
            return None
        self.last_error = error
        if not self.ready:
            return self.on_time(now)
        if reason != "refused" and self._moved():
            self._on_sign(now)
            return None
        if reason == "silent" and self.probe.silence:
            self.silent += 1
        else:
            self.failures += 1
        too_silent = self.silent >= self.probe.threshold and now - self.sign_at >= self.probe.silence
        if too_silent or self.failures >= self.probe.threshold:
            count = self.failures + self.silent
            return self._finding("probe_failed", f"{count} probes in a row failed, the last one: {error}")
        return None

    def _on_sign(self, now: float) -> None:
        self.failures, self.silent, self.sign_at = 0, 0, now

    def on_time(self, now: float) -> Finding | None:
        """A worker that has not served by its start deadline never will."""
        waited = now - self.started
        if not self.ready and waited >= self.probe.start_deadline:
            return self._finding(
                "start_deadline",
                f"not ready {waited:.1f} s after its start (limit {self.probe.start_deadline:g} s), "
                f"the last probe: {self.last_error}",
            )
        return None

    def _finding(self, kind: Literal["probe_failed", "start_deadline"], text: str) -> Finding:
        return Finding(self.worker, self.generation, kind, text)

    def interval(self, now: float) -> float:
        """Seconds until the next probe."""
        if self.ready:
            return self.probe.interval
        eager = START_INTERVAL if now - self.started < START_EAGER else START_PATIENT
        return min(eager, self.probe.interval)


class _Watch(msgspec.Struct):
    verdict: Verdict
    target: HostAndPort
    next_at: float
    connection: socket.socket | None = None
    deadline: float = 0.0
    request_sent: bool = False
    answer: bytes = b""
    reason: Reason = "wrong"


class Probes:
    """The probes of all workers of a node.

    Args:
        moved: whether a worker's progress counter has moved since this was last asked.
    """

    def __init__(self, clock: Callable[[], float], moved: Callable[[str], bool] = lambda worker: False) -> None:
        self._clock = clock
        self._moved = moved
        self._watches: dict[str, _Watch] = {}

    def add(self, worker: str, generation: Generation, probe: Probe, target: HostAndPort) -> None:
        """Begin to probe a worker that was just started."""
        self.remove(worker)
        now = self._clock()
        verdict = Verdict(worker, generation, probe, now, lambda: self._moved(worker))
        self._watches[worker] = _Watch(verdict, target, now + START_INTERVAL)

    def remove(self, worker: str) -> None:
        """Stop probing a worker; an answer on its way is thrown away."""
        watch = self._watches.pop(worker, None)
        if watch is not None:
            _close(watch)

    def on_pause(self, seconds: float) -> None:
        """This agent stood still: what was asked before is thrown away and asked anew, and that time counts for nobody.

        The other end may have been stopped as well, so an answer that is late by the pause says nothing about it.
        """
        now = self._clock()
        for watch in self._watches.values():
            watch.verdict.started += seconds
            watch.verdict.sign_at += seconds
            if watch.connection is not None:
                _close(watch)
                watch.next_at = now

    def filenos(self) -> dict[int, int]:
        """Descriptors to poll, with `select.POLLIN` or `POLLOUT`."""
        return {
            watch.connection.fileno(): select.POLLIN if watch.request_sent else select.POLLOUT
            for watch in self._watches.values()
            if watch.connection is not None
        }

    def next_deadline(self) -> float:
        """When `advance` has something to do even if no descriptor is ready."""
        return min(
            (w.deadline if w.connection is not None else w.next_at for w in self._watches.values()),
            default=float("inf"),
        )

    def advance(self, ready: set[int]) -> list[Finding]:
        """Go on with everything that is due or ready."""
        now = self._clock()
        findings = []
        for watch in list(self._watches.values()):
            error: str | None = None
            if watch.connection is None:
                if now < watch.next_at:
                    continue
                error = self._connect(watch, now)
            elif watch.connection.fileno() in ready:
                error = self._progress(watch)
            if error is None and watch.connection is not None and now >= watch.deadline:
                error, watch.reason = (
                    f"no answer from {self._name(watch)} within {watch.verdict.probe.timeout:g} s",
                    "silent",
                )
            finding = watch.verdict.on_time(now) if error is None else self._answered(watch, error, now)
            if finding is not None:
                findings.append(finding)
                if finding.kind != "ready":
                    self.remove(watch.verdict.worker)
        return findings

    def _answered(self, watch: _Watch, error: str, now: float) -> Finding | None:
        _close(watch)
        finding = watch.verdict.on_answer(error, now, watch.reason)
        watch.next_at = now + watch.verdict.interval(now)
        return finding

    def _connect(self, watch: _Watch, now: float) -> str | None:
        family = socket.AF_INET6 if ":" in watch.target.host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        watch.connection = connection
        watch.deadline, watch.reason = now + watch.verdict.probe.timeout, "wrong"
        code = connection.connect_ex((watch.target.host, watch.target.port))
        if code in (0, errno.EINPROGRESS):
            return None
        return self._failed(watch, code)

    def _progress(self, watch: _Watch) -> str | None:
        """One step of an open probe. None: not done; "": a good answer; otherwise what went wrong."""
        connection = watch.connection
        assert connection is not None
        try:
            if not watch.request_sent:
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    return self._failed(watch, code)
                if watch.verdict.probe.kind == "tcp":
                    return ""
                connection.sendall(
                    f"GET {watch.verdict.probe.path} HTTP/1.1\r\nHost: {watch.target.netloc}\r\n"
                    "Connection: close\r\nAccept: */*\r\n\r\n".encode("ascii")
                )
                watch.request_sent = True
                return None
            data = connection.recv(4096)
        except BlockingIOError:
            return None
        except OSError as error:
            return f"{self._name(watch)}: {error.strerror or error}"
        watch.answer += data
        line, end, _ = watch.answer.partition(b"\r\n")
        if not end and data and len(watch.answer) < 4096:
            return None
        fields = line.split(b" ", 2)
        if len(fields) < 2 or not fields[0].startswith(b"HTTP/"):
            return f"{self._name(watch)} answered {line[:60]!r}, expected an HTTP status line"
        return "" if fields[1] == b"200" else f"{self._name(watch)} answered {line.decode('latin-1')[:80]}"

    def _failed(self, watch: _Watch, code: int) -> str:
        if code == errno.ECONNREFUSED:
            watch.reason = "refused"
        return f"{self._name(watch)}: {os.strerror(code)}"

    @staticmethod
    def _name(watch: _Watch) -> str:
        path = watch.verdict.probe.path if watch.verdict.probe.kind == "http" else ""
        return f"{watch.target.netloc}{path}"


def _close(watch: _Watch) -> None:
    if watch.connection is not None:
        watch.connection.close()
    watch.connection = None
    watch.request_sent = False
    watch.answer = b""
