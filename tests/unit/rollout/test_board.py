import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from miles_hpc.rollout.accounts import Accounts, ConservationBroken
from miles_hpc.rollout.board import Board, Free, Run
from miles_hpc.wire.ids import Generation

pytestmark = pytest.mark.unit

G1, G2 = Generation(1, 1), Generation(1, 2)
A, B = b"peer-a", b"peer-b"


def board(*workers, credits=4):
    made = Board(lease_s=10.0, accounts=Accounts())
    for peer in workers:
        assert made.on_hello(peer, f"worker-{peer[-1:].decode()}", G1, credits, [], 0.0) == []
    return made


def counts(made):
    made.accounts.check(made.open_dispatches)
    return made.accounts.to_dict()


def test_groups_go_to_the_worker_with_the_most_free_credits_and_never_beyond_them():
    made = board(A, B, credits=2)
    assert made.add(["g1", "g2", "g3", "g4", "g5"]) == [Run(A, "g1"), Run(B, "g2"), Run(A, "g3"), Run(B, "g4")]
    assert made.on_done(B, ["g2"], 1.0) == (["g2"], [Run(B, "g5")])


def test_groups_wait_while_no_worker_is_connected():
    made = board()
    assert made.add(["g1"]) == []
    assert made.where("g1") == "no rollout worker is connected"
    assert made.on_hello(A, "worker-a", G1, 1, [], 0.0) == [Run(A, "g1")]
    assert made.where("g1") == "leased at worker-a"


def test_groups_of_a_lost_worker_go_to_another_before_all_that_wait():
    made = board(A, credits=2)
    made.add(["g1", "g2", "g3"])
    made.on_hello(B, "worker-b", G1, 2, [], 0.0)
    assert made.on_lost(A) == [Run(B, "g1")]
    assert made.on_done(B, ["g1"], 1.0) == (["g1"], [Run(B, "g2")])
    assert counts(made) == {
        "dispatched": 5,
        "committed": 0,
        "returned": 0,
        "dropped": {"lost": 2},
        "in_flight": 3,
    }


def test_a_silent_worker_may_still_deliver_first_and_the_other_is_told_to_stop():
    made = board(A, B, credits=1)
    made.add(["g1"])
    made.on_beat(B, [], 11.0)
    assert made.on_tick(11.0) == [Run(B, "g1")]
    assert made.on_done(A, ["g1"], 12.0) == (["g1"], [Free(B, ("g1",), "duplicate")])
    assert made.on_done(B, ["g1"], 12.0) == ([], [Free(B, ("g1",), "duplicate")])
    assert counts(made)["dropped"] == {"duplicate": 1}


def test_a_silent_worker_that_speaks_again_gets_back_what_nobody_has():
    made = board(A, credits=2)
    made.add(["g1", "g2"])
    assert made.on_tick(11.0) == []
    assert made.on_beat(A, ["g1"], 12.0) == [Run(A, "g2")]
    assert counts(made)["dropped"] == {"lost": 1}


def test_a_worker_that_reconnects_keeps_what_it_holds_and_only_that():
    made = board(A, credits=3)
    made.add(["g1", "g2", "g3"])
    made.on_done(A, ["g3"], 1.0)
    assert made.on_hello(B, "worker-a", G1, 3, ["g1", "g3", "gone"], 2.0) == [
        Free(B, ("gone",), "superseded"),
        Run(B, "g2"),
    ]
    assert list(made.seats) == [B]
    assert made.settle(["g3"], "committed") == [Free(B, ("g3",), "committed")]
    assert counts(made) == {"dispatched": 4, "committed": 1, "returned": 0, "dropped": {"lost": 1}, "in_flight": 2}


def test_a_new_generation_of_a_worker_holds_nothing_of_the_old_one():
    made = board(A)
    made.add(["g1"])
    assert made.on_hello(B, "worker-a", G2, 4, [], 2.0) == [Run(B, "g1")]
    assert made.on_hello(A, "worker-a", G1, 4, ["g1"], 2.0) == [Free(A, ("g1",), "superseded")]
    assert list(made.seats) == [B]


