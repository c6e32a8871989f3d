"""The lease file, and work that may hang."""

import select
import threading

import pytest

from miles_hpc.agent.errand import Errand
from miles_hpc.agent.lease import Lease, LeaseLost, NoLease, lease_path, read_lease, renew_lease

pytestmark = pytest.mark.unit


@pytest.fixture
def path(tmp_path):
    found = lease_path(tmp_path, 0)
    found.parent.mkdir(parents=True)
    return found


def test_each_renewal_moves_the_counter(path):
    with pytest.raises(NoLease, match="does not exist"):
        read_lease(path)
    assert [renew_lease(path, 1) for _ in range(3)] == [Lease(1, 1), Lease(1, 2), Lease(1, 3)]
    assert read_lease(path) == Lease(1, 3)


def test_it_is_written_in_place(path):
    renew_lease(path, 1)
    inode = path.stat().st_ino
    renew_lease(path, 1)
    assert path.stat().st_ino == inode and list(path.parent.iterdir()) == [path]


def test_a_higher_epoch_takes_it_and_the_lower_one_learns_that(path):
    renew_lease(path, 1)
    assert renew_lease(path, 2) == Lease(2, 2)
    with pytest.raises(LeaseLost, match="epoch 2 holds the lease"):
        renew_lease(path, 1)
    assert read_lease(path) == Lease(2, 2)


def test_what_is_no_lease_is_said_and_overwritten(path):
    path.write_bytes(b"something else")
    with pytest.raises(NoLease, match="holds no lease"):
        read_lease(path)
    assert renew_lease(path, 1).counter == 1


def taken(errand):
    while (done := errand.take()) is None:
        select.select([errand.fileno], [], [], 5)
    return done


def test_an_errand_brings_a_value_or_the_error(path):
    errand = Errand("test", lambda value: 1 / value)
    assert errand.ask(4) and taken(errand).value == 0.25
    assert errand.ask(0) and isinstance(taken(errand).error, ZeroDivisionError)
    errand.close()


def test_an_errand_that_hangs_is_the_only_one_and_holds_nobody_up():
    go = threading.Event()
    errand = Errand("test", go.wait)
    assert errand.ask()
    assert not errand.ask() and errand.take() is None
    go.set()
    assert taken(errand).value is True
    assert errand.ask() and taken(errand).value is True
    errand.close()
