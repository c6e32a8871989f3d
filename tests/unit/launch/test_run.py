"""Where a run stands, from files and Slurm in that order; one question for many jobs; who is queued again."""

import json
import os
import subprocess
import time

import msgspec
import pytest

from miles_hpc.agent.procfs import boot_id, start_time
from miles_hpc.cli.exits import BAD_INPUT
from miles_hpc.cli.main import main
from miles_hpc.config.schema import SlurmConfig
from miles_hpc.hub.site import SiteError
from miles_hpc.launch import run as run_module
from miles_hpc.launch import slurm_site
from miles_hpc.launch.allocation import JobKey
from miles_hpc.launch.attempts import Attempt
from miles_hpc.launch.job_files import exit_code_path, requeue_path, write_exit_code, write_requeue
from miles_hpc.launch.job_states import job_state
from miles_hpc.launch.run import Run, RunTimeout, State
from miles_hpc.launch.slurm_commands import JobRow, SlurmError
from miles_hpc.launch.slurm_site import SlurmSite, idle_attempts
from miles_hpc.launch.submission import Submitted
from miles_hpc.launch.watch import ACCOUNTING_BACK_OFF_S, SlurmWatch

pytestmark = pytest.mark.unit

KEY = JobKey(job_id="7")


def row(state: str, job_id: str = "7", **fields) -> JobRow:
    return JobRow(job_id=job_id, state=job_state(state), **fields)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slurm:
    """A table of jobs in place of squeue and sacct, and a count of the questions."""

    def __init__(self) -> None:
        self.queue: dict[str, JobRow] = {}
        self.accounts: dict[str, JobRow] = {}
        self.asked: list[list[str]] = []
        self.accounting_asked = 0
        self.down = self.no_accounting = False
        self.clock = Clock()
        self.watch = SlurmWatch(5.0, squeue=self.squeue, sacct=self.sacct, clock=self.clock)

    def squeue(self, ids):
        self.asked.append(list(ids))
        if self.down:
            raise SlurmError("squeue ended with 1: Unable to contact slurm controller")
        return {job: found for job, found in self.queue.items() if job in ids}

    def sacct(self, ids):
        self.accounting_asked += 1
        if self.no_accounting:
            raise SlurmError("sacct ended with 1: Slurm accounting storage is disabled")
        return {job: found for job, found in self.accounts.items() if job in ids}


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


@pytest.fixture
def place(tmp_path):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "attempts").mkdir()
    (tmp_path / "verdicts").mkdir()
    (tmp_path / "slurm" / "job.json").write_bytes(msgspec.json.encode(Submitted(job_id="7", submitted=1.0)))
    return tmp_path


def attempt(place, number: int = 0, job_id: str = "7", restart: int = 0, **more) -> None:
    more = {"host": "elsewhere", "pid": 1, "pid_start": 1, "started": 2.0, **more}
    claim = Attempt(number=number, run_id="r", job_id=job_id, restart=restart, nodes=2, **more)
    (place / "attempts" / f"{number}.json").write_bytes(msgspec.json.encode(claim))


def verdict(place, number: int = 0, **summary) -> None:
    (place / "verdicts" / f"attempt-{number}.json").write_text(json.dumps(summary))


def status(place, number: int = 0, age_s: float = 0.0, ready: float | None = 1.0) -> None:
    text = json.dumps({"attempt": number, "written_at": time.time() - age_s, "seconds": {"ready": ready}})
    (place / "status.json").write_text(text)


def of(place, slurm: Slurm, **more) -> Run:
    return Run(place, watch=slurm.watch, clock=slurm.clock, **more)


# ------------------------------------------------------------------------------------------------- states
@pytest.mark.parametrize("outcome", ["finished", "failed", "cancelled", "drained"])
def test_the_verdict_speaks_before_slurm(place, slurm, outcome):
    attempt(place)
    verdict(place, outcome=outcome, reason="why")
    slurm.queue["7"] = row("RUNNING")
    found = of(place, slurm).standing()
    assert (found.state, found.reason) == (State(outcome), "why") and not slurm.asked


