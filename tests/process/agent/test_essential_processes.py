"""A server that serves on without the processes that do the work: the agent ends it at once, and says which died."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from miles_hpc.agent import procfs
from miles_hpc.wire.messages import PortInfo, Probe, WorkerExited

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

WORKER = "engine-00000-00000"
SERVER = """
import http.server, os, signal, subprocess, sys
names = sys.argv[3:]
parts = [subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", name]) for name in names]
signal.signal(signal.SIGTERM, lambda *_: ([part.kill() or part.wait() for part in parts], sys.exit(0)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


class Engine:
    """One worker that serves, with its parts by name."""

    def __init__(self, hub: Any, n: int = 1) -> None:
        ports = hub.reserve(WORKER, [PortInfo(name="http")], n=n).ports
        self.pid = hub.start(
            WORKER,
            SERVER,
            n=n,
            ports=ports,
            probe=Probe(kind="http", port="http", interval=0.2),
            arguments=("127.0.0.2", str(ports["http"]), "part::scheduler", "compiler"),
            essential_processes=("part::",),
        ).pid
        hub.ready(WORKER, n)

    def part(self, name: str) -> int:
        below = procfs.descendants(procfs.snapshot(), self.pid)
        (pid,) = (one.pid for one in below if procfs.command_line(one.pid).endswith(name))
        return pid


def reports(hub: Any) -> list[WorkerExited]:
    """Every word about an end, also those before it is gone."""
    return [message for _, message in hub.heard if isinstance(message, WorkerExited)]


def test_the_hub_hears_at_once_which_process_is_lost_and_the_worker_ends_without_its_grace(hub, node, nodes):
    engine = Engine(hub)
    lost = engine.part("part::scheduler")
    os.kill(lost, signal.SIGKILL)
    hub.exited(WORKER)
    first, last = reports(hub)
    assert (first.gone, last.gone, first.cause, last.cause) == (False, True, "process_lost", "process_lost")
    assert f"its process part::scheduler (pid {lost}), without which it cannot go on, was killed" in first.text
    assert nodes.marked(WORKER) == []
    assert Engine(hub, n=2).pid != engine.pid


def test_what_it_starts_in_passing_ends_unnoticed(hub, node):
    engine = Engine(hub)
    os.kill(engine.part("compiler"), signal.SIGKILL)
    # The next one's end is noticed, so this one's would have been.
    os.kill(engine.part("part::scheduler"), signal.SIGKILL)
    hub.exited(WORKER)
    assert [report.cause for report in reports(hub)] == ["process_lost"] * 2
    assert "part::scheduler" in reports(hub)[0].text


@pytest.mark.parametrize("how", ["stop", "group"])
def test_a_worker_that_ends_as_a_whole_has_lost_nothing(hub, node, how):
    engine = Engine(hub)
    if how == "stop":
        hub.stop(WORKER)
    else:
        os.killpg(engine.pid, signal.SIGKILL)
    hub.exited(WORKER)
    found = {(report.cause, report.signal) for report in reports(hub)}
    assert found == ({("stopped", None)} if how == "stop" else {("exited", 9)})


def test_a_server_that_ends_after_its_parts_tells_how_itself(hub, node):
    engine = Engine(hub)
    os.kill(engine.pid, signal.SIGTERM)  # it kills its parts, then exits with 0
    hub.exited(WORKER)
    assert {(report.cause, report.exit_code) for report in reports(hub)} == {("exited", 0)}


def test_an_agent_without_pidfds_finds_it_too(hub, nodes, tmp_path):
    used = tmp_path / "used"
    plug = f"import os\nif hasattr(os, 'pidfd_open'):\n    del os.pidfd_open\nopen({str(used)!r}, 'w').close()\n"
    (tmp_path / "sitecustomize.py").write_text(plug)
    nodes.start(env={"PYTHONPATH": str(tmp_path)})
    hub.join()
    engine = Engine(hub)
    os.kill(engine.part("part::scheduler"), signal.SIGKILL)
    assert hub.exited(WORKER).cause == "process_lost" and used.exists()
