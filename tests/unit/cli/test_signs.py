"""Whether a run goes on, told by its verdict, its process, its files and Slurm, in a world where each may be silent."""

from __future__ import annotations

import json
import os
import subprocess
import time

import msgspec
import pytest

from miles_hpc.agent.lease import lease_path, renew_lease
from miles_hpc.agent.procfs import boot_id, start_time
from miles_hpc.cli import signs
from miles_hpc.cli.signs import FRESH_S, LOST_AFTER_S, SETTLE_S, Watch, going_on, look_once
from miles_hpc.cli.source import find_run, said_over
from miles_hpc.config.errors import ConfigError
from miles_hpc.launch.attempts import Attempt, claim_attempt, register
from miles_hpc.launch.job_states import Life, job_state
from miles_hpc.launch.slurm_commands import JobRow, SlurmError

pytestmark = pytest.mark.unit


class World:
    """A run directory, two clocks and Slurm."""

    def __init__(self, run_dir) -> None:
        self.run_dir, self.now, self.skew = run_dir, 1000.0, 0.0
        self.jobs: dict[str, JobRow] | None = {}
        self.asked: list[list[str]] = []
        (run_dir / "attempts").mkdir(parents=True)
        (run_dir / "verdicts").mkdir()

    def claim(self, number=0, job_id="", host="elsewhere", **more) -> Attempt:
        started = self.wall() - 1000.0
        claim = Attempt(
            number=number,
            run_id="r",
            job_id=job_id,
            host=host,
            **{"pid": 1, "pid_start": 1, "started": started, **more},
        )
        (self.run_dir / "attempts" / f"{number}.json").write_bytes(msgspec.json.encode(claim))
        return claim

    def writes(self, ago=0.0, number=0) -> None:
        """Its hub writes a status, as by its own clock."""
        status = {"attempt": number, "written_at": self.wall() - ago + self.skew}
        draft = self.run_dir / "draft"
        draft.write_text(json.dumps(status))
        draft.replace(self.run_dir / "status.json")

    def ends(self, outcome="finished", number=0) -> None:
        (self.run_dir / "verdicts" / f"attempt-{number}.json").write_text(json.dumps({"outcome": outcome}))

    def job(self, state: str, restarts=0) -> None:
        self.jobs = {"7": JobRow(job_id="7", state=job_state(state), restarts=restarts)}

    def slurm(self, ids):
        self.asked.append(list(ids))
        if self.jobs is None:
            raise SlurmError("squeue did not answer")
        return {job: row for job, row in self.jobs.items() if job in ids}

    def clock(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1e9 + self.now

    def watch(self, claim) -> Watch:
        return Watch(self.run_dir, claim, slurm=self.slurm, clock=self.clock, wall=self.wall)


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path / "run")


def test_a_run_of_this_machine_lives_as_long_as_the_command_that_started_it(world):
    here = {"host": os.uname().nodename, "boot": boot_id()}
    living = world.claim(**here, pid=os.getpid(), pid_start=start_time(os.getpid()))
    assert world.watch(living).look().life is Life.RUNNING
    world.writes(ago=FRESH_S)
    sign = world.watch(world.claim(**here, pid=os.getpid(), pid_start=1)).look()
    assert sign.died and f"pid {os.getpid()}) and all its processes are gone" in sign.why
    world.ends("cancelled")
    sign = world.watch(living).look()
    assert sign.over and sign.verdict and not sign.died and sign.why == "cancelled"


def test_what_winds_down_without_its_command_may_still_write_a_verdict(world):
    claim = world.claim(host=os.uname().nodename, boot=boot_id(), pid=os.getpid(), pid_start=1)
    world.writes()
    env = {**os.environ, "MILES_HPC_MARK": "r/0/node-00000/0/warden/g0-0", "MILES_HPC_RUN_DIR": str(world.run_dir)}
    with subprocess.Popen(["cat"], env=env, stdin=subprocess.PIPE) as left:
        watch = world.watch(claim)
        assert not watch.look().over
        world.now += LOST_AFTER_S
        assert watch.look().died, "one that cannot be killed keeps nobody waiting for ever"
        left.kill()
    world.writes()
    assert watch.look().life is Life.RUNNING, "who writes lives, whatever can be seen of its processes"
    world.now += FRESH_S
    assert watch.look().died
    world.ends()
    assert watch.look().verdict