def test_a_fresh_status_speaks_before_slurm_and_says_whether_all_is_ready(place, slurm):
    attempt(place)
    status(place, ready=None)
    assert of(place, slurm).state is State.STARTING
    status(place)
    assert of(place, slurm).state is State.RUNNING and not slurm.asked


@pytest.mark.parametrize("behind_s", [3600.0, 20.0, -3600.0])
def test_a_hub_whose_clock_differs_is_known_by_what_it_writes(place, slurm, behind_s):
    """Without Slurm's word, too: it is down here."""
    attempt(place)
    slurm.down = True
    run = of(place, slurm)
    status(place, age_s=behind_s)
    assert run.state is (State.UNKNOWN if behind_s > 0 else State.RUNNING), "at first sight only the clocks tell"
    for later in range(1, 4):
        slurm.clock.now += 5
        status(place, age_s=behind_s - 5 * later)
        assert run.state is State.RUNNING
    slurm.clock.now += run_module.FRESH_S + 1
    assert run.state is State.UNKNOWN, "it writes no more"


@pytest.mark.parametrize("restarts, ready, found", [
    (0, 1.0, State.RUNNING), (0, None, State.STARTING), (1, 1.0, State.STARTING),
])  # fmt: skip
def test_while_slurm_calls_the_job_running_the_last_status_says_whether_all_was_ready(
    place, slurm, restarts, ready, found
):
    """However old it seems, unless it is of an earlier start of the job."""
    attempt(place)
    status(place, age_s=60.0, ready=ready)
    slurm.queue["7"] = row("RUNNING", restarts=restarts)
    assert of(place, slurm).state is found


def test_an_old_status_or_another_attempt_s_says_nothing(place, slurm):
    attempt(place)
    slurm.queue["7"] = row("PENDING", reason="Priority")
    for number, age in ((0, 60.0), (3, 0.0)):
        status(place, number, age)
        assert of(place, slurm).standing() == run_module.Standing(State.PENDING, "Priority")


@pytest.mark.parametrize(
    ("state", "found"),
    [("PENDING", State.PENDING), ("CONFIGURING", State.PENDING), ("RUNNING", State.STARTING),
     ("CANCELLED by 0", State.CANCELLED),
     ("FAILED", State.FAILED), ("NODE_FAIL", State.FAILED), ("TIMEOUT", State.FAILED), ("PREEMPTED", State.FAILED)],
)  # fmt: skip
def test_before_the_first_attempt_slurm_speaks(place, slurm, state, found):
    slurm.queue["7"] = row(state)
    assert of(place, slurm).state is found


def test_a_job_that_ended_without_a_verdict_is_given_time_for_the_file_system(place, slurm):
    attempt(place)
    slurm.queue["7"] = row("NODE_FAIL")
    run = of(place, slurm)
    assert run.state is State.UNKNOWN
    slurm.clock.now += run_module.SETTLE_S + 1
    found = run.standing()
    assert found.state is State.FAILED and "NODE_FAIL and has left no verdict" in found.reason


def test_what_nobody_knows_is_unknown_for_a_while_and_then_lost(place, slurm):
    attempt(place)
    run = of(place, slurm, lost_after_s=60.0)
    assert run.state is State.UNKNOWN
    slurm.clock.now += 59
    assert run.state is State.UNKNOWN
    slurm.clock.now += 2
    found = run.standing()
    assert found.state is State.LOST and "Slurm does not know job 7" in found.reason
    assert run.wait(1)["outcome"] == "lost"


