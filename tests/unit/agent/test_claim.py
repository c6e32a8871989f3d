"""When an agent may claim the next epoch; every time is given, nothing waits."""

import pytest

from miles_hpc.agent.claim import CANDIDATES, Claim, rank_of
from miles_hpc.agent.lease import Lease

pytestmark = pytest.mark.unit

STILL = Lease(1, 7)


def evidence(claim, until, lease=lambda at: STILL, start=0.0):
    """Reads of the lease that return once a second; the moment of the claim, or None."""
    at = start
    while at <= until:
        found = lease(at)
        if found is not None:
            claim.on_lease(at, found)
        if claim.ripe(at):
            return at
        at += 0.5
    return None


@pytest.mark.parametrize("rank", range(CANDIDATES))
def test_each_candidate_claims_three_seconds_after_the_one_before(rank):
    assert evidence(Claim(rank, 0.0), 60) == 10.0 + 3.0 * rank


def test_the_last_candidate_is_done_before_the_hub_counts_as_lost_for_good():
    from miles_hpc.config.timing import Timing

    timing = Timing()
    assert timing.suspect + 10.0 + 3.0 * (CANDIDATES - 1) < timing.failover_max


@pytest.mark.parametrize("rank", [None, CANDIDATES, 99])
def test_who_is_no_candidate_never_claims(rank):
    assert evidence(Claim(rank, 0.0), 600) is None


def test_a_lease_that_moves_forbids_the_claim_for_good():
    assert evidence(Claim(0, 0.0), 600, lambda at: Lease(1, int(at / 2))) is None


def test_a_lease_that_stops_later_starts_the_wait_anew():
    assert evidence(Claim(0, 0.0), 60, lambda at: Lease(1, min(int(at), 20))) == 30.0


def test_a_lease_of_another_epoch_is_a_renewal():
    assert evidence(Claim(0, 0.0), 60, lambda at: STILL if at < 8 else Lease(2, 7)) == 18.0


def test_reads_that_hang_or_fail_are_no_evidence():
    assert evidence(Claim(0, 0.0), 600, lambda at: None) is None


def test_one_read_is_not_enough_and_two_must_be_far_apart():
    assert evidence(Claim(0, 0.0), 600, lambda at: STILL if at < 9.5 else None) is None
    assert evidence(Claim(0, 0.0), 600, lambda at: STILL if at in (0.0, 10.0) else None) == 10.0


def test_a_file_system_that_comes_back_late_delays_the_claim_by_as_much():
    assert evidence(Claim(0, 0.0), 600, lambda at: STILL if at >= 60 else None) == 70.0


def test_an_answer_of_the_hubs_agent_or_a_witness_starts_the_wait_anew():
    claim = Claim(0, 0.0)
    assert evidence(claim, 9.0) is None
    claim.on_hub_agent(9.0)
    assert "agent beside the hub" in claim.why_not
    assert evidence(claim, 18.5, start=9.5) is None
    claim.on_yes(18.5, "node-00003")
    assert "node-00003" in claim.why_not
    assert evidence(claim, 60, start=18.5) == 28.5


def test_time_that_this_agent_slept_through_is_no_evidence():
    claim = Claim(0, 0.0)
    assert evidence(claim, 4.0) is None
    claim.on_pause(100.0)
    assert evidence(claim, 300.0, start=104.0) == 114.0


def test_of_two_that_see_the_same_the_lower_rank_is_first():
    first, second = Claim(0, 0.0), Claim(1, 0.0)
    assert evidence(first, 60) < evidence(second, 60)


def test_candidates_are_all_others_in_node_order():
    roster = ["node-00002", "node-00000", "node-00001"]
    assert [rank_of(node, "node-00001", roster) for node in sorted(roster)] == [0, None, 1]
    assert rank_of("node-00009", "node-00001", roster) is None
