"""Whatever order reports, losses, deaths and restarts come in, the hub's promises hold."""

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from miles_hpc.config.schema import HealConfig
from miles_hpc.hub.actions import Send, Tick
from miles_hpc.hub.core import NEVER_STARTED, Phase
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    Heartbeat,
    PortsReserved,
    StartWorker,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)

pytestmark = pytest.mark.unit

NODES, GPUS = 3, 2
STATEFUL = ("executor", "trainer", "driver")
HEAL = HealConfig(budget=3, window_s=60.0, backoff_s=1.0, max_backoff_s=4.0)


class AnyOrder(RuleBasedStateMachine):
    """Three nodes with two GPUs each; what is under way may wait, be lost with its connection, or be repeated."""

    make = None

    def __init__(self):
        super().__init__()
        self.f = type(self).make()
        for index in range(NODES):
            self.f.join(index)
        self.incarnations = 0
        self.newest = {}
        self.silent_since = {}

    def agent(self, index):
        return self.f.agents[index]

    # ---------------------------------------------------------------------------------------------- rules
    @rule(take=st.integers(0, 30))
    def deliver(self, take):
        """Reports arrive in any order between agents, in order from one agent."""
        reports = self.f.reports
        if reports:
            peer = reports[take % len(reports)][0]
            position = next(i for i, (sender, _) in enumerate(reports) if sender == peer)
            self.f.receive(*reports.pop(position))

    @rule()
    def deliver_all(self):
        self.f.settle()

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 12.0]))
    def wait(self, seconds):
        end = self.f.now + seconds
        while self.f.now < end:
            self.beat_once()

    def beat_once(self):
        self.f.now += 0.5
        for agent in self.f.agents:
            since = self.silent_since.setdefault(agent.peer, self.f.now)
            if not agent.silent:
                self.silent_since[agent.peer] = self.f.now
            elif self.f.now - since >= self.f.timing.fence:
                # What the agent itself does when it has no hub for so long.
                for worker in [worker for worker in agent.table if worker.startswith(STATEFUL)]:
                    del agent.table[worker]
        for agent in self.f.agents:
            if not agent.silent:
                self.f.receive(agent.peer, Heartbeat(seq=1))
        self.f.apply(Tick())

    @rule(index=st.integers(0, NODES - 1))
    def send_table(self, index):
        if not self.agent(index).silent:
            # In order with what the agent reported before.
            self.deliver_from(index)
            self.f.table(index)

    def deliver_from(self, index):
        mine = [r for r in self.f.reports if r[0] == self.agent(index).peer]
        self.f.reports = [r for r in self.f.reports if r[0] != self.agent(index).peer]
        for report in mine:
            self.f.receive(*report)

    @rule(pick=st.integers(0, 50))
    def a_worker_dies(self, pick):
        rows = [row for agent in self.f.agents if not agent.silent for row in agent.table.values() if row.pid]
        if rows:
            worker = sorted(row.worker for row in rows)[pick % len(rows)]
            for agent in self.f.agents:
                if worker in agent.table and not agent.silent and agent.table[worker].pid:
                    self.deliver_from(agent.index)
                    if worker in agent.table:
                        self.f.die(worker, settle=False)
                    return

    @rule(pick=st.integers(0, 50))
    def a_worker_hangs(self, pick):
        """Its first process ends by itself, and something that it has started cannot be killed for now."""
        rows = [(a, row) for a in self.f.agents for row in a.table.values() if row.state == "ready"]
        if rows:
            agent, row = sorted(rows, key=lambda found: (found[1].worker, found[0].index))[pick % len(rows)]
            if not agent.silent:
                self.deliver_from(agent.index)
            if agent.table.get(row.worker) == row:
                agent.stuck.add(row.worker)
                agent.table[row.worker] = msgspec.structs.replace(row, state="stopping")
                if not agent.silent:
                    self.tell_end(agent, row, gone=False)

    @rule()
    def what_hung_ends(self):
        for agent in self.f.agents:
            if agent.stuck and not agent.silent:
                self.deliver_from(agent.index)
                stuck, agent.stuck = agent.stuck, set()
                for row in [row for row in agent.table.values() if row.worker in stuck and row.state == "stopping"]:
                    del agent.table[row.worker]
                    self.tell_end(agent, row, gone=True)

    def tell_of_ends(self, index):
        """What an agent does when it is let in: its reports may be lost with the last connection."""
        agent = self.agent(index)
        for row in list(agent.table.values()):
            if row.worker in agent.stuck and row.state == "stopping":
                self.tell_end(agent, row, gone=False)

    def tell_end(self, agent, row, gone):
        self.f.receive(agent.peer, WorkerExited(worker=row.worker, generation=row.generation, exit_code=1, gone=gone))

    @rule(index=st.integers(0, NODES - 1))
    def a_node_falls_silent(self, index):
        self.agent(index).silent = True

    @rule(index=st.integers(0, NODES - 1))
    def a_node_is_heard_again(self, index):
        """Its connection broke: what was under way is lost, and it says hello with its table."""
        agent = self.agent(index)
        if agent.silent:
            agent.silent = False
            agent.backlog.clear()
            self.f.reports = [r for r in self.f.reports if r[0] != agent.peer]
            self.f.join(index)
            self.tell_of_ends(index)

    @rule(index=st.integers(0, NODES - 1))
    def a_node_goes_on(self, index):
        """It was only slow: its connection stood, and nothing is lost; unless another hub has begun meanwhile."""
        if self.agent(index).silent and self.agent(index).peer in self.f.core.node_of_peer:
            self.f.resume(index)
            self.tell_of_ends(index)
        else:
            self.a_node_is_heard_again(index)

    @rule(pick=st.integers(0, 1000))
    def a_report_of_an_old_generation_is_repeated(self, pick):
        cell = list(self.f.core.cells.values())[pick % len(self.f.core.cells)]
        if not cell.workers or cell.generation.n < 2:
            return
        worker = cell.workers[pick % len(cell.workers)]
        (agent,) = [agent for agent in self.f.agents if agent.node == worker.node]
        old = {"worker": worker.id, "generation": Generation(cell.generation.epoch, cell.generation.n - 1)}
        if agent.peer not in self.f.core.node_of_peer or agent.silent:
            return
        stale = [
            PortsReserved(ports={"http": 1}, **old),
            PortsReserved(error="stale", **old),
            WorkerStarted(pid=99999, **old),
            WorkerReady(**old),
            WorkerExited(exit_code=1, **old),
        ]
        self.deliver_from(agent.index)
        if self.f.verdicts or cell.generation != Generation(old["generation"].epoch, old["generation"].n + 1):
            return
        before = (cell.phase, worker.ready, worker.gone, worker.ports, worker.pid)
        if worker not in cell.workers or self.f.core.nodes[worker.node].strays:
            return
        self.f.receive(agent.peer, stale[pick % len(stale)])
        assert before == (cell.phase, worker.ready, worker.gone, worker.ports, worker.pid)

    @rule(index=st.integers(0, NODES - 1))
    def an_agent_is_started_anew(self, index):
        """Its warden has killed all workers; the hello repeats until the old incarnation is suspect."""
        self.incarnations += 1
        self.f.reports = [r for r in self.f.reports if r[0] != self.agent(index).peer]
        agent = self.f.add_agent(index, gpus=GPUS, incarnation=f"n{self.incarnations}")
        for _ in range(12):
            agent.refused = None
            self.f.join(index)
            if agent.refused is None:
                return
            self.beat_others(index)
        raise AssertionError(f"{agent.refused} after 6 s")

    @precondition(lambda self: not self.f.verdicts)
    @rule(journal=st.booleans())
    def the_hub_is_replaced(self, journal):
        """One of the next epoch knows only the tables of the agents that it hears, and perhaps a journal."""
        self.f.next_hub(journal)
        if not journal:
            # Without one it knows only of the generations that it is told of now.
            self.newest = {}
            for row in [row for agent in self.f.agents if not agent.silent for row in agent.table.values()]:
                cell = row.worker.rpartition("-")[0]
                self.newest[cell] = max(row.generation, self.newest.get(cell, row.generation))
        for index in range(NODES):
            if not self.agent(index).silent:
                self.f.join(index)
                self.tell_of_ends(index)

    def beat_others(self, index):
        silent, self.agent(index).silent = self.agent(index).silent, True
        self.beat_once()
        self.agent(index).silent = silent

    @precondition(lambda self: not self.f.verdicts)
    @rule()
    def calm_makes_everything_run(self):
        """Once all nodes are there and reports arrive, every desired cell runs, or the run has ended with a reason."""
        for index in range(NODES):
            self.a_node_is_heard_again(index)
        self.f.settle()
        ending = [row for agent in self.f.agents for row in agent.table.values() if row.state == "stopping"]
        assert not [row for row in ending if self.is_published(row)]
        self.what_hung_ends()
        for _ in range(8):
            self.f.settle()
            for _ in range(8):
                self.beat_once()
                self.f.settle()
            for index in range(NODES):
                self.f.table(index)
        self.f.settle()
        if self.f.verdicts:
            assert any(text in self.f.verdicts[0].reason for text in ("budget", "has not ended"))
        else:
            assert set(self.f.phases().values()) == {"ready"}
            running = {w for agent in self.f.agents for w in agent.table}
            assert running == {w.id for cell in self.f.core.cells.values() for w in cell.workers}

    def is_published(self, row):
        found = self.f.core.find(row.worker, row.generation, None)
        return found is not None and found[0].published and not self.f.verdicts

    # ----------------------------------------------------------------------------------------- invariants
    def known_agents(self):
        """Those that a hub which is past its recovery has heard of."""
        if self.f.core.recovering is not None:
            return []
        return [agent for agent in self.f.agents if agent.node in self.f.core.nodes]

    @invariant()
    def no_slot_is_used_twice(self):
        used = [
            (worker.node, slot)
            for cell in self.f.core.cells.values()
            for worker in cell.workers
            if not worker.gone
            for slot in worker.gpu_slots
        ]
        assert len(used) == len(set(used))
        for agent in self.known_agents():
            holders = self.f.core.nodes[agent.node].gpu_holders
            wanted = [w for cell in self.f.core.cells.values() for w in cell.workers if w.node == agent.node]
            for worker in wanted:
                if not worker.gone:
                    assert all(holders[slot][0] == worker.id for slot in worker.gpu_slots)

    @invariant()
    def a_real_process_of_a_gpu_is_known_before_its_slot_is_given_again(self):
        for agent in self.known_agents():
            node = self.f.core.nodes[agent.node]
            if node.incarnation != agent.incarnation:
                continue
            held = {holder for holder, _ in node.gpu_holders.values()}
            for row in agent.table.values():
                if row.worker.startswith("gpu") and row.pid:
                    assert row.worker in held, (row, node.gpu_holders)

    @invariant()
    def generations_only_grow(self):
        for cell in self.f.core.cells.values():
            if cell.generation == NEVER_STARTED:
                continue  # a new hub knows none before it adopts or starts one
            assert cell.generation >= self.newest.get(cell.id, cell.generation)
            self.newest[cell.id] = cell.generation
        for action in self.f.sent:
            if isinstance(action, Send) and isinstance(action.message, StartWorker):
                assert action.message.generation <= self.newest[action.message.worker.rpartition("-")[0]]

    @invariant()
    def budgets_are_respected(self):
        for cell in self.f.core.cells.values():
            recent = [t for t in cell.deaths if self.f.now - t <= HEAL.window_s]
            assert len(recent) <= HEAL.budget

    @invariant()
    def only_complete_cells_are_published(self):
        for cells in self.f.state.book.values():
            for addrs in cells:
                cell = self.f.cell(addrs.cell)
                if self.f.verdicts:
                    continue
                assert cell.phase in (Phase.RESERVED, Phase.STARTING, Phase.READY)
                assert addrs.generation == cell.generation
                assert all(worker.ports is not None and not worker.gone for worker in cell.workers)

    @invariant()
    def a_stateful_worker_runs_once(self):
        """Wherever it is: on a node that is silent as well."""
        running = [
            row.worker
            for agent in self.f.agents
            for row in agent.table.values()
            if row.pid and row.worker.startswith(STATEFUL)
        ]
        assert len(running) == len(set(running))

    @invariant()
    def a_group_runs_in_one_piece(self):
        """No part of a training incarnation starts while another part of the last one may still run."""
        cells = [cell for cell in self.f.core.cells.values() if cell.spec.group]
        if any(cell.phase is Phase.STOPPING for cell in cells) and not self.f.verdicts:
            assert not any(cell.phase in (Phase.RESERVING, Phase.RESERVED, Phase.STARTING) for cell in cells)

    @invariant()
    def one_verdict_at_most(self):
        assert len(self.f.verdicts) <= 1
        self.f.sent[:] = self.f.verdicts


def hold_promises(make, examples):
    class Machine(AnyOrder):
        pass

    Machine.make = staticmethod(make)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        ),
    )


def test_promises_hold_in_any_order(fleet, pool):
    def make():
        return fleet(
            pool("gpu", num_cells=2, num_workers_per_cell=2, num_gpus_per_worker=1),
            pool("cpu", num_cells=2),
            pool("reader", reads=("gpu",)),
            nodes=NODES,
            gpus=GPUS,
            join=False,
            heal=HEAL,
        )

    hold_promises(make, 50)


def test_promises_hold_for_a_training_incarnation(fleet, pool):
    unit = {"group": "training", "state": "stateful"}

    def make():
        return fleet(
            pool("gpu", num_gpus_per_worker=1),
            pool("executor", **unit),
            pool("trainer", num_workers_per_cell=2, num_gpus_per_worker=1, **unit),
            pool("driver", avoid_hub_node=True, **unit),
            nodes=NODES,
            gpus=GPUS,
            join=False,
            heal=HEAL,
        )

    hold_promises(make, 50)