def test_a_run_of_this_machine_of_which_nothing_lives_is_lost_in_seconds_and_waited_for_no_more(place, slurm, capsys):
    (place / "slurm" / "job.json").unlink()
    here = {"host": os.uname().nodename, "boot": boot_id(), "pid": os.getpid()}
    attempt(place, job_id="", **here, pid_start=start_time(os.getpid()))
    assert of(place, slurm).state is State.RUNNING
    attempt(place, job_id="", **here, pid_start=1)
    status(place, age_s=run_module.WRITES_S)
    env = {**os.environ, "MILES_HPC_MARK": "r/0/node-00000/0/warden/g0-0", "MILES_HPC_RUN_DIR": str(place)}
    with subprocess.Popen(["cat"], env=env, stdin=subprocess.PIPE) as left:
        assert of(place, slurm).state is State.RUNNING, "what winds down may still write a verdict"
        left.kill()
    status(place)
    run = of(place, slurm)
    assert run.state is State.RUNNING, "its processes may be hidden from us"
    slurm.clock.now += run_module.WRITES_S
    found = run.standing()
    assert found.state is State.LOST and f"pid {os.getpid()}) and all its processes are gone" in found.reason
    assert run.wait(0) == {"outcome": "lost", "reason": found.reason}
    status(place, age_s=run_module.WRITES_S)
    assert main(["drain", str(place), "--wait"]) == BAD_INPUT
    assert f"there is nothing to drain: lost {found.reason}" in capsys.readouterr().err
    verdict(place, outcome="failed", reason="why")
    assert run.state is State.FAILED


def test_an_earlier_run_of_this_machine_that_is_gone_says_nothing_of_a_job_that_was_submitted_since(place, slurm):
    attempt(place, job_id="", host=os.uname().nodename, boot=boot_id(), started=0.5)
    slurm.queue["7"] = row("PENDING")
    assert of(place, slurm).state is State.PENDING


def test_a_sign_of_life_begins_the_time_anew(place, slurm):
    attempt(place)
    run = of(place, slurm, lost_after_s=60.0)
    assert run.state is State.UNKNOWN
    slurm.clock.now += 50
    status(place)
    assert run.state is State.RUNNING
    slurm.clock.now += 50
    assert run.state is State.UNKNOWN


def test_a_drained_attempt_goes_on_while_its_job_is_queued_again(place, slurm):
    attempt(place)
    verdict(place, outcome="drained", reason="USR2", requeue=True)
    slurm.queue["7"] = row("RUNNING")
    run = of(place, slurm)
    assert not run.state.terminal, "the files for the script come after the verdict"
    write_requeue(place, KEY, "USR2")
    write_exit_code(place, KEY, 75)
    slurm.queue["7"] = row("PENDING", reason="BeginTime")
    slurm.clock.now += 6
    assert run.state is State.PENDING
    attempt(place, 1, restart=1)
    status(place, 1)
    assert (run.state, run.attempt) == (State.RUNNING, 1)


def test_a_drained_attempt_that_is_not_queued_again_has_ended(place, slurm):
    attempt(place)
    verdict(place, outcome="drained", reason="USR2", requeue=True)
    write_exit_code(place, KEY, 75)
    slurm.queue["7"] = row("RUNNING")
    assert of(place, slurm).state is State.DRAINED


def test_a_later_submission_waits_beside_an_old_verdict(place, slurm):
    attempt(place)
    verdict(place, outcome="failed", reason="old")
    (place / "slurm" / "job.json").write_bytes(msgspec.json.encode(Submitted(job_id="9", submitted=3.0)))
    slurm.queue["9"] = row("PENDING", "9")
    run = of(place, slurm)
    assert (run.job_id, run.state) == ("9", State.PENDING)


def test_waiting_ends_at_its_deadline_with_what_is_known(place, slurm):
    slurm.queue["7"] = row("PENDING", reason="Resources")
    with pytest.raises(RunTimeout, match="pending after 0 s: Resources"):
        of(place, slurm).wait(0)


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no submitted run"):
        Run(tmp_path)