def test_a_repeat_of_a_received_group_by_its_keeper_changes_nothing():
    made = board(A)
    made.add(["g1"])
    assert made.on_done(A, ["g1"], 1.0)[0]
    assert made.on_done(A, ["g1"], 1.0) == ([], [])


def test_a_group_that_failed_is_dropped_with_its_reason():
    made = board(A)
    made.add(["g1"])
    assert made.on_failed(A, "g1", "reward_failed", 1.0) == (True, [Free(A, ("g1",), "dropped")])
    assert made.on_failed(A, "g1", "reward_failed", 1.0) == (False, [Free(A, ("g1",), "superseded")])
    assert counts(made)["dropped"] == {"reward_failed": 1} and made.groups == []


def test_a_failure_of_a_worker_whose_lease_has_ended_does_not_end_the_group():
    made = board(A, B, credits=1)
    made.add(["g1"])
    made.on_beat(B, [], 11.0)
    made.on_tick(11.0)
    assert made.on_failed(A, "g1", "generation_failed", 12.0) == (False, [Free(A, ("g1",), "superseded")])
    assert made.on_done(B, ["g1"], 12.0)[0]


def test_what_a_lost_executor_had_and_nobody_holds_any_more_is_counted_as_regenerated():
    made = board()
    made.adopt(3.0)
    # `g1` is kept, `g2` was dropped beyond keep_bytes, `g3` was never received by anyone.
    assert made.add(["g1", "g2"], again=True) == [] and made.add(["g3"]) == []
    assert made.on_hello(A, "worker-a", G1, 4, ["g1"], 1.0) == [Run(A, "g1")]
    assert made.on_done(A, ["g1"], 1.5) == (["g1"], [])
    assert made.on_tick(2.9) == []
    assert made.on_tick(3.1) == [Run(A, "g2"), Run(A, "g3")]
    assert counts(made) == {
        "dispatched": 4,
        "committed": 0,
        "returned": 0,
        "dropped": {"regenerate": 1},
        "in_flight": 3,
    }
    # Another loss of a worker later on has its own name.
    made.on_lost(A)
    assert counts(made)["dropped"] == {"lost": 2, "regenerate": 1}


def test_evaluation_is_never_counted():
    made = board(A)
    made.add(["v1", "v2"], counted=False)
    made.on_done(A, ["v1"], 1.0)
    made.on_lost(A)
    made.settle(["v1", "v2"], "done")
    assert counts(made) == {"dispatched": 0, "committed": 0, "returned": 0, "dropped": {}, "in_flight": 0}


def test_messages_of_an_unknown_peer_change_nothing():
    made = board()
    made.add(["g1"])
    assert made.on_done(A, ["g1"], 0.0) == ([], [])
    assert made.on_failed(A, "g1", "lost", 0.0) == (False, [])
    assert made.on_beat(A, ["g1"], 0.0) == [] and made.on_lost(A) == []
    assert made.groups == ["g1"]


def test_settling_what_was_never_dispatched_counts_nothing():
    made = board(A, credits=1)
    made.add(["g1", "g2"])
    assert made.settle(["g1", "g2", "unknown"], "returned") == [Free(A, ("g1",), "superseded")]
    assert counts(made)["returned"] == 1 and counts(made)["dispatched"] == 1


