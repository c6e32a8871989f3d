"""Work of a thread that a loop takes: nothing is lost between the result and the byte that tells of it."""

import os
import select
import threading

import pytest

from miles_hpc.agent.errand import Errand
from miles_hpc.agent.seek import HubSeeker

pytestmark = pytest.mark.unit


def taken(errand):
    deadline = threading.Event()
    for _ in range(10_000):
        done = errand.take()
        if done is not None:
            return done
        deadline.wait(0.001)
    raise AssertionError("nothing was brought")


def test_a_result_can_be_taken_as_soon_as_it_is_there_and_leaves_no_byte(monkeypatch):
    """A loop that looks between the two steps of the thread must not fail."""
    errand = Errand("test", lambda value: value + 1)
    written, go_on = threading.Event(), threading.Event()
    write = os.write

    def slow(descriptor, data):
        found = write(descriptor, data)
        written.set()
        go_on.wait(5)
        return found

    monkeypatch.setattr("miles_hpc.agent.errand.os.write", slow)
    assert errand.ask(1) and written.wait(5)
    assert errand.take() is None and not errand.ask(2)
    go_on.set()
    assert taken(errand).value == 2
    assert select.select([errand.fileno], [], [], 0)[0] == [] and errand.ask(3)
    assert taken(errand).value == 4
    errand.close()


def test_an_error_of_the_work_is_brought_like_a_value():
    errand = Errand("test", lambda: 1 / 0)
    errand.ask()
    assert isinstance(taken(errand).error, ZeroDivisionError)
    errand.close()


def test_a_look_for_the_hub_can_be_taken_between_the_two_steps_of_its_thread(tmp_path, monkeypatch):
    seeker = HubSeeker(tmp_path, "run", 0, "")
    about_to_write, go_on = threading.Event(), threading.Event()
    write = os.write

    def slow(descriptor, data):
        about_to_write.set()
        go_on.wait(5)
        return write(descriptor, data)

    monkeypatch.setattr("miles_hpc.agent.seek.os.write", slow)
    assert seeker.advance(1.0, wanted=True) is None and about_to_write.wait(5)
    assert seeker.advance(1.0, wanted=True) is None, "nothing is there before its byte is"
    go_on.set()
    found = None
    for _ in range(5000):
        if (found := seeker.advance(1.0, wanted=True)) is not None:
            break
        select.select([seeker.fileno], [], [], 0.001)
    assert found is not None and found.hub is None and not found.error
    seeker.close()


def pauses_until(tmp_path, seconds, *, beside_hub):
    """(When, how long) of each pause between two looks, on a clock that stands still during a look."""
    seeker, now, found = HubSeeker(tmp_path, "run", 0, "", beside_hub=beside_hub), 0.0, []
    while now < seconds:
        while seeker.advance(now, wanted=True) is None:
            select.select([seeker.fileno], [], [], 1.0)
        found.append((now, seeker.next_deadline() - now))
        now = seeker.next_deadline()
    seeker.close()
    return found


def test_the_agent_beside_a_hub_sees_it_at_once_and_the_others_spare_the_file_system(tmp_path):
    beside = pauses_until(tmp_path, 5.0, beside_hub=True)
    assert all(pause <= 0.011 + 0.05 * now for now, pause in beside), "it delays no start by more than a 20th"
    assert len(pauses_until(tmp_path, 5.0, beside_hub=False)) <= 20