# -------------------------------------------------------------------------------------------------- watch
def test_one_question_in_an_interval_for_all_jobs(slurm):
    slurm.queue = {str(job): row("RUNNING", str(job)) for job in range(5)}
    for job in slurm.queue:
        slurm.watch.row(job)
    del slurm.asked[:]
    for _ in range(10):
        slurm.clock.now += 1
        for job in slurm.queue:
            assert slurm.watch.row(job).state.name == "RUNNING"
    assert len(slurm.asked) == 2 and sorted(slurm.asked[0]) == sorted(slurm.queue)


def test_a_forgotten_job_is_looked_up_in_the_accounting_and_what_has_ended_is_asked_no_more(slurm):
    slurm.accounts["7"] = row("FAILED", exit_code=1)
    assert slurm.watch.row("7").state.name == "FAILED"
    slurm.clock.now += 100
    slurm.watch.row("7")
    assert (len(slurm.asked), slurm.accounting_asked) == (1, 1)


def test_an_accounting_that_calls_a_vanished_job_running_is_not_believed(slurm):
    slurm.accounts["7"] = row("RUNNING")
    assert slurm.watch.row("7").state.name == "UNKNOWN"


def test_without_accounting_it_is_left_alone_for_a_while(slurm):
    slurm.no_accounting = True
    for _ in range(10):
        slurm.clock.now += 5
        assert slurm.watch.row("7") is None
    assert slurm.accounting_asked == 1
    slurm.clock.now += ACCOUNTING_BACK_OFF_S
    slurm.watch.row("7")
    assert slurm.accounting_asked == 2


def test_when_slurmctld_is_away_old_answers_stay_and_it_is_asked_less_often(slurm):
    slurm.queue["7"] = row("RUNNING")
    assert slurm.watch.row("7").state.name == "RUNNING"
    slurm.down = True
    for _ in range(60):
        slurm.clock.now += 1
        assert slurm.watch.row("7").state.name == "RUNNING"
    assert len(slurm.asked) <= 6
    slurm.down = False
    slurm.queue["7"] = row("COMPLETED")
    slurm.clock.now += 61
    assert slurm.watch.row("7").state.name == "COMPLETED"


def test_a_command_that_runs_into_its_time_limit_is_not_called_again_at_once():
    clock, asked = Clock(), []

    def silent(ids):
        asked.append(clock.now)
        clock.now += 20.0
        raise SlurmError("squeue did not answer within 20 s")

    watch = SlurmWatch(squeue=silent, sacct=silent, clock=clock)
    for _ in range(4):
        watch.row("7")
        clock.now += 1.0
    assert asked == [0.0]
    clock.now = 25.0
    watch.row("7")
    assert asked == [0.0, 25.0]


# --------------------------------------------------------------------------------------------------- site
@pytest.fixture
def site(place, slurm, monkeypatch):
    monkeypatch.setattr(slurm_site.slurm_commands, "squeue", lambda ids, timeout_s=0: slurm.squeue(ids))
    monkeypatch.setattr(slurm_site.slurm_commands, "down_nodes", lambda hosts: set(hosts) & {"n2"})
    monkeypatch.setattr(slurm_site.slurm_commands, "config_value", {"KillWait": "30 sec"}.__getitem__)
    slurm.queue["7"] = row("RUNNING", end=time.time() + 100)

    def make(restart: int = 0, number: int = 0, **config):
        environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart)}
        return SlurmSite(place, number, SlurmConfig(**config), environ)

    return make


def ended(place, outcome: str = "drained", number: int = 0, steps: int = 5, requeue: bool = True) -> None:
    verdict(place, number, outcome=outcome, exit_code=75, steps=steps, requeue=requeue, reason="why")


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING"])
def test_a_drained_run_is_queued_again_and_its_exit_code_written(place, site, slurm, state):
    slurm.queue["7"] = row(state)
    ended(place)
    site().on_verdict()
    assert exit_code_path(place, KEY).read_text() == "75\n" and requeue_path(place, KEY).exists()


