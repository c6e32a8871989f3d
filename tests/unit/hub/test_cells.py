"""A cell's life: reserve ports, start, end as a whole, heal within the budget."""

import json

import msgspec
import pytest

from miles_hpc.config.schema import HealConfig
from miles_hpc.hub.actions import VerdictWritten
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    FullTable,
    PortInfo,
    PortsReserved,
    ReservePorts,
    StartWorker,
    StopWorker,
    WorkerExited,
    WorkerReady,
    WorkerState,
)

pytestmark = pytest.mark.unit


def test_a_cell_goes_from_waiting_over_its_barriers_to_ready(fleet, pool):
    f = fleet(pool("engine", num_workers_per_cell=2), join=False)
    f.join(0)
    assert f.phases() == {"engine-00000": "reserving"}
    assert [o.worker for o in f.orders(ReservePorts)] == ["engine-00000-00000", "engine-00000-00001"]
    assert not f.orders(StartWorker)
    f.receive(*f.reports.pop(0))
    assert f.phases() == {"engine-00000": "reserving"} and f.state.book["engine"] == []
    f.receive(*f.reports.pop(0))
    assert f.phases() == {"engine-00000": "starting"}
    assert len(f.orders(StartWorker)) == 2
    f.settle()
    assert f.phases() == {"engine-00000": "ready"}
    assert [len(c.workers) for c in f.state.book["engine"]] == [2] and f.state.book["engine"][0].ready


def test_nothing_is_placed_before_every_node_has_joined(fleet, pool):
    f = fleet(pool("engine", num_cells=2), nodes=2, join=False)
    f.join(0)
    assert not f.orders(ReservePorts)
    f.join(1)
    assert [o.worker for o in f.orders(ReservePorts)] == ["engine-00000-00000", "engine-00001-00000"]


def test_a_pool_that_reads_another_starts_after_all_ports_of_that_are_known(fleet, pool):
    reader = pool("reader", reads=("engine",), launch_command=lambda ctx: ["r", str(ctx.pool_addrs["engine"])])
    f = fleet(reader, pool("engine", num_cells=2), join=False)
    f.join(0)
    reports = {report.worker: (peer, report) for peer, report in f.reports}
    f.reports.clear()
    f.receive(*reports["reader-00000-00000"])
    f.receive(*reports["engine-00000-00000"])
    assert f.phases()["reader-00000"] == "reserved"
    f.receive(*reports["engine-00001-00000"])
    assert f.phases()["reader-00000"] == "starting"
    (order,) = [o for o in f.orders(StartWorker) if o.worker.startswith("reader")]
    assert order.argv[1].count("HostAndPort") == 2


def test_the_environment_names_the_worker_its_ports_and_the_master(fleet, pool):
    ports = (PortInfo(name="rpc"), PortInfo(name="master", mode="master"))
    f = fleet(pool("trainer", num_workers_per_cell=2, port_infos=ports, env=lambda ctx: {"X": "1"}), run_dir="/run/r")
    first, second = f.orders(StartWorker)
    assert first.env["MILES_HPC_WORKER"] == "trainer-00000-00000" and first.env["X"] == "1"
    assert second.env["MILES_HPC_GENERATION"] == "1-1" and second.env["MILES_HPC_RUN_DIR"] == "/run/r"
    assert second.env["MILES_HPC_CELL_SIZE"] == "2" and second.env["MILES_HPC_NODE"] == "node-00000"
    assert json.loads(first.env["MILES_HPC_LISTEN"]).keys() == {"rpc", "master"}
    assert json.loads(second.env["MILES_HPC_LISTEN"]).keys() == {"rpc"}
    assert second.env["MILES_HPC_MASTER"] == first.env["MILES_HPC_LISTEN"]
    assert first.argv[2].startswith("10.0.0.1:")


def test_a_user_environment_cannot_take_a_workers_name(fleet, pool):
    f = fleet(pool("engine", env=lambda ctx: {"MILES_HPC_WORKER": "other"}))
    assert f.orders(StartWorker)[0].env["MILES_HPC_WORKER"] == "engine-00000-00000"


def test_a_command_that_cannot_be_rendered_ends_the_run_with_its_pool(fleet, pool):
    f = fleet(pool("engine", launch_command=lambda ctx: [ctx.pool_addrs["nowhere"]]))
    assert [v.outcome for v in f.verdicts] == ["failed"]
    assert "pool engine" in f.verdicts[0].reason and "nowhere" in f.verdicts[0].reason
    assert not f.orders(StartWorker)