def test_a_run_in_another_container_of_this_machine_is_judged_by_its_files(world):
    here = {"host": os.uname().nodename, "boot": boot_id(), "pid_ns": "pid:[1]"}
    claim = world.claim(**here, pid=os.getpid(), pid_start=1)
    world.writes(ago=14.5)
    watch = world.watch(claim)
    assert watch.look().life is Life.UNKNOWN
    world.writes()
    assert watch.look().life is Life.RUNNING
    world.now += LOST_AFTER_S
    assert watch.look().died


@pytest.mark.parametrize("stalled_s", [14.5, 60.0, 14.5 + 60.0])
def test_a_failover_or_a_stalled_file_system_elsewhere_is_no_end(world, stalled_s):
    claim = world.claim()
    world.writes(ago=stalled_s)
    sign = world.watch(claim).look()
    assert sign.life is Life.UNKNOWN and not sign.over and f"{stalled_s:.0f} s ago" in sign.text


def test_files_that_stand_still_for_long_are_an_end_and_those_that_move_are_none(world):
    claim = world.claim()
    world.writes()
    watch = world.watch(claim)
    for _ in range(5):
        world.now += LOST_AFTER_S - 1
        assert not watch.look().over
        world.writes()
        assert watch.look().life is Life.RUNNING
    world.now += LOST_AFTER_S
    assert watch.look().died


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_a_hub_whose_clock_differs_is_followed_by_what_it_writes(world, skew):
    claim, world.skew = world.claim(), skew
    world.writes()
    watch = world.watch(claim)
    assert watch.look().life is (Life.UNKNOWN if skew < 0 else Life.RUNNING)
    for _ in range(100):
        world.now += 4
        world.writes()
        assert watch.look().life is Life.RUNNING
    world.now += LOST_AFTER_S
    assert watch.look().died


def test_age_alone_ends_nothing_before_files_were_seen_to_stand_still(world):
    claim = world.claim()
    world.writes(ago=3600.0)
    watch = world.watch(claim)
    assert watch.look().life is Life.UNKNOWN
    world.now += FRESH_S - 0.1
    assert watch.look().life is Life.UNKNOWN
    world.now += 0.2
    assert watch.look().died


@pytest.mark.parametrize("lives", [True, False])
def test_who_looks_once_waits_for_a_second_look_where_only_age_calls_it_dead(tmp_path, monkeypatch, lives):
    monkeypatch.setattr(signs, "STILL_S", 0.01)
    old, fresh = World(tmp_path / "old"), World(tmp_path / "fresh")
    now, paused = time.time(), []
    for world in (old, fresh):
        world.now = now - 1e9
    claims = [(world.run_dir, world.claim()) for world in (old, fresh)]
    old.writes(ago=3600.0)
    fresh.writes()

    def pause(seconds):
        paused.append(seconds)
        if lives:
            old.writes(ago=3600.0)
        else:
            time.sleep(seconds)

    assert [sign.life for sign in look_once(claims, pause=pause)] == [
        Life.RUNNING if lives else Life.ENDED,
        Life.RUNNING,
    ]
    assert paused == [0.01]
    look_once(claims[1:], pause=pause)
    assert paused == [0.01], "nobody waits for what needs no second look"


def test_a_lease_that_moves_or_a_hub_that_answers_is_a_sign_of_life(world):
    claim = world.claim()
    lease_path(world.run_dir, 0).parent.mkdir(parents=True)
    renew_lease(lease_path(world.run_dir, 0), 1)
    os.utime(lease_path(world.run_dir, 0), (world.wall() - 100, world.wall() - 100))
    watch = world.watch(claim)
    assert watch.look().silent_s == pytest.approx(100)
    renew_lease(lease_path(world.run_dir, 0), 1)
    assert watch.look().life is Life.RUNNING
    world.now += LOST_AFTER_S
    watch.heard()
    assert not watch.look().over


