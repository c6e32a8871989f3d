"""The hub's process on a node: when it is started again, by which epoch, and when not. No process is started."""

import select
import time
from types import SimpleNamespace

import pytest

from miles_hpc.agent.hub_keeper import RESTARTS, HubKeeper
from miles_hpc.agent.hub_process import EPOCH_TAKEN, HubProcess
from miles_hpc.agent.lease import lease_path, renew_lease
from miles_hpc.agent.log import JsonLog
from miles_hpc.agent.log_files import LogFiles
from miles_hpc.agent.options import Options
from miles_hpc.agent.supervise import Exit
from miles_hpc.config.timing import Timing
from miles_hpc.wire.ids import Generation, node_id
from miles_hpc.wire.messages import Peer, Roster
from miles_hpc.wire.rendezvous import Rendezvous
from miles_hpc.wire.security import create_secrets

pytestmark = pytest.mark.unit


class Spawns:
    """A supervisor that starts nothing; the hub's process lives until the test ends it."""

    def __init__(self):
        self.workers, self.epochs = {}, []

    def spawn(self, name, generation, argv, env, log):
        assert name not in self.workers
        self.workers[name] = argv
        self.epochs.append(int(argv[argv.index("--epoch") + 1]) if "--epoch" in argv else 0)

    def stop(self, name, **_):
        self.workers.pop(name)