@pytest.mark.parametrize("restart", ["restart", "fail_run"])
def test_a_lost_race_for_a_port_is_run_again_on_another_and_costs_no_budget(fleet, pool, restart):
    f = fleet(pool("engine", restart=restart), heal=HealConfig(budget=0))
    f.clear()
    for n in range(1, 4):
        f.die("engine-00000-00000", cause="port_taken", settle=False)
        assert [(o.generation.n, o.keep) for o in f.orders(ReservePorts)] == [(n + 1, {})]
        f.settle()
        f.clear()
        # It becomes ready in between, unless its ports are taken four times in a row.
        f.cell("engine-00000").port_losses = n
    f.die("engine-00000-00000", cause="port_taken")
    assert [v.outcome for v in f.verdicts] == ["failed"]


def test_a_death_stops_the_siblings_and_the_cell_starts_again_when_all_are_gone(fleet, pool):
    f = fleet(pool("engine", num_workers_per_cell=2), pool("other"))
    ports = [dict(w.ports) for w in f.cell("engine-00000").workers]
    f.clear()
    f.die("engine-00000-00001", settle=False)
    assert f.orders(ReservePorts, StartWorker, StopWorker) == [
        StopWorker(
            worker="engine-00000-00000",
            generation=Generation(1, 1),
            reason="engine-00000-00001 ended with exit code 1",
        )
    ]
    assert f.phases() == {"engine-00000": "stopping", "other-00000": "ready"}
    assert f.state.book["engine"] == []
    f.settle()
    assert f.phases() == {"engine-00000": "ready", "other-00000": "ready"}
    assert f.cell("engine-00000").generation == Generation(1, 2)
    assert [o.keep for o in f.orders(ReservePorts)] == ports
    assert [dict(w.ports) for w in f.cell("engine-00000").workers] == ports
    assert f.core.healed() == 1 and not f.verdicts


def test_a_cell_leaves_the_address_book_when_its_process_has_ended_and_starts_when_the_rest_is_gone(fleet, pool):
    f = fleet(pool("engine", num_gpus_per_worker=1), gpus=1)
    peer = f.agents[0].peer
    ended = WorkerExited(
        worker="engine-00000-00000", generation=Generation(1, 1), exit_code=1, cause="port_taken", gone=False
    )
    f.clear()
    for _ in range(2):
        f.receive(peer, ended)
        assert f.phases() == {"engine-00000": "stopping"}
        assert f.state.book["engine"] == []
        assert f.orders(ReservePorts, StartWorker, StopWorker) == []
        assert f.core.nodes["node-00000"].gpu_holders
        assert f.cell("engine-00000").port_losses == 1
    f.receive(peer, msgspec.structs.replace(ended, gone=True))
    assert f.orders(ReservePorts)
    assert f.cell("engine-00000").port_losses == 1
    f.settle()
    assert f.phases() == {"engine-00000": "ready"}
    assert f.core.healed() == 1


def test_a_cell_whose_process_was_lost_is_healed_with_what_its_log_says_of_that(fleet, pool):
    f = fleet(pool("engine"))
    text = "its process sglang::scheduler (pid 7), without which it cannot go on, ended with exit code 1"
    how = {"cause": "process_lost", "text": text, "exit_code": None, "log_tail": "RuntimeError: it broke\n"}
    f.die("engine-00000-00000", **how)
    (ends,) = [note for note in f.notes if note.event == "cell_ends"]
    last = "its last line: RuntimeError: it broke"
    assert ends.fields["reason"] == f"engine-00000-00000 is gone, process_lost: {text}; {last}"
    assert f.phases() == {"engine-00000": "ready"} and f.core.healed() == 1


def test_a_death_counts_against_the_node_before_the_rest_is_gone(fleet, pool):
    f = fleet(pool("engine"))
    f.receive(
        f.agents[0].peer,
        WorkerExited(worker="engine-00000-00000", generation=Generation(1, 1), exit_code=1, gone=False),
    )
    assert [cell for _, cell in f.core.nodes["node-00000"].deaths] == ["engine-00000"]


