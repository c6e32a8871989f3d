"""The crash of each role: with no budget for healing the run ends, and nothing of it is left on any node."""

from __future__ import annotations

import pytest

from tests.slurm.conftest import Bed, Job, wait_until

pytestmark = pytest.mark.slurm

ROLES = (
    "router-policy", "session-server", "engine-policy-0", "controller", "rollout-worker", "executor", "trainer",
    "driver",
)  # fmt: skip
NODE = "agent"
"""Agent and warden of a node at once: nobody of ours is left to clean up there."""
GONE_WITHIN_S = 15.0


def submit(bed: Bed, nodes: int) -> Job:
    # At a slow pace, so that many fit on this machine at once.
    return bed.submit(
        "smoke", "--set", "steps=400", "--set", "heal.budget=0", "--set", "inference.fake_token_ms=100",
        options=[f"--nodes={nodes}", "--cpus-per-task=3"],
    )  # fmt: skip


@pytest.mark.parametrize("roles", [ROLES[:3], ROLES[3:6], (*ROLES[6:], NODE)], ids=["serving", "data", "training"])
def test_after_the_crash_of_each_role_the_job_ends_and_no_process_is_left_on_any_node(bed: Bed, roles: tuple[str, ...]):
    jobs = {role: submit(bed, 1 if role is NODE else 2) for role in roles}
    for role, job in jobs.items():
        wait_until(f"the run for {role} is ready; {job.said()}", lambda job=job: job.events("all_ready"), 120)
        if role is NODE:
            job.kill_agents()
        else:
            job.kill_worker(role)
    for role, job in jobs.items():
        assert job.wait(90) == "FAILED", f"{role}: {job.said()}"
        if role is not NODE:
            verdict = job.verdict()
            assert verdict["outcome"] == "failed" and role in verdict["reason"], verdict["reason"]
            assert job.accounted()[1] == "1:0"
    for job in jobs.values():
        job.wait_no_process(GONE_WITHIN_S)
