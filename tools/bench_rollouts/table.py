"""Time, CPU and memory against tokens, consumers and workers; all should be straight lines.

Each row is a process of its own, with a deadline: one that hangs says where, is ended, and the next one follows.
"""

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
TOKENS = (1024, 4096, 16384, 65536)
HEADS = {
    "handover": "| samples x tokens | consumers | carrier | ms | CPU ms | CPU us per MB | consumer memory / bytes |",
    "long": "| tokens, 128 samples | workers | ms | executor CPU ms | workers CPU ms | executor memory / bytes |",
    "tiny": "| workers | tiny groups/s | executor CPU us | worker CPU us |",
}


def rows(samples):
    few = min(samples, 256)
    found = [("handover", few, tokens, 1, carrier) for tokens in TOKENS for carrier in ("shm", "tcp")]
    found += [("handover", 512, 4096, consumers, carrier) for consumers in (2, 4, 8) for carrier in ("shm", "tcp")]
    found += [
        ("long", tokens, workers) for tokens, workers in [(t, 2) for t in TOKENS] + [(16384, w) for w in (1, 4, 8)]
    ]
    found += [("tiny", workers) for workers in (1, 2, 4, 8)]
    return found


def line(row, one):
    kind, *what = row
    if "failed" in one:
        first = [f"{what[0]} x {what[1]}", *what[2:]] if kind == "handover" else what
        return f"| {' | '.join(map(str, first))} | {one['failed']} |"
    if kind == "handover":
        samples, tokens, consumers, carrier = what
        per_mb = one["cpu_ms"] * 1e3 / one["mb"]
        return (
            f"| {samples} x {tokens} | {consumers} | {carrier} | {one['ms']:.1f} | {one['cpu_ms']:.1f} | "
            f"{per_mb:.0f} | {one['mem_ratio']:.2f} |"
        )
    if kind == "long":
        tokens, workers = what
        return (
            f"| {tokens} | {workers} | {one['ms']:.0f} | {one['executor_ms']:.1f} | {one['worker_ms']:.0f} | "
            f"{one['mem_ratio']:.2f} |"
        )
    return f"| {what[0]} | {one['groups_per_s']:.0f} | {one['executor_us']:.0f} | {one['worker_us']:.0f} |"


def table(samples, deadline_s, say):
    """Every row that came about in time, as a list of (row, numbers); what fails is said and left as `failed`."""
    wanted = rows(samples)
    found, head = [], ""
    for number, row in enumerate(wanted, 1):
        begun = time.monotonic()
        print(f"row {number} of {len(wanted)}: {' '.join(map(str, row))}", file=sys.stderr, flush=True)
        one = in_process(row, deadline_s)
        print(f"  took {time.monotonic() - begun:.1f} s, load {os.getloadavg()[0]:.0f}", file=sys.stderr, flush=True)
        if HEADS[row[0]] != head:
            head = HEADS[row[0]]
            say(f"\n{head}\n{'|---' * (head.count('|') - 1)}|")
        say(line(row, one))
        found.append({"row": row, **one})
    return found


def in_process(row, deadline_s):
    begun = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, __file__, json.dumps(row), str(deadline_s)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=deadline_s + 5)
    except subprocess.TimeoutExpired:
        said = ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # its consumers and workers, if any are left
        child.wait()
    try:
        return json.loads(said.strip().splitlines()[-1])
    except (IndexError, ValueError):
        late = time.monotonic() - begun >= deadline_s
        return {"failed": f"nothing after {deadline_s:g} s" if late else f"code {child.returncode}"}


def main():
    row, deadline_s = json.loads(sys.argv[1]), float(sys.argv[2])
    faulthandler.dump_traceback_later(deadline_s, exit=True)  # where it hangs
    kind, *what = row
    if kind == "handover":
        import handover
        from samples import payload_bytes

        samples, tokens, consumers, carrier = what
        found = handover.measure(carrier, samples, tokens, rounds=3, consumers=consumers)
        found["mb"] = payload_bytes(samples, tokens) / 1e6
    else:
        import groups

        with tempfile.TemporaryDirectory() as directory:
            measured = (
                groups.long_groups(Path(directory), *what)
                if kind == "long"
                else groups.tiny_groups(Path(directory), 5000, *what)
            )
            found = asyncio.run(measured)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
