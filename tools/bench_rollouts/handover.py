"""How long from finished samples in the producer to torch tensors in the consumer? Ours, and the limits beside."""

import contextlib
import json
import mmap
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
from samples import arrays, payload_bytes

from miles_hpc.transport.batch import RolloutBatch, SampleArrays
from miles_hpc.transport.carriers import Outbox
from miles_hpc.wire.address import HostAndPort

HERE = Path(__file__).parent


def finished(made):
    """Samples as a rollout worker has them: each packed when it ended."""
    return [
        SampleArrays(
            token_ids=one["tokens"],
            loss_mask=one["mask"],
            logprobs=one["logprobs"],
            reward=one["reward"],
            versions=[(1, 0, len(one["tokens"]))],
            sample_index=index,
            texts={"prompt": one["prompt"].encode(), "response": one["response"].encode()},
        )
        for index, one in enumerate(made)
    ]


class Consumer:
    def __init__(self, carrier):
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "consumer.py"), carrier], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ready(self):
        self.process.stdout.readline()

    def give(self, ref):
        self.process.stdin.write(msgspec.json.encode(ref) + b"\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def close(self):
        """At once: an end of its own, with torch, takes seconds on a busy machine."""
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.kill()
        self.process.wait()


class Carried:
    """Hand-overs of the same samples over one carrier, dealt out to its consumers."""

    def __init__(self, carrier, made, consumers=1):
        self._carrier = carrier
        self._parts = [made[index::consumers] for index in range(consumers)]
        self._outbox = Outbox(HostAndPort("127.0.0.1", 0))
        self._consumers = [Consumer(carrier) for _ in range(consumers)]
        for one in self._consumers:
            one.ready()

    def once(self):
        """Times in ms; `cpu_ms` is of both ends, until the tensors are there."""
        begun, cpu = time.monotonic(), time.process_time()
        refs = []
        for one, part in zip(self._consumers, self._parts, strict=True):
            refs.append(self._outbox.offer(RolloutBatch.packing_of(part), remote=self._carrier == "tcp"))
            packed = time.monotonic()
            one.give(refs[-1])
        answers = [one.answer() for one in self._consumers]
        cpu = time.process_time() - cpu
        for ref in refs:
            self._outbox.release(ref)
        return {
            "ms": (max(answer["ended"] for answer in answers) - begun) * 1e3,
            "pack_ms": (packed - begun) * 1e3,
            "cpu_ms": cpu * 1e3 + sum(answer["cpu_ms"] for answer in answers),
            "peak_mb": max(answer["peak_mb"] for answer in answers),
            "sum": sum(answer["sum"] for answer in answers),
        }

    def close(self):
        for one in self._consumers:
            one.close()
        self._outbox.close()


class Memcpy:
    """A copy of so many bytes into memory that is mapped already."""

    def __init__(self, nbytes):
        self._source = np.ones(nbytes, np.uint8)
        self._target = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._target[:] = self._source

    def once(self):
        begun, cpu = time.monotonic(), time.process_time()
        self._target[:] = self._source
        return {"ms": (time.monotonic() - begun) * 1e3, "cpu_ms": (time.process_time() - cpu) * 1e3}

    def close(self):
        self._source = self._target = None


class Loopback:
    """So many bytes over one TCP connection, recv_into a reused buffer."""

    def __init__(self, nbytes):
        self._nbytes = nbytes
        self._into, self._block = bytearray(1 << 20), bytes(1 << 20)

    def once(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            far = socket.create_connection(listener.getsockname())
            near, _ = listener.accept()
        # A thread is enough: both ends sit in system calls, without the interpreter's lock.
        sender = threading.Thread(target=self._send, args=(near,))
        begun, cpu, done = time.monotonic(), time.process_time(), 0
        with far:
            sender.start()
            while count := far.recv_into(self._into):
                done += count
            found = {"ms": (time.monotonic() - begun) * 1e3, "cpu_ms": (time.process_time() - cpu) * 1e3}
        sender.join()
        assert done == self._nbytes
        return found

    def _send(self, near):
        left = memoryview(self._block)
        with near:
            for start in range(0, self._nbytes, len(left)):
                near.sendall(left[: self._nbytes - start])

    def close(self):
        pass


class Ray:
    """Ray's object store with the same samples, in processes of its own."""

    def __init__(self, command, env):
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self):
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"Ray failed with code {self._process.wait(30)}")
        return json.loads(answer)

    def once(self, kind="arrays"):
        self._process.stdin.write(kind + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)


def measure(carrier, samples, tokens, rounds=5, consumers=1):
    """Medians of a few hand-overs, the first one (cold memory) left out."""
    moved = payload_bytes(samples, tokens)
    carried = Carried(carrier, finished(arrays(samples, tokens)), consumers)
    try:
        found = [carried.once() for _ in range(rounds + 1)]
    finally:
        carried.close()
    assert len({one["sum"] for one in found}) == 1
    middle = medians(found[1:])
    gbps, peak = moved / middle["ms"] / 1e6, middle["peak_mb"] * 2**20 / (moved / consumers)
    return {"ms": middle["ms"], "cpu_ms": middle["cpu_ms"], "gbps": gbps, "mem_ratio": peak}


def side_by_side(samples, tokens, rounds, ray=None):
    """Every round has one of each, so that all have the same machine; the first round (cold memory) is left out.

    Returns name -> its rounds. With Ray, all must have carried the same numbers.
    """
    moved, made = payload_bytes(samples, tokens), finished(arrays(samples, tokens))
    with contextlib.ExitStack() as stack:
        theirs = None if ray is None else stack.enter_context(contextlib.closing(Ray(*ray)))
        ours = {carrier: stack.enter_context(contextlib.closing(Carried(carrier, made))) for carrier in ("shm", "tcp")}
        limits = {"memcpy": Memcpy(moved), "loopback": Loopback(moved)}
        # A limit beside what it limits.
        order = {"memcpy": limits["memcpy"], "shm": ours["shm"], "loopback": limits["loopback"], "tcp": ours["tcp"]}
        if ray is not None:
            order["ray_arrays"] = theirs
        found = {name: [] for name in order}
        for _ in range(rounds + 1):
            for name, one in order.items():
                found[name].append(one.once())
        found = {name: one[1:] for name, one in found.items()}
        if ray is not None:
            found["ray_lists"] = [theirs.once("lists") for _ in range(2)]
    sums = {one["sum"] for name in found for one in found[name] if one.get("sum") is not None}
    assert len(sums) == 1, f"they carried different numbers: {sums}"
    return found


def medians(rounds):
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0] if rounds[0][key] is not None}


def ratio(over, under, key="ms"):
    """Median of the rounds' ratios."""
    return statistics.median(a[key] / b[key] for a, b in zip(over, under, strict=False))
