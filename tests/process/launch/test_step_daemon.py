"""Whether the slurmstepd above a process is gone, with stand-ins that carry its name."""

import shutil
import subprocess

import pytest

from miles_hpc.launch.step_daemon import StepDaemon

pytestmark = pytest.mark.process


@pytest.fixture
def chain(tmp_path):
    """Starts shells of these names, each the child of the one before; returns the first one, and the pid of the last's
    child, which lives until its input ends."""
    started = []
    leaf = tmp_path / "leaf"
    leaf.write_text("#!/bin/sh\necho $$\nexec cat\n")
    leaf.chmod(0o755)

    def start(*names):
        command = str(leaf)
        for name in reversed(names):
            # The kernel names a process by the last part of its path.
            (tmp_path / name).symlink_to(shutil.which("sh"))
            script = tmp_path / f"{name}.sh"
            script.write_text(f"{command}\n:\n")
            command = f"{tmp_path / name} {script}"
        process = subprocess.Popen(command.split(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.stdin.close()
        process.stdout.read()  # ends with the leaf
        process.wait(20)
        process.stdout.close()


@pytest.mark.parametrize("between", [(), ("warden",), ("starter-suid", "warden", "agent")])
def test_the_daemon_is_known_with_other_processes_between_and_gone_once_it_is_killed(chain, between):
    daemon, leaf = chain("slurmstepd", *between)
    found = StepDaemon(leaf)
    assert not found.gone()
    daemon.kill()
    daemon.wait(20)
    assert found.gone()


def test_where_no_daemon_is_seen_none_is_called_gone(chain):
    """As in a container with a pid namespace of its own."""
    first, leaf = chain("appinit", "warden")
    found = StepDaemon(leaf)
    assert not found.gone()
    first.kill()
    first.wait(20)
    assert not found.gone()