@pytest.mark.parametrize(
    ("how", "made", "state"),
    [
        ({"outcome": "finished"}, {}, "RUNNING"),
        ({"outcome": "failed"}, {}, "RUNNING"),
        ({"requeue": False}, {}, "RUNNING"),
        ({}, {"requeue": False}, "RUNNING"),
        ({}, {"restart": 3, "max_requeues": 3}, "RUNNING"),
        ({"steps": 0}, {"max_idle_requeues": 1}, "RUNNING"),
        ({}, {}, "COMPLETING"),
    ],
    ids=["finished", "failed", "operator", "off", "too often", "idle", "cancelled"],
)
def test_others_are_not(place, site, slurm, how, made, state):
    ended(place, **how)
    slurm.queue["7"] = row(state)
    made = dict(made)
    restart = made.pop("restart", 0)
    key = JobKey(job_id="7", restart=restart)
    requeue_path(place, key).write_text("of an earlier step")
    site(restart, **made).on_verdict()
    assert exit_code_path(place, key).exists() and not requeue_path(place, key).exists()


def test_idle_attempts_are_those_in_a_row_that_got_no_further(place):
    for number, steps in enumerate([4, 9, 9, 9]):
        ended(place, number=number, steps=steps)
    assert [idle_attempts(place, number) for number in range(4)] == [0, 0, 1, 2]


def test_an_attempt_without_a_verdict_makes_no_idle_one_look_busy(place):
    for number, steps in ((0, 9), (2, 9), (4, 9), (5, 12)):
        ended(place, number=number, steps=steps)
    assert [idle_attempts(place, number) for number in (0, 2, 4, 5)] == [0, 1, 2, 0]


def test_the_end_of_the_allocation_and_the_down_nodes_are_seen(site):
    seen = site().look(["n1.cluster", "n2.cluster"])
    assert 90 < seen.seconds_left <= 100 and seen.down_hosts == {"n2"} and seen.kill_wait == 30


def test_the_nodes_of_the_job_are_known_by_their_names_in_its_order(place):
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[7-8,3],login"}
    assert list(SlurmSite(place, 0, SlurmConfig(), environ).hosts) == ["gpu7", "gpu8", "gpu3", "login"]


def test_the_kill_wait_is_asked_for_until_slurm_says_it(site, monkeypatch):
    answers = [SlurmError("busy"), "12 sec", AssertionError("asked for once too often")]

    def config_value(name):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(slurm_site.slurm_commands, "config_value", config_value)
    mine = site()
    assert [mine.look([]).kill_wait for _ in range(3)] == [None, 12, 12]


def test_a_slurm_that_does_not_answer_says_so_until_an_end_is_known(site, slurm):
    mine = site()
    slurm.down = True
    with pytest.raises(SiteError, match="Unable to contact"):
        mine.look([])
    slurm.down = False
    mine.look([])
    slurm.down = True
    assert 90 < mine.look([]).seconds_left <= 100


def test_what_squeue_says_counts_when_sinfo_fails(site, slurm, monkeypatch):
    """Also an end that was extended, and the other way round."""
    mine = site()
    assert mine.look([]).seconds_left <= 100
    slurm.queue["7"] = row("RUNNING", end=time.time() + 1000)
    with monkeypatch.context() as patch:

        def down_nodes(hosts):
            raise SlurmError("sinfo ended with 1: Unable to contact slurm controller")

        patch.setattr(slurm_site.slurm_commands, "down_nodes", down_nodes)
        assert mine.look(["n2"]).seconds_left > 900
    slurm.down = True
    for each in (mine, site()):
        assert each.look(["n2"]).down_hosts == {"n2"}


def test_a_step_whose_nodes_have_all_ended_is_left_to_slurm(site, monkeypatch):
    """Also in a container, where another process than slurmstepd is the warden's parent."""
    called = []
    monkeypatch.setattr(slurm_site.slurm_commands, "call", called.append)
    mine = site()
    mine.on_leave([], False)
    assert not called
    mine.on_leave(["n2"], False)
    mine.on_leave(["n1"], True)
    assert called == [["scancel", "7.0"], ["scancel", "7"]]
