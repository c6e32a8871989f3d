"""See tools/bench-inference."""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import generate
import healing
import health
import stream
import window

PARTS = {
    "healing": lambda run_dir, options: healing.measure(run_dir),
    "window": lambda run_dir, options: asyncio.run(window.measure(run_dir)),
    "generate": lambda run_dir, options: asyncio.run(generate.measure(run_dir)),
    "stream": lambda run_dir, options: asyncio.run(stream.measure(run_dir)),
    "health": lambda run_dir, options: asyncio.run(health.measure(run_dir, sglang=options.sglang)),
}
ROWS = (
    ("engine_out_s", "a killed engine is out of the router", "s", "<=", 2.0),
    ("engine_process_s", "its replacement's process is started", "s", "<=", 1.0),
    ("engine_serves_s", "the replacement has the weights and gets requests", "s", "", None),
    ("router_back_s", "a killed router is back with all engines", "s", "<=", 3.0),
    ("window_overhead_ms", f"a weight window beyond the loads, {window.ENGINES} engines", "ms", "<=", 100.0),
    ("window_cpu_ms", "CPU of all processes for such a window", "ms", "", None),
    ("client_ratio", f"throughput of a bare client, {generate.IN_FLIGHT} at once", "", ">=", 0.9),
    ("bare_cpu_us", "CPU of the bare client, a request", "us", "", None),
    ("client_cpu_us", "CPU of the generate client, a request", "us", "", None),
    *stream.ROWS,
    ("health_share", "health traffic, of an idle engine's core", "", "<=", 0.01),
    ("sglang_engine_idle_share", "what an idle SGLang uses of a core by itself", "", "", None),
    ("sglang_health_share", "health traffic, of an idle SGLang's core", "", "<=", 0.01),
)


def table(found):
    """Each measure beside its goal; returns the names of those that miss it."""
    missed = []
    print("\n| question | median | worst | goal | |")
    print("|---|---|---|---|---|")
    for name, text, unit, relation, goal in ROWS:
        if name not in found:
            continue
        stem, _, kind = name.rpartition("_")
        value, worst = found[name], found.get(f"{stem}_worst_{kind}")
        met = goal is None or (value <= goal if relation == "<=" else value >= goal)
        if not met:
            missed.append(name)
        verdict = "" if goal is None else "met" if met else "missed"
        shown = f"{value:.3g} {unit}".strip()
        print(
            f"| {text} | {shown} | {'' if worst is None else f'{worst:.3g} {unit}'.strip()} "
            f"| {'' if goal is None else f'{relation} {goal:g} {unit}'.strip()} | {verdict} |"
        )
    return missed


def main():
    parser = argparse.ArgumentParser(prog="bench-inference", description="What the inference plane costs, and how fast")
    parser.add_argument("--json", action="store_true", help="the last line is all figures as JSON")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--sglang", action="store_true", help="health also on the real SGLang of tools/sglang-cpu")
    options = parser.parse_args()
    wanted = options.only.split(",")
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)} (known: {', '.join(PARTS)})")
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    found = {}
    for name in wanted:
        with tempfile.TemporaryDirectory(prefix="bench-inference-") as directory:
            found |= PARTS[name](Path(directory), options)
        print(f"{name}: done, load {os.getloadavg()[0]:.1f}", flush=True)
    missed = table(found)
    print(f"missed: {', '.join(missed) or 'nothing'}")
    found["load"] = os.getloadavg()[0]
    if options.json:
        print(json.dumps({key: round(value, 4) for key, value in found.items()}))


if __name__ == "__main__":
    main()
