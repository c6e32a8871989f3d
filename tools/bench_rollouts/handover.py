"""How long from finished samples in the producer to torch tensors in the consumer? Ours, and the limits beside."""

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
        self.process.stdout.readline()

    def give(self, ref):
        self.process.stdin.write(msgspec.json.encode(ref) + b"\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)


def measure(carrier, samples, tokens, rounds=5, consumers=1):
    """Medians of a few hand-overs, the first one (cold memory) left out."""
    made = finished(arrays(samples, tokens))
    outbox = Outbox(HostAndPort("127.0.0.1", 0))
    others = [Consumer(carrier) for _ in range(consumers)]
    totals, packs, peaks, sums = [], [], [], set()
    try:
        for number in range(rounds + 1):
            begun = time.monotonic()
            parts = [made[index::consumers] for index in range(consumers)]
            refs, packed = [], 0.0
            for other, part in zip(others, parts, strict=True):
                refs.append(outbox.offer(RolloutBatch.packing_of(part), remote=carrier == "tcp"))
                packed = time.monotonic() - begun
                other.give(refs[-1])
            answers = [other.answer() for other in others]
            for ref in refs:
                outbox.release(ref)
            if number:
                totals.append(max(answer["ended"] for answer in answers) - begun)
                packs.append(packed)
                peaks.append(max(answer["peak_mb"] for answer in answers))
                sums.add(sum(answer["sum"] for answer in answers))
    finally:
        for other in others:
            other.close()
        outbox.close()
    assert len(sums) == 1, sums
    total = statistics.median(totals)
    moved = payload_bytes(samples, tokens)
    return {
        "ms": total * 1e3,
        "pack_ms": statistics.median(packs) * 1e3,
        "gbps": moved / total / 1e9,
        "mem_ratio": statistics.median(peaks) * 2**20 / (moved / consumers),
        "sum": sums.pop(),
    }


def warm_memcpy(nbytes=256 << 20):
    """GB/s into memory that is mapped already."""
    source, target = np.ones(nbytes, np.uint8), np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    target[:] = source
    times = []
    for _ in range(5):
        begun = time.monotonic()
        target[:] = source
        times.append(time.monotonic() - begun)
    return nbytes / statistics.median(times) / 1e9


def raw_loopback(nbytes=512 << 20):
    """GB/s of one TCP connection, recv_into a reused buffer."""
    listener = socket.create_server(("127.0.0.1", 0))
    block = bytes(1 << 20)

    def send():
        near, _ = listener.accept()
        with near:
            for _ in range(nbytes // len(block)):
                near.sendall(block)

    child = threading.Thread(target=send)
    # A thread is enough: both ends sit in system calls, without the interpreter's lock.
    child.start()
    into = bytearray(1 << 20)
    with socket.create_connection(listener.getsockname()) as far:
        begun, done = time.monotonic(), 0
        while count := far.recv_into(into):
            done += count
        seconds = time.monotonic() - begun
    child.join()
    listener.close()
    return done / seconds / 1e9
