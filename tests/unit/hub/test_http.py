"""HTTP on the hub, over a real socket."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import threading
import time

import pytest

from miles_hpc.hub.http import REQUESTS_AT_ONCE, HubHttp
from miles_hpc.hub.metrics import render
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellRow, NodeRow

pytestmark = pytest.mark.unit


def node(state):
    return NodeRow(node="node-00000", host="h", address="a", state=state, silent_s=0.1)


def cell(pool, state, restarts):
    return CellRow(
        cell=f"{pool}-00000",
        pool=pool,
        node="node-00000",
        generation=Generation(1, 1),
        state=state,
        workers=[],
        restarts=restarts,
    )


STATUS = {
    "run_id": "r",
    "attempt": 1,
    "epoch": 2,
    "step": 3,
    "weight_version": 4,
    "healed": 5,
    "written_at": 1.0,
    "nodes": [node("alive"), node("alive"), node("dead")],
    "cells": [cell("engine", "ready", 2), cell("engine", "stopped", 1), cell("driver", "ready", 0)],
}
EVENTS = [{"event": f"e{n}", "time": float(n)} for n in range(5)]


def recent(since=0, limit=2000):
    wanted = EVENTS[since:]
    return wanted[max(0, len(wanted) - limit) :], len(EVENTS)


@pytest.fixture
def hub():
    with HubHttp(HostAndPort("127.0.0.1", 0), "the-key", recent) as served:
        served.show(STATUS, {"malformed": 7})
        yield served


def get(hub, path, key="the-key", method="GET"):
    connection = http.client.HTTPConnection(hub.address.host, hub.address.port, timeout=20)
    connection.request(method, path, headers={"Authorization": f"Bearer {key}"} if key else {})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, answer.getheader("Content-Type")


def test_the_status_is_the_one_that_was_shown_last_with_its_age(hub):
    code, body, kind = get(hub, "/status")
    found = json.loads(body)
    assert (code, kind, found["run_id"]) == (200, "application/json", "r") and found["age_s"] > 1
    hub.show({**STATUS, "step": 9}, {})
    assert json.loads(get(hub, "/status")[1])["step"] == 9


def test_events_go_on_from_a_number(hub):
    assert json.loads(get(hub, "/events?since=3")[1]) == {"events": EVENTS[3:], "next": 5}
    assert json.loads(get(hub, "/events?limit=1")[1]) == {"events": EVENTS[4:], "next": 5}
    assert get(hub, "/events?since=x")[0] == 400


def test_metrics_are_in_the_format_of_prometheus(hub):
    from prometheus_client.parser import text_string_to_metric_families

    code, body, kind = get(hub, "/metrics")
    assert code == 200 and kind.startswith("text/plain")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }
    assert found["miles_hpc_nodes", "alive"] == 2 and found["miles_hpc_nodes", "suspect"] == 0
    assert found["miles_hpc_cells", "engine", "stopped"] == 1
    assert found["miles_hpc_cell_restarts_total", "engine"] == 3
    assert found["miles_hpc_hub_dropped_total", "malformed"] == 7
    assert found["miles_hpc_step",] == 3 and found["miles_hpc_hub_memory_bytes",] > 1e6


def test_metrics_before_the_first_status_are_zeros():
    import os

    assert b"miles_hpc_step 0.0" in render({}, {}, os.getpid())


@pytest.mark.parametrize("key", ["", "wrong", "the-key2", "ü"])
def test_without_the_run_s_key_nothing_is_told(hub, key):
    for path in ("/status", "/events", "/metrics", "/"):
        code, body, _ = get(hub, path, key.encode().decode("latin-1"))
        assert code == 401 and "http.key" in body and "engine" not in body


def test_other_paths_and_methods_are_refused(hub):
    assert get(hub, "/secrets")[0] == 404
    assert get(hub, "/status", method="POST")[0] == 501


def test_clients_that_say_nothing_take_no_slot_from_the_hub_for_long_and_garbage_is_refused(hub):
    silent = [socket.create_connection(hub.address.netloc.rsplit(":", 1), timeout=20) for _ in range(3)]
    garbage = socket.create_connection(hub.address.netloc.rsplit(":", 1), timeout=20)
    garbage.sendall(b"\x00\xff" * 4000 + b"\r\n\r\n")
    assert b"400" in garbage.recv(4096)
    assert get(hub, "/status")[0] == 200
    for each in [*silent, garbage]:
        each.close()


def test_more_clients_than_slots_are_turned_away_and_the_next_is_served(hub):
    clients = [socket.create_connection((hub.address.host, hub.address.port), timeout=20) for _ in range(20)]
    turned_away = 0
    for client in clients[REQUESTS_AT_ONCE:]:
        turned_away += client.recv(1) == b""
    assert turned_away == 20 - REQUESTS_AT_ONCE
    for client in clients:
        client.close()
    for _ in range(200):
        try:
            if get(hub, "/status")[0] == 200:
                return
        except (OSError, http.client.HTTPException):
            continue
    raise AssertionError("slots of clients that left were not freed")


def test_closing_ends_the_listener_at_once():
    served = HubHttp(HostAndPort("127.0.0.1", 0), "k", recent)
    served.close()
    with pytest.raises(OSError):
        socket.create_connection((served.address.host, served.address.port), timeout=1)


def test_without_a_free_descriptor_nobody_is_asked_about_again_and_again(hub, monkeypatch):
    tries, second = [], threading.Event()

    def full(listener):
        tries.append(time.monotonic())
        if len(tries) == 2:
            second.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", full)
    with socket.create_connection((hub.address.host, hub.address.port)):
        assert second.wait(20)
    assert tries[1] - tries[0] > 0.9
    hub.close()  # and it does not wait for the next try
