"""See tools/bench-rollouts."""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import generate  # noqa: E402
import groups  # noqa: E402
import handover  # noqa: E402

PARTS = ("limits", "handover", "groups", "generate", "table")
GOALS = {
    "shm_vs_ray_arrays": 1.3,
    "tcp_vs_ray_arrays": 1.0,
    "shm_vs_ray_lists": 20.0,
    "tcp_vs_ray_lists": 10.0,
    "shm_vs_memcpy": 0.25,
    "tcp_vs_loopback": 1 / 3,
    "groups_per_s": 5000.0,
    "generate_ratio": 0.9,
}


def ray_side(samples, tokens):
    packages = next((ROOT / ".runtimes" / "ray" / "lib").glob("python3*/site-packages"))
    done = subprocess.run(
        [sys.executable, str(HERE / "ray_side.py"), str(samples), str(tokens)],
        env={**os.environ, "PYTHONPATH": str(packages), "RAY_DISABLE_IMPORT_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"Ray failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def say(options, text):
    if not options.json:
        print(text, flush=True)


def table(options):
    """Time, CPU and memory against tokens, consumers and workers; all should be straight lines."""
    handed = []
    for tokens in (1024, 4096, 16384, 65536):
        samples = min(options.samples, 256)
        for carrier in ("shm", "tcp"):
            handed.append((f"{samples} x {tokens}", 1, carrier, handover.measure(carrier, samples, tokens, rounds=3)))
    for consumers in (2, 4, 8):
        for carrier in ("shm", "tcp"):
            found = handover.measure(carrier, 512, 4096, rounds=3, consumers=consumers)
            handed.append(("512 x 4096", consumers, carrier, found))
    say(options, "\n| samples x tokens | consumers | carrier | ms | GB/s | consumer memory / its bytes |")
    say(options, "|---|---|---|---|---|---|")
    for size, consumers, carrier, one in handed:
        say(
            options,
            f"| {size} | {consumers} | {carrier} | {one['ms']:.1f} | {one['gbps']:.2f} | {one['mem_ratio']:.2f} |",
        )
    say(
        options,
        "\n| 128 samples of tokens | workers | ms | executor CPU ms | workers CPU ms | executor memory / bytes |",
    )
    say(options, "|---|---|---|---|---|---|")
    long = []
    for tokens, processes in ((1024, 2), (4096, 2), (16384, 2), (65536, 2), (16384, 1), (16384, 4), (16384, 8)):
        one = in_directory(groups.long_groups, tokens, processes)
        long.append({"tokens": tokens, "workers": processes, **one})
        say(
            options,
            f"| {tokens} | {processes} | {one['ms']:.0f} | {one['executor_ms']:.1f} | {one['worker_ms']:.0f} | "
            f"{one['mem_ratio']:.2f} |",
        )
    say(options, "\n| workers | tiny groups/s | executor CPU us | worker CPU us |\n|---|---|---|---|")
    tiny = []
    for processes in (1, 2, 4, 8):
        one = in_directory(groups.tiny_groups, 5000, processes)
        tiny.append({"workers": processes, **one})
        say(
            options,
            f"| {processes} | {one['groups_per_s']:.0f} | {one['executor_us']:.0f} | {one['worker_us']:.0f} |",
        )
    return {
        "handover": [
            {"size": size, "consumers": consumers, "carrier": carrier, "ms": one["ms"], "mem_ratio": one["mem_ratio"]}
            for size, consumers, carrier, one in handed
        ],
        "long_groups": long,
        "tiny_groups": tiny,
    }


def in_directory(measure, *arguments):
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(measure(Path(directory), *arguments))


def main():
    parser = argparse.ArgumentParser(prog="bench-rollouts")
    parser.add_argument("--with-ray", action="store_true", help="measure Ray beside, in the same run")
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    wanted = options.only.split(",")
    found = {}
    say(options, f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if "limits" in wanted:
        found["memcpy_gbps"] = handover.warm_memcpy()
        found["loopback_gbps"] = handover.raw_loopback()
        say(options, f"warm memcpy {found['memcpy_gbps']:.2f} GB/s, raw loopback TCP {found['loopback_gbps']:.2f} GB/s")
    if "handover" in wanted:
        ours = {}
        for carrier in ("shm", "tcp"):
            one = ours[carrier] = handover.measure(carrier, options.samples, options.tokens)
            found[f"{carrier}_ms"], found[f"{carrier}_gbps"] = one["ms"], one["gbps"]
            say(
                options,
                f"{carrier}: {one['ms']:.1f} ms ({one['gbps']:.2f} GB/s), {one['pack_ms']:.1f} ms of it packing; "
                f"consumer's peak {one['mem_ratio']:.2f} x the packed bytes",
            )
        found["consumer_mem_ratio"] = max(one["mem_ratio"] for one in ours.values())
        if options.with_ray:
            ray = ray_side(options.samples, options.tokens)
            assert ray["arrays"]["sum"] == ours["shm"]["sum"], "Ray carried other numbers"
            found["ray_arrays_ms"], found["ray_lists_ms"] = ray["arrays"]["ms"], ray["lists"]["ms"]
            for carrier in ("shm", "tcp"):
                for kind in ("arrays", "lists"):
                    found[f"{carrier}_vs_ray_{kind}"] = found[f"ray_{kind}_ms"] / found[f"{carrier}_ms"]
            say(options, f"Ray: arrays {found['ray_arrays_ms']:.1f} ms, lists {found['ray_lists_ms']:.0f} ms")
        if "memcpy_gbps" in found:
            found["shm_vs_memcpy"] = found["shm_gbps"] / found["memcpy_gbps"]
            found["tcp_vs_loopback"] = found["tcp_gbps"] / found["loopback_gbps"]
    if "groups" in wanted:
        one = in_directory(groups.tiny_groups, 10_000, 4)
        found |= {"groups_per_s": one["groups_per_s"], "executor_us": one["executor_us"], "worker_us": one["worker_us"]}
        say(
            options,
            f"10,000 tiny groups over 4 workers: {one['groups_per_s']:.0f} groups/s; CPU a group: executor "
            f"{one['executor_us']:.0f} us, workers {one['worker_us']:.0f} us",
        )
    if "generate" in wanted:
        for name, tokens in (("generate", 64), ("generate_long", 512)):
            one = in_directory(generate.measure, tokens)
            found |= {f"{name}_{key}": value for key, value in one.items()}
            say(
                options,
                f"1,000 generations of {tokens} tokens at once: {one['worker_per_s']:.0f}/s from a worker, "
                f"{one['bare_per_s']:.0f}/s from a bare client ({one['ratio']:.0%}); p99 {one['worker_p99_ms']:.0f} "
                f"and {one['bare_p99_ms']:.0f} ms, CPU {one['worker_cpu_us']:.0f} and {one['bare_cpu_us']:.0f} us each",
            )
    if "table" in wanted:
        found["table"] = table(options)
    missed = [name for name, goal in GOALS.items() if name in found and found[name] < goal]
    say(options, f"below its goal: {', '.join(missed) or 'nothing'}")
    found["load"] = statistics.fmean(os.getloadavg()[:1])
    print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in found.items()}))


if __name__ == "__main__":
    main()
