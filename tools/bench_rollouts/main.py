"""See tools/bench-rollouts."""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import generate  # noqa: E402
import groups  # noqa: E402
import handover  # noqa: E402
from samples import payload_bytes  # noqa: E402
from table import table  # noqa: E402

PARTS = ("handover", "groups", "generate", "table")
GOALS = {
    "shm_vs_ray_arrays": 1.3,
    "tcp_vs_ray_arrays": 1.0,
    "shm_vs_ray_lists": 20.0,
    "tcp_vs_ray_lists": 10.0,
    "shm_vs_memcpy": 0.25,
    "tcp_vs_loopback": 1 / 3,
    "groups_per_s": 5000.0,
    **{f"generate_{kind}_ratio_streamed": 0.9 for kind in generate.KINDS},
}


def ray_command(samples, tokens):
    packages = next((ROOT / ".runtimes" / "ray" / "lib").glob("python3*/site-packages"))
    env = {
        **os.environ,
        "PYTHONPATH": str(packages),
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_raylet_start_wait_time_s": "120",
    }
    return [sys.executable, str(HERE / "ray_side.py"), str(samples), str(tokens)], env


def hand_over(options):
    """Ours, the limits and Ray in turns; a ratio is the median of the rounds' ratios."""
    ray = ray_command(options.samples, options.tokens) if options.with_ray else None
    rounds = handover.side_by_side(options.samples, options.tokens, options.rounds, ray)
    moved = payload_bytes(options.samples, options.tokens)
    middle = {name: handover.medians(one) for name, one in rounds.items()}
    found = {f"{limit}_gbps": moved / middle[limit]["ms"] / 1e6 for limit in ("memcpy", "loopback")}
    for name, one in middle.items():
        found[f"{name}_ms"] = one["ms"]
        if "cpu_ms" in one:
            found[f"{name}_cpu_ms"] = one["cpu_ms"]
        extra = f", {one['pack_ms']:.1f} ms until it was offered" if "pack_ms" in one else ""
        cpu = f", {one['cpu_ms']:.1f} ms of CPU" if "cpu_ms" in one else ""
        say(options, f"{name}: {one['ms']:.1f} ms ({moved / one['ms'] / 1e6:.2f} GB/s){cpu}{extra}")
    for carrier, limit in (("shm", "memcpy"), ("tcp", "loopback")):
        found[f"{carrier}_gbps"] = moved / middle[carrier]["ms"] / 1e6
        found[f"{carrier}_vs_{limit}"] = handover.ratio(rounds[limit], rounds[carrier])
        found[f"{carrier}_vs_{limit}_cpu"] = handover.ratio(rounds[limit], rounds[carrier], "cpu_ms")
        for kind in ("arrays", "lists") if ray else ():
            found[f"{carrier}_vs_ray_{kind}"] = handover.ratio(rounds[f"ray_{kind}"], rounds[carrier])
        if ray:
            found[f"{carrier}_vs_ray_arrays_cpu"] = handover.ratio(rounds["ray_arrays"], rounds[carrier], "cpu_ms")
    found["consumer_mem_ratio"] = max(middle[carrier]["peak_mb"] for carrier in ("shm", "tcp")) * 2**20 / moved
    say(options, "ratios, medians of the rounds (speed, and CPU where it says cpu):")
    say(options, "  " + ", ".join(f"{key} {value:.2f}" for key, value in found.items() if "_vs_" in key))
    say(options, f"consumer's peak memory {found['consumer_mem_ratio']:.2f} x the packed bytes")
    return found


def say(options, text):
    if not options.json:
        print(text, flush=True)


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
    parser.add_argument("--rounds", type=int, default=7, help="of the hand-over, one of each in turn")
    parser.add_argument("--row-deadline", type=float, default=300.0, help="seconds for one row of the table")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        parser.error(f"--only: no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    found = {}
    say(options, f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if "handover" in wanted:
        found |= hand_over(options)
    if "groups" in wanted:
        one = in_directory(groups.tiny_groups, 10_000, 4)
        found |= {"groups_per_s": one["groups_per_s"], "executor_us": one["executor_us"], "worker_us": one["worker_us"]}
        say(
            options,
            f"10,000 tiny groups over 4 workers: {one['groups_per_s']:.0f} groups/s; CPU a group: executor "
            f"{one['executor_us']:.0f} us, workers {one['worker_us']:.0f} us",
        )
    if "generate" in wanted:
        for kind, (tokens, token_ms, _) in generate.KINDS.items():
            one = in_directory(generate.measure, kind)
            found |= {f"generate_{kind}_{key}": value for key, value in one.items()}
            say(options, f"1,000 generations at once of {tokens} tokens, one in {token_ms:g} ms:")
            for name, text in (("worker", "a worker"), ("streamed", "bare, streamed"), ("bare", "bare, one piece")):
                ratio = f" ({one[f'ratio_{name}']:.0%})" if f"ratio_{name}" in one else ""
                say(
                    options,
                    f"  {text:16} {one[f'{name}_per_s']:6.0f}/s{ratio:7}  p99 {one[f'{name}_p99_ms']:6.0f} ms  "
                    f"CPU {one[f'{name}_cpu_us']:6.0f} us each",
                )
    if "table" in wanted:
        found["table"] = table(options.samples, options.row_deadline, lambda text: say(options, text))
    missed = [f"{row['row']}" for row in found.get("table", []) if "failed" in row]
    missed += [name for name, goal in GOALS.items() if name in found and found[name] < goal]
    say(options, f"below its goal: {', '.join(missed) or 'nothing'}")
    found["load"] = statistics.fmean(os.getloadavg()[:1])
    print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in found.items()}))


if __name__ == "__main__":
    main()