@pytest.mark.parametrize(
    ("state", "restarts", "silent_s", "life"),
    [
        ("RUNNING", 0, 10 * LOST_AFTER_S, Life.RUNNING),
        ("RUNNING", 1, 60.0, Life.WAITING),
        ("PENDING", 0, 60.0, Life.WAITING),
        ("NODE_FAIL", 0, SETTLE_S - 1, Life.UNKNOWN),
        ("NODE_FAIL", 0, SETTLE_S + 1, Life.ENDED),
        ("UNHEARD_OF", 0, 60.0, Life.UNKNOWN),
    ],
)
def test_slurm_tells_of_a_job_whose_hub_is_silent(world, state, restarts, silent_s, life):
    claim = world.claim(job_id="7")
    world.writes(ago=silent_s)
    world.job(state, restarts)
    sign = world.watch(claim).look()
    assert sign.life is life
    assert ("job 7 is" in sign.why) == (state != "UNHEARD_OF")


def test_slurm_is_asked_only_about_silent_runs_and_not_at_every_look(world):
    claim, world.jobs = world.claim(job_id="7"), None
    world.writes()
    watch = world.watch(claim)
    watch.look()
    assert world.asked == []
    world.now += 20
    for _ in range(10):
        assert watch.look().life is Life.UNKNOWN
        world.now += 1
    assert world.asked == [["7"], ["7"]]
    world.now += LOST_AFTER_S
    assert watch.look().died, "nobody knows of it any more"


def test_an_attempt_that_another_has_followed_is_over(world):
    claim = world.claim(job_id="7")
    world.claim(number=1, job_id="7", restart=1)
    world.writes(number=1)
    sign = world.watch(claim).look()
    assert sign.over and "attempt 1 has followed" in sign.why


def test_the_only_run_going_on_may_be_silent_and_one_question_serves_all_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(signs, "STILL_S", 0.01)
    worlds = [World(tmp_path / name) for name in ("ended", "silent", "lost", "job")]
    ended, silent, lost, job = worlds
    for world, job_id in ((ended, "7"), (silent, ""), (lost, ""), (job, "8")):
        world.claim(job_id=job_id, started=0.0)
    now = time.time() - silent.wall()
    ended.ends()
    silent.writes(ago=80 - now)
    lost.writes(ago=LOST_AFTER_S + 1 - now)
    job.writes(ago=LOST_AFTER_S + 1 - now)
    job.jobs = {"8": JobRow(job_id="8", state=job_state("RUNNING"))}
    found = going_on([world.run_dir for world in worlds], job.slurm)
    assert [(run_dir.name, sign.life) for run_dir, sign in found] == [("silent", Life.UNKNOWN), ("job", Life.RUNNING)]
    assert job.asked == [["8"]]


def test_the_age_of_silent_runs_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    silent, living = World(tmp_path / "silent"), tmp_path / "living"
    claim = silent.claim(started=time.time() - 80)
    register(silent.run_dir, msgspec.structs.replace(claim, run_id="silent"))
    assert find_run("") == silent.run_dir
    living.mkdir()
    register(living, claim_attempt(living))
    with pytest.raises(ConfigError, match=r"2 runs are going on \(living, silent silent for 8\d s\): name one"):
        find_run("")


def test_who_follows_a_run_learns_how_it_ended(world, capsys):
    claim = world.claim()
    watch = world.watch(claim)
    watch.look()
    world.now += LOST_AFTER_S
    assert said_over(claim, watch.look()) == 1
    assert "attempt 0 died without a verdict: its hub writes no more" in capsys.readouterr().err
    world.ends("failed")
    assert said_over(claim, watch.look()) == 0
    assert capsys.readouterr().err == ""
