"""Claims of attempts and the registry of runs."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from miles_hpc.agent.procfs import boot_id, pid_namespace, start_time
from miles_hpc.launch import attempts
from miles_hpc.launch.attempts import (
    Attempt,
    AttemptError,
    RunExists,
    RunIsLive,
    claim_attempt,
    gone_from_here,
    is_live,
    read_attempts,
    register,
    registered_runs,
)
from miles_hpc.launch.local import last_leaving, local_address

pytestmark = pytest.mark.unit


def _someone(number: int = 0, **fields: object) -> Attempt:
    values: dict[str, object] = {
        "number": number,
        "run_id": "r",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_start": start_time(os.getpid()),
        "boot": boot_id(),
        "started": 1.0,
    }
    return msgspec.convert({**values, **fields}, Attempt)


def _write(run_dir, attempt: Attempt) -> None:
    (run_dir / "attempts").mkdir(exist_ok=True)
    (run_dir / "attempts" / f"{attempt.number}.json").write_bytes(msgspec.json.encode(attempt))


def test_the_first_attempt_is_0_and_names_this_process(tmp_path):
    attempt = claim_attempt(tmp_path / "my-run", environ={"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2"})
    assert (attempt.number, attempt.run_id, attempt.job_id, attempt.restart) == (0, "my-run", "77", 2)
    assert (attempt.host, attempt.pid, attempt.pid_start) == (
        socket.gethostname(),
        os.getpid(),
        start_time(os.getpid()),
    )
    assert read_attempts(tmp_path / "my-run") == [attempt]
    assert (tmp_path / "my-run/logs/latest").readlink().name == "attempt-0"
    assert [path.name for path in (tmp_path / "my-run/attempts").iterdir()] == ["0.json"]


def test_a_directory_that_holds_a_run_needs_resume(tmp_path):
    _write(tmp_path, _someone(pid_start=1))
    with pytest.raises(RunExists, match="--resume"):
        claim_attempt(tmp_path)
    attempt = claim_attempt(tmp_path, resume=True)
    assert (attempt.number, attempt.run_id) == (1, "r")
    assert (tmp_path / "logs/latest").readlink().name == "attempt-1"


def test_a_live_attempt_is_refused_with_host_and_pid_even_with_resume(tmp_path):
    _write(tmp_path, _someone())
    for resume in (False, True):
        with pytest.raises(RunIsLive, match=rf"attempt 0 runs on host {socket.gethostname()} with pid {os.getpid()}"):
            claim_attempt(tmp_path, resume=resume)


@pytest.mark.parametrize(
    "change", [{"pid_start": 1}, {"pid": 2**22 + 1}, {"boot": "another boot"}, {"host": "elsewhere"}]
)
def test_an_attempt_whose_process_is_gone_is_over(tmp_path, change):
    _write(tmp_path, _someone(**change))
    assert claim_attempt(tmp_path, resume=True).number == 1


def test_a_run_in_another_container_of_this_machine_is_judged_by_its_hub_not_by_its_pid(tmp_path, monkeypatch):
    other = _someone(pid=1, pid_start=1, pid_ns="pid:[1]")
    _write(tmp_path, other)
    asked, answer = [], "h pid 5"
    monkeypatch.setattr(attempts, "_answering_hub", lambda run_dir, number: asked.append(number) or answer)
    assert not is_live(msgspec.structs.replace(_someone(), pid_ns="pid:[1]")), "its pid is somebody else's here"
    assert gone_from_here(tmp_path, other) == ""
    with pytest.raises(RunIsLive, match=r"attempt 0 runs in another container of host .* \(its hub answers: h pid 5\)"):
        claim_attempt(tmp_path, resume=True)
    answer = ""
    assert claim_attempt(tmp_path, resume=True).pid_ns == pid_namespace() != ""
    assert asked == [0, 0]


def test_a_claim_that_names_no_pid_namespace_is_judged_by_its_pid(tmp_path):
    assert is_live(_someone()) and gone_from_here(tmp_path, _someone(pid_start=1))


def test_of_other_containers_only_the_newest_attempt_s_hub_is_asked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(attempts, "_answering_hub", lambda run_dir, number: asked.append(number) or "")
    for number in range(3):
        _write(tmp_path, _someone(number, pid=1, pid_start=1, pid_ns="pid:[1]"))
    (tmp_path / "verdicts").mkdir()
    assert claim_attempt(tmp_path, resume=True).number == 3
    assert asked == [2]


def test_numbers_go_on_after_the_highest_in_numeric_order(tmp_path):
    for number in (2, 10):
        _write(tmp_path, _someone(number, pid_start=1))
    assert claim_attempt(tmp_path, resume=True).number == 11


def test_of_many_claims_at_once_one_wins(tmp_path, monkeypatch):
    def claim(_: int) -> int | None:
        try:
            return claim_attempt(tmp_path).number
        except RunIsLive:
            return None

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(claim, range(8)))
    assert sorted(results, key=str) == [0, *[None] * 7]
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["0.json"]


def test_a_lost_answer_of_link_counts_as_success(tmp_path, monkeypatch):
    """Over NFS a repeated link(2) finds the file that its own first try has made."""
    real = os.link

    def link_twice(source, target):
        real(source, target)
        real(source, target)

    monkeypatch.setattr(attempts.os, "link", link_twice)
    assert claim_attempt(tmp_path).number == 0


def test_a_broken_claim_is_named(tmp_path):
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts" / "0.json").write_text("{")
    with pytest.raises(AttemptError, match=r"attempts/0\.json is no claim"):
        claim_attempt(tmp_path, resume=True)


def test_the_registry_lists_living_directories_newest_first(tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    for name, started in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        register(tmp_path / name, _someone(run_id=name, started=started), environ)
    register(tmp_path / "gone", _someone(run_id="gone"), environ)
    (tmp_path / "state/miles-hpc/runs/broken.json").write_text("{")
    assert [(run.run_id, run.run_dir) for run in registered_runs(environ)] == [
        ("b", str(tmp_path / "b")),
        ("a", str(tmp_path / "a")),
    ]


def test_a_registry_that_cannot_be_written_harms_nothing(tmp_path):
    (tmp_path / "state").write_text("a file")
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert register(tmp_path, _someone(), environ) is None
    assert registered_runs(environ) == []


def test_local_nodes_have_addresses_of_their_own():
    assert [local_address(i) for i in (0, 1, 252)] == ["127.0.0.2", "127.0.0.3", "127.0.0.254"]
    with pytest.raises(ValueError, match="253"):
        local_address(253)


def test_the_reason_of_an_agent_s_end_is_read_from_its_log(tmp_path):
    assert last_leaving(tmp_path, 0, "node-00000") == ""
    log = tmp_path / "logs/attempt-0/node-00000/agent.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"event":"started"}\n{"t":1,"event":"leaving","reason":"the hub ended"}\n{"event":"left"}\n')
    assert last_leaving(tmp_path, 0, "node-00000") == "the hub ended"


def test_a_job_that_lives_on_this_host_is_named_with_its_id(tmp_path):
    _write(tmp_path, _someone(job_id="77", nodes=2))
    with pytest.raises(RunIsLive, match=rf"runs as job 77 on host {socket.gethostname()} with pid"):
        claim_attempt(tmp_path, resume=True, environ={"SLURM_JOB_ID": "78"})


def test_a_requeued_job_is_not_held_up_by_its_own_earlier_start(tmp_path):
    _write(tmp_path, _someone(job_id="77", host="elsewhere", nodes=2))
    environ = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}
    assert claim_attempt(tmp_path, resume=True, environ=environ).number == 1