def test_the_accounts_of_a_commit_hold_only_what_is_settled():
    accounts = Accounts(dispatched=10, committed=3, returned=1, dropped={"lost": 2})
    assert accounts.in_flight == 4
    settled = accounts.settled(committing=3)
    assert settled == Accounts(dispatched=9, committed=6, returned=1, dropped={"lost": 2})
    settled.check(0)
    assert accounts.to_dict(final=True) == {"dispatched": 10, "committed": 3, "returned": 5, "dropped": {"lost": 2}}
    with pytest.raises(ConservationBroken, match="5 dispatches are in flight"):
        accounts.check(5)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Workers that die, fall silent, reconnect and repeat themselves; each group is used once and counted once."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.board = Board(lease_s=10.0, accounts=Accounts())
        self.serial = 0
        self.alive = {}  # peer -> (worker, generation, groups it runs or keeps)
        self.used = []
        self.ended = set()

    peers = Bundle("peers")
    groups = Bundle("groups")

    def obey(self, actions):
        for action in actions:
            assert action.peer in self.alive, "an action for a worker that is gone"
            held = self.alive[action.peer][2]
            if isinstance(action, Run):
                held.add(action.group)
            else:
                held.difference_update(action.groups)

    @rule(target=groups)
    def add(self):
        self.serial += 1
        self.obey(self.board.add([f"g{self.serial:03d}"]))
        return f"g{self.serial:03d}"

    @rule(target=peers, worker=st.sampled_from(["w1", "w2", "w3"]), credits=st.integers(1, 3))
    def start(self, worker, credits):
        self.serial += 1
        peer = b"p%d" % self.serial
        for old in [p for p, (w, _, _) in self.alive.items() if w == worker]:
            del self.alive[old]
        self.alive[peer] = (worker, Generation(1, self.serial), set())
        self.obey(self.board.on_hello(peer, worker, Generation(1, self.serial), credits, [], self.now))
        return peer

    @rule(target=peers, peer=consumes(peers), keep=st.integers(0, 3), credits=st.integers(1, 3))
    def reconnect(self, peer, keep, credits):
        self.serial += 1
        if peer not in self.alive:
            return peer
        worker, generation, held = self.alive.pop(peer)
        new = b"p%d" % self.serial
        holds = set(sorted(held)[:keep])
        self.alive[new] = (worker, generation, set(holds))
        self.obey(self.board.on_hello(new, worker, generation, credits, sorted(holds), self.now))
        return new

    @rule(peer=peers)
    def die(self, peer):
        if self.alive.pop(peer, None) is not None:
            self.obey(self.board.on_lost(peer))

    @rule(peer=peers, seconds=st.sampled_from([1.0, 6.0, 20.0]))
    def beat(self, peer, seconds):
        self.now += seconds
        if peer in self.alive:
            self.obey(self.board.on_beat(peer, sorted(self.alive[peer][2]), self.now))
        self.obey(self.board.on_tick(self.now))

    @rule(peer=peers, group=groups)
    def deliver(self, peer, group):
        if peer in self.alive and group in self.alive[peer][2]:
            first, actions = self.board.on_done(peer, [group], self.now)
            if first:
                assert group not in self.used and group not in self.ended
                self.used.append(group)
            self.obey(actions)

    @rule(peer=peers, group=groups)
    def fail(self, peer, group):
        if peer in self.alive and group in self.alive[peer][2] and group not in self.used:
            ended, actions = self.board.on_failed(peer, group, "generation_failed", self.now)
            if ended:
                self.ended.add(group)
            self.obey(actions)

    @rule(data=st.data())
    def commit(self, data):
        ready = [group for group in self.used if group in self.board.groups]
        if ready:
            self.obey(self.board.settle(data.draw(st.lists(st.sampled_from(ready), unique=True)), "committed"))

    @invariant()
    def every_dispatch_has_one_end(self):
        self.board.accounts.check(self.board.open_dispatches)

    @invariant()
    def credits_bound_the_leases_and_a_group_has_one_holder(self):
        leases = [name for seat in self.board.seats.values() for name in seat.leases]
        assert len(leases) == len(set(leases))
        assert set(leases) <= set(self.board.groups)

    def teardown(self):
        # Whatever happened, one healthy worker finishes all that is left.
        for peer in list(self.alive):
            del self.alive[peer]
            self.obey(self.board.on_lost(peer))
        self.alive[b"last"] = ("w9", G1, set())
        self.obey(self.board.on_hello(b"last", "w9", G1, 1000, [], self.now))
        for group in self.board.groups:
            if group not in self.used:
                first, actions = self.board.on_done(b"last", [group], self.now)
                assert first
                self.obey(actions)
        self.obey(self.board.settle(self.board.groups, "committed"))
        self.board.accounts.check(0)
        assert self.board.groups == []
        assert self.alive[b"last"][2] == set()


AnyOrderOfEvents.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_any_order_of_events = AnyOrderOfEvents.TestCase
