"""What answers mean (pure), and the asking, with servers in this process."""

from __future__ import annotations

import select
import socket
import time

import pytest

from miles_hpc.agent.probes import Finding, Probes, Verdict
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import Probe

pytestmark = pytest.mark.unit

G = Generation(1, 1)


def _verdict(**fields: object) -> Verdict:
    return Verdict("w", G, Probe(kind="tcp", port="p", **fields), now=100.0)  # type: ignore[arg-type]


def test_the_first_good_answer_makes_ready_and_later_ones_say_nothing():
    verdict = _verdict()
    assert verdict.on_answer("", 101) == Finding("w", G, "ready")
    assert verdict.on_answer("", 102) is None


def test_errors_before_the_start_deadline_are_no_news():
    verdict = _verdict(start_deadline=10)
    assert verdict.on_answer("refused", 109.9) is None
    found = verdict.on_answer("refused", 110)
    assert found is not None and found.kind == "start_deadline" and "refused" in found.text


def test_a_start_deadline_passes_without_any_answer():
    found = _verdict(start_deadline=10).on_time(110)
    assert found is not None and found.kind == "start_deadline"


def test_only_a_row_of_bad_answers_of_threshold_length_fails():
    verdict = _verdict(threshold=3)
    verdict.on_answer("", 101)
    for answer in ("bad", "bad", "", "bad", "bad"):
        assert verdict.on_answer(answer, 102) is None
    found = verdict.on_answer("bad", 103)
    assert found is not None and found.kind == "probe_failed" and "3 probes in a row" in found.text


def test_a_busy_worker_whose_counter_moves_is_not_failed_and_one_that_stands_still_is():
    moves = True
    probe = Probe(kind="http", port="p", threshold=3)
    verdict = Verdict("w", G, probe, 100.0, lambda: moves)
    verdict.on_answer("", 101)
    for second in range(102, 162, 7):
        assert verdict.on_answer("no answer", second, "silent") is None
        assert verdict.on_answer("503", second, "wrong") is None
    moves = False
    answers = [verdict.on_answer("no answer", second, "silent") for second in (170, 177, 184)]
    assert answers[:2] == [None, None] and answers[2] is not None and answers[2].kind == "probe_failed"


def test_a_port_on_which_nobody_listens_is_no_sign_of_work():
    verdict = Verdict("w", G, Probe(kind="http", port="p", threshold=3), 100.0, lambda: True)
    verdict.on_answer("", 101)
    answers = [verdict.on_answer("refused", second, "refused") for second in (102, 104, 106)]
    assert answers[:2] == [None, None] and answers[2] is not None


def test_an_engine_may_be_silent_longer_than_three_probes_but_not_answer_wrongly():
    verdict = _verdict(threshold=3, silence=45.0)
    verdict.on_answer("", 101)
    assert [verdict.on_answer("no answer", second, "silent") for second in range(108, 146, 7)] == [None] * 6
    found = verdict.on_answer("no answer", 146, "silent")
    assert found is not None and "7 probes in a row" in found.text
    verdict.on_answer("", 150)
    assert [verdict.on_answer("503", second) is None for second in (152, 154, 156)] == [True, True, False]


@pytest.mark.parametrize("reason", ["wrong", "refused"])
def test_one_odd_answer_does_not_end_the_patience_with_silent_ones_and_three_do(reason):
    verdict = _verdict(threshold=3, silence=300.0)
    verdict.on_answer("", 100)
    for second in (107, 114, 121):
        assert verdict.on_answer("no answer", second, "silent") is None
    assert verdict.on_answer("reset by peer", 122, reason) is None
    assert verdict.on_answer("no answer", 399, "silent") is None
    found = verdict.on_answer("no answer", 400, "silent")
    assert found is not None and "6 probes in a row failed, the last one: no answer" in found.text
    verdict.on_answer("", 500)
    odd = [(501, reason), (508, "silent"), (510, reason), (517, "silent"), (519, reason)]
    answers = [verdict.on_answer("odd", second, kind) for second, kind in odd]
    assert answers[:4] == [None] * 4 and answers[4] is not None


def test_without_patience_for_silence_bad_answers_of_all_kinds_make_one_row():
    verdict = _verdict(threshold=3)
    verdict.on_answer("", 100)
    assert verdict.on_answer("no answer", 107, "silent") is None
    assert verdict.on_answer("503", 109) is None
    assert verdict.on_answer("no answer", 116, "silent") is not None


def test_a_ready_worker_has_no_start_deadline():
    verdict = _verdict(start_deadline=10)
    verdict.on_answer("", 101)
    assert verdict.on_time(1e9) is None


def test_a_starting_worker_is_asked_more_often():
    verdict = _verdict(interval=2.0)
    assert verdict.interval(101) == 0.1 and verdict.interval(200) == 0.5
    verdict.on_answer("", 201)
    assert verdict.interval(201) == 2.0


# ------------------------------------------------------------------------------------------------ asking
class Server:
    """Answers one connection after the other with what it is told to, whenever `serve` is called."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.requests: list[bytes] = []
        self._open: socket.socket | None = None

    def serve(self, answer: bytes) -> None:
        try:
            if self._open is None:
                self._open, _ = self.listener.accept()
                self._open.setblocking(False)
            self.requests.append(self._open.recv(4096))
        except BlockingIOError:
            return
        with self._open as connection:
            connection.sendall(answer)
        self._open = None

    def close(self) -> None:
        self.listener.close()
        if self._open is not None:
            self._open.close()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def _ask(server: Server, answer: bytes, kind: str = "http", tries: int = 200, **fields: object) -> list[Finding]:
    probes = Probes(time.monotonic)
    probe = Probe(kind=kind, port="p", interval=0.02, timeout=0.3, **fields)  # type: ignore[arg-type]
    probes.add("w", G, probe, HostAndPort("127.0.0.1", server.port))
    findings: list[Finding] = []
    for _ in range(tries):
        poller = select.poll()
        for descriptor, event in probes.filenos().items():
            poller.register(descriptor, event)
        ready = {descriptor for descriptor, _ in poller.poll(5)}
        findings += probes.advance(ready)
        if findings:
            break
        if kind == "http":
            server.serve(answer)
    probes.remove("w")
    assert probes.filenos() == {} and probes.next_deadline() == float("inf")
    return findings


def test_http_200_is_ready_and_the_request_is_plain(server):
    assert [f.kind for f in _ask(server, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", path="/health")] == ["ready"]
    request = server.requests[0].decode()
    assert request.startswith("GET /health HTTP/1.1\r\n") and f"Host: 127.0.0.1:{server.port}\r\n" in request


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b""])
def test_another_answer_is_not_ready(server, answer):
    findings = _ask(server, answer, start_deadline=0.4)
    assert [f.kind for f in findings] == ["start_deadline"]
    assert ("503" in findings[0].text) or ("expected an HTTP status line" in findings[0].text)


def test_an_open_port_is_enough_for_tcp(server):
    assert [f.kind for f in _ask(server, b"", kind="tcp")] == ["ready"]


def test_a_closed_port_is_named(server):
    server.listener.close()
    findings = _ask(server, b"", kind="tcp", start_deadline=0.3)
    assert [f.kind for f in findings] == ["start_deadline"] and "Connection refused" in findings[0].text


def test_a_removed_worker_is_asked_no_more(server):
    probes = Probes(time.monotonic)
    probes.add("w", G, Probe(kind="tcp", port="p"), HostAndPort("127.0.0.1", server.port))
    probes.remove("w")
    assert probes.advance(set()) == [] and probes.next_deadline() == float("inf")
