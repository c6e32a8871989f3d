"""What Slurm's environment says about a task: nodes, place, grants."""

import socket

import pytest

from miles_hpc.launch.allocation import (
    JobKey,
    NotInAllocation,
    Task,
    cpus_of_node,
    expand_hosts,
    granted_gpus,
    granted_memory,
)
from miles_hpc.launch.node_address import NoAddress, addresses, choose_address, source_towards

pytestmark = pytest.mark.unit

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[001-003],login",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_JOB_CPUS_PER_NODE": "16(x3),8",
    "SLURM_CPUS_ON_NODE": "1",
    "SLURM_MEM_PER_NODE": "1024",
    "SLURM_STEP_GPUS": "0,2-3",
}


def test_a_task_knows_its_job_its_place_and_its_grant():
    task = Task.from_environ(STEP)
    assert (str(task.job), task.index, task.nodes, task.host) == ("7.0", 2, 4, "gpu003")
    assert task.hosts == ("gpu001", "gpu002", "gpu003", "login")
    assert (task.cpus, task.memory_bytes, task.gpus) == (16, 1 << 30, 3), "the job's CPUs, not the step's one"
    assert Task.from_environ({**STEP, "SLURM_NODEID": "3"}).cpus == 8


def test_a_requeued_job_is_another_start_of_the_same_job():
    assert Task.from_environ({**STEP, "SLURM_RESTART_COUNT": "2"}).job == JobKey(job_id="7", restart=2)


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_NODEID"])
def test_outside_of_a_step_the_missing_variable_is_named(missing):
    with pytest.raises(NotInAllocation, match=f"{missing} is not set.*miles-hpc run"):
        Task.from_environ({name: value for name, value in STEP.items() if name != missing})


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(NotInAllocation, match="do not fit together"):
        Task.from_environ({**STEP, "SLURM_NODEID": "4"})
    with pytest.raises(NotInAllocation, match=r"SLURM_STEP_NUM_NODES = 'many': expected a number"):
        Task.from_environ({**STEP, "SLURM_STEP_NUM_NODES": "many"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("a", ["a"]),
        ("b,a", ["b", "a"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[09-11,2],m1", ["n09", "n10", "n11", "n2", "m1"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("z[1-2],a[1-2]", ["z1", "z2", "a1", "a2"]),
    ],
)
def test_node_lists_are_expanded_in_their_order(text, hosts):
    assert expand_hosts(text) == hosts


def test_a_broken_node_list_is_named():
    with pytest.raises(NotInAllocation, match=r"'n\[1-' is no node list"):
        expand_hosts("n[1-")


def test_grants_that_are_not_said_are_0():
    assert (cpus_of_node("", 0), granted_memory({}, 8), granted_gpus({})) == (0, 0, 0)
    assert granted_memory({"SLURM_MEM_PER_CPU": "10"}, 8) == 80 << 20
    assert granted_gpus({"SLURM_GPUS_ON_NODE": "4"}) == 4


def test_an_address_of_this_machine_is_chosen_by_interface_and_subnet():
    assert choose_address(interface="lo", subnet="127.0.0.0/8") == "127.0.0.1"
    there = {address for _, address in addresses()}
    if any(not address.startswith(("127.", "::1", "fe80")) for address in there):
        assert choose_address() in there - {"127.0.0.1", "::1"}


def test_no_fitting_address_lists_what_there_is():
    with pytest.raises(NoAddress, match=rf"no address of {socket.gethostname()} fits .*'203\.0\.113\.0/24'.*lo 127"):
        choose_address(subnet="203.0.113.0/24")


def test_a_peer_whose_name_means_loopback_decides_nothing():
    assert source_towards("localhost") == ""
    assert source_towards("no-such-host.invalid") == ""