class Keeper:
    """The keeper of a node, and what it does."""

    def __init__(self, run_dir, index=1):
        create_secrets(run_dir, 0)
        self.run_dir = run_dir
        self.spawns, self.now = Spawns(), 100.0
        options = Options(
            run_dir=run_dir, attempt=0, node_index=index, address="127.0.0.1", run_id="r", incarnation="i", hub=True
        )
        self.log = JsonLog(run_dir / "agent.jsonl", node_id(index))
        self.process = HubProcess(options, LogFiles(run_dir / "local", options.log_dir), self.spawns)
        self.keeper = HubKeeper(options, self.process, self.spawns, self.log, lambda message: None, lambda: self.now)

    def start(self):
        self.process.begin(self.log)

    def obeys(self, epoch, node, *, heard, silent_for=lambda: 0.0):
        hub = Rendezvous(run_id="r", attempt=0, epoch=epoch, addresses=["127.0.0.1"], port=1, public_key="k", node=node)
        return self.keeper.on_link(SimpleNamespace(rendezvous=hub, has_heard=heard, silent_for=silent_for))

    def until_it_claims(self, patience_s):
        """Turn after turn, a second apart, in the silence of the hub of node-00000. Returns how long it lasted."""
        path = lease_path(self.run_dir, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        renew_lease(path, 1)
        began, heard = self.now, self.now - Timing().suspect
        self.obeys(1, node_id(0), heard=True, silent_for=lambda: self.now - heard)
        peers = [Peer(node=node_id(n), host="h", address="127.0.0.1", port=9) for n in range(7)]
        self.keeper.on_message(Roster(hub_node=node_id(0), peers=peers))
        while not self.spawns.epochs and self.now - began < patience_s:
            self.now += 1.0
            self.keeper.advance(0.0)
            # The read of the lease that is under way: its byte comes first, and its thread needs a turn for the rest.
            select.select([self.keeper.pollable()[-1]], [], [], 1.0)
            time.sleep(0.002)
        return self.now - heard

    def hub_ends(self, *, code=None, signal=None):
        self.spawns.workers.pop("hub")
        return self.keeper.on_exit(Exit("hub", Generation(0, 0), 7, code, signal, False, "exited", "", 0))


@pytest.fixture
def here(tmp_path):
    made = Keeper(tmp_path)
    yield made
    made.keeper.close()


def test_a_hub_that_is_killed_before_anybody_heard_it_is_started_again(here):
    here.start()
    assert here.hub_ends(signal=9) == ""
    assert here.spawns.epochs == [0, 0], "which epoch is free the next hub finds itself"


def test_one_that_was_killed_between_its_epoch_and_its_first_word_is_followed_by_the_next_epoch(here):
    here.start()
    here.obeys(1, "node-00001", heard=False)
    assert here.hub_ends(signal=9) == "" and here.spawns.epochs == [0, 2]


def test_a_first_hub_that_refuses_something_ends_its_node(here):
    here.start()
    assert "exit code 1" in here.hub_ends(code=1)
    assert here.spawns.epochs == [0]


def test_a_hub_that_was_heard_is_started_again_however_it_ended(here):
    here.start()
    here.obeys(1, "node-00001", heard=True)
    assert here.hub_ends(code=1) == "" and here.spawns.epochs == [0, 2]


def test_it_is_started_again_a_limited_number_of_times(here):
    here.start()
    for _ in range(RESTARTS):
        assert here.hub_ends(signal=9) == ""
    assert f"{RESTARTS} times again" in here.hub_ends(signal=9)
    assert len(here.spawns.epochs) == RESTARTS + 1


def test_restarts_that_are_long_ago_do_not_count(here):
    here.start()
    for _ in range(3 * RESTARTS):
        here.now += 150.0
        assert here.hub_ends(signal=9) == ""


def test_an_epoch_of_this_node_without_a_process_is_followed_by_the_next_one(here):
    """Hub 2 had published its epoch when it was killed; hub 3, told to be the second, found it taken."""
    here.start()
    here.obeys(1, "node-00001", heard=True)
    assert here.hub_ends(signal=9) == "" and here.hub_ends(code=EPOCH_TAKEN) == ""
    assert here.spawns.epochs == [0, 2], "it may be another node's"
    assert here.obeys(2, "node-00001", heard=False) == ""
    assert here.spawns.epochs == [0, 2, 3]


def test_an_epoch_that_another_node_took_is_left_to_it(here):
    here.start()
    here.obeys(1, "node-00001", heard=True)
    here.hub_ends(signal=9)
    here.hub_ends(code=EPOCH_TAKEN)
    assert here.obeys(2, "node-00002", heard=False) == "" and here.spawns.epochs == [0, 2]


def test_a_hub_steps_down_for_a_higher_epoch_elsewhere_and_is_not_started_again(here):
    here.start()
    here.obeys(1, "node-00001", heard=True)
    here.obeys(2, "node-00002", heard=False)
    assert not here.spawns.workers
    here.spawns.workers["hub"] = []
    assert here.hub_ends(signal=9) == "" and here.spawns.epochs == [0]


@pytest.mark.parametrize(("index", "limit_s"), [(1, 15.5), (5, 27.0)])
def test_the_first_and_the_last_candidate_claim_in_time(tmp_path, index, limit_s):
    """Lease, its reads and the peer ports are real; only the clock is the test's."""
    candidate = Keeper(tmp_path, index)
    try:
        silent = candidate.until_it_claims(60.0)
        assert candidate.spawns.epochs == [2]
        assert Timing().suspect + 10.0 + 3.0 * (index - 1) <= silent <= limit_s
    finally:
        candidate.keeper.close()


def test_who_is_no_candidate_never_claims(tmp_path):
    other = Keeper(tmp_path, 6)
    try:
        other.until_it_claims(30.0)
        assert other.spawns.epochs == []
    finally:
        other.keeper.close()


def test_a_claimant_whose_hub_cannot_start_keeps_its_node(tmp_path):
    claimant = Keeper(tmp_path, 1)
    try:
        claimant.until_it_claims(60.0)
        assert claimant.hub_ends(code=1) == "" and not claimant.spawns.workers
        claimant.spawns.epochs.clear()
        claimant.until_it_claims(60.0)
        assert claimant.spawns.epochs == [2]
        assert claimant.hub_ends(signal=9) == "" and claimant.spawns.epochs == [2, 2]
    finally:
        claimant.keeper.close()