def test_reports_of_an_old_generation_change_nothing(fleet, pool):
    f = fleet(pool("engine"))
    f.die("engine-00000-00000")
    assert f.cell("engine-00000").generation == Generation(1, 2)
    f.clear()
    before = f.phases()
    old = {"worker": "engine-00000-00000", "generation": Generation(1, 1)}
    peer = f.agents[0].peer
    for report in (WorkerExited(exit_code=1, **old), WorkerReady(**old), PortsReserved(ports={"http": 1}, **old)):
        assert f.receive(peer, report) == []
    assert f.phases() == before


def test_a_report_of_another_node_is_ignored(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    other = f.agents[1].peer if f.cell("engine-00000").workers[0].node == "node-00000" else f.agents[0].peer
    f.clear()
    assert f.receive(other, WorkerExited(worker="engine-00000-00000", generation=Generation(1, 1), exit_code=1)) == []


def test_backoff_doubles_from_the_second_restart_in_the_window(fleet, pool):
    f = fleet(pool("engine"), heal=HealConfig(budget=5, backoff_s=2.0, max_backoff_s=5.0, window_s=600.0))
    waits = []
    for _ in range(4):
        died_at = f.now
        f.die("engine-00000-00000")
        while f.phases() != {"engine-00000": "ready"}:
            f.pass_time(0.5)
        waits.append(f.now - died_at)
    assert waits == [0.0, 2.0, 4.0, 5.0]


def test_a_spent_budget_ends_the_run_and_names_cell_exit_and_log(fleet, pool):
    f = fleet(pool("engine"), heal=HealConfig(budget=2, backoff_s=0.0))
    for _ in range(2):
        f.die("engine-00000-00000")
    assert not f.verdicts
    f.die("engine-00000-00000", exit_code=None, signal=9, log_path="/run/logs/e.log", oom="probable")
    (verdict,) = f.verdicts
    assert verdict.outcome == "failed" and verdict.exit_code == 1
    for part in ("engine-00000", "3 times", "heal.budget", "signal 9", "out of memory", "/run/logs/e.log"):
        assert part in verdict.reason
    assert verdict.summary["cells"] == {"started": 1, "healed": 2}


def test_deaths_outside_the_window_are_forgiven(fleet, pool):
    f = fleet(pool("engine"), heal=HealConfig(budget=1, window_s=10.0, backoff_s=0.0))
    for _ in range(4):
        f.die("engine-00000-00000")
        f.pass_time(11.0)
    assert not f.verdicts and f.core.healed() == 4


def test_the_death_of_a_cell_that_must_live_ends_the_run(fleet, pool):
    f = fleet(pool("driver", restart="fail_run", state="stateful", category="driver"), pool("engine"))
    f.clear()
    f.die("driver-00000-00000", exit_code=3, log_path="/l/d.log")
    (verdict,) = f.verdicts
    assert "driver-00000" in verdict.reason and "exit code 3" in verdict.reason and "/l/d.log" in verdict.reason
    assert not f.orders(ReservePorts, StartWorker)


def test_a_refused_port_takes_the_whole_cell_back_and_is_tried_again(fleet, pool):
    f = fleet(pool("engine", num_workers_per_cell=2), heal=HealConfig(budget=3, backoff_s=1.0), join=False)
    f.join(0)
    f.reports.pop()
    second = {"worker": "engine-00000-00001", "generation": Generation(1, 1)}
    f.receive(f.agents[0].peer, PortsReserved(error="port 80 is held by pid 7", **second))
    assert [o.worker for o in f.orders(StopWorker)] == ["engine-00000-00000"]
    assert not f.orders(StartWorker)
    f.settle()
    assert f.phases() == {"engine-00000": "ready"}
    assert f.cell("engine-00000").generation == Generation(1, 2)
    assert f.core.healed() == 0


def test_a_port_that_stays_busy_ends_the_run_with_its_holder(fleet, pool):
    f = fleet(pool("engine"), heal=HealConfig(budget=2, backoff_s=0.5), join=False)
    f.agents[0].reserve_error = "port 80 is held by pid 7 (nginx)"
    f.join(0)
    f.settle()
    f.pass_time(5)
    assert "port 80 is held by pid 7 (nginx)" in f.verdicts[0].reason
    assert not f.orders(StartWorker)


def test_replace_cell_stops_the_named_generation_and_only_that(fleet, pool):
    from miles_hpc.wire.messages import ReplaceCell

    f = fleet(pool("engine"), pool("controller"))
    peer = f.client("controller-00000-00000")
    f.clear()
    f.receive(peer, ReplaceCell(cell="engine-00000", generation=Generation(1, 0), reason="old"))
    assert f.orders(StopWorker) == []
    f.receive(peer, ReplaceCell(cell="engine-00000", generation=Generation(1, 1), reason="sick"))
    (stop,) = f.orders(StopWorker)
    assert "controller-00000-00000" in stop.reason and "sick" in stop.reason
    f.settle()
    assert f.cell("engine-00000").generation == Generation(1, 2) and f.phases()["engine-00000"] == "ready"


def test_what_slurm_stopped_is_neither_healed_nor_judged(fleet, pool):
    f = fleet(pool("engine"), heal=HealConfig(budget=0))
    f.clear()
    f.die("engine-00000-00000", cause="stopped_by_slurm")
    assert f.phases() == {"engine-00000": "stopped"}
    assert not f.verdicts and not f.orders(ReservePorts)


def test_a_row_that_the_hub_does_not_know_is_stopped(fleet, pool):
    f = fleet(pool("engine"))
    f.clear()
    row = WorkerState(worker="ghost-00000-00000", generation=Generation(0, 7), state="ready", pid=5)
    f.agents[0].table[row.worker] = row
    f.table(0)
    assert f.orders(StopWorker) == [
        StopWorker(worker="ghost-00000-00000", generation=Generation(0, 7), reason="not wanted here")
    ]
    f.settle()
    assert f.core.nodes["node-00000"].strays == {}


def test_a_worker_that_its_agent_no_longer_lists_is_gone(fleet, pool):
    f = fleet(pool("engine"))
    f.pass_time(4.0)
    del f.agents[0].table["engine-00000-00000"]
    f.table(0)
    f.settle()
    assert f.cell("engine-00000").generation == Generation(1, 2) and f.phases() == {"engine-00000": "ready"}


def test_an_order_that_got_lost_is_sent_again_after_the_next_table(fleet, pool):
    f = fleet(pool("engine"), join=False)
    f.agents[0].silent = True
    f.join(0)
    f.agents[0].silent = False
    f.pass_time(1.0)
    f.table(0)
    assert len(f.orders(ReservePorts)) == 1, "an order of a moment ago may still be under way"
    f.pass_time(3.0)
    f.table(0)
    f.settle()
    assert len(f.orders(ReservePorts)) == 2 and f.phases() == {"engine-00000": "ready"}


def test_a_lost_ready_report_is_caught_up_from_the_table(fleet, pool):
    f = fleet(pool("engine"), join=False)
    f.join(0)
    f.receive(*f.reports.pop(0))
    f.reports.clear()
    assert f.phases() == {"engine-00000": "starting"}
    f.table(0)
    assert f.phases() == {"engine-00000": "ready"}
    assert f.cell("engine-00000").workers[0].pid


def test_nothing_is_healed_once_the_run_has_ended(fleet, pool):
    from miles_hpc.wire.messages import CancelRun

    f = fleet(pool("engine"))
    f.receive(b"op", CancelRun(call_id="1"))
    f.apply(VerdictWritten())
    f.clear()
    f.die("engine-00000-00000") if "engine-00000-00000" in f.agents[0].table else f.settle()
    assert not f.orders(ReservePorts, StartWorker)


def test_full_table_of_a_healthy_fleet_asks_for_nothing(fleet, pool):
    f = fleet(pool("engine", num_cells=3), nodes=2)
    f.pass_time(20)
    f.clear()
    f.table(0)
    f.table(1)
    assert f.sent == []
    assert f.receive(f.agents[0].peer, FullTable(workers=list(f.agents[0].table.values()))) == []


def test_the_last_line_of_a_program_that_gave_up_is_quoted_and_of_a_killed_one_not(fleet, pool):
    f = fleet(pool("driver", restart="fail_run", category="driver"), pool("engine"))
    f.die("engine-00000-00000", exit_code=None, signal=9, log_tail="all is well\n")
    (line,) = [note.fields["reason"] for note in f.notes if note.event == "cell_ends"]
    assert "all is well" not in line
    f.die("driver-00000-00000", exit_code=1, log_tail="Traceback\nModuleNotFoundError: No module named 'x'\n\n")
    assert "its last line: ModuleNotFoundError: No module named 'x'" in f.verdicts[0].reason
    assert "before it had finished the run" in f.verdicts[0].reason
