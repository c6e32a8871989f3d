"""How many agents fit a hub? See `--help`."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import ClusterConfig, Config, InferenceConfig
from miles_hpc.config.timing import Timing
from miles_hpc.hub.limits import LimitTooLow, descriptors_needed, raise_nofile
from miles_hpc.postmortem.reading import Tail
from miles_hpc.wire.ids import node_id
from miles_hpc.wire.operator import OperatorClient
from miles_hpc.wire.rendezvous import wait_for_rendezvous
from miles_hpc.wire.security import create_secrets
from miles_hpc.wire.sockets import HubError

START_S = 60.0
REGISTER_S = 600.0
AGENT_FILES = 2
"""A simulated agent's socket: the connection, and the eventfd of its mailbox."""
ENGINES = 8
"""Cells whose restarts are the commands that are timed."""
LIMITS = {"hub_cpu_pct": 35.0, "lag_p99_ms": 10.0, "kb_per_agent": 40.0}
"""What a hub of 10,000 agents may take at most, on a machine that has cores for it and its load."""


class Gone(Exception):
    """A process of the simulation ended, or did not answer in time."""


class LoadProcess:
    """One process of agents: commands in, JSON lines out, read by a thread."""

    def __init__(self, run_dir: Path, first: int, count: int, total: int, table_every: float) -> None:
        self.indices = range(first, first + count)
        script = Path(__file__).with_name("agents.py")
        argv = [sys.executable, str(script), str(run_dir), str(first), str(count), str(total), str(table_every)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._said.append(json.loads(line))
                self._changed.notify_all()

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def said(self, key: str, timeout_s: float = START_S) -> dict[str, Any]:
        """The next line with this key; it is taken away."""

        def found() -> dict[str, Any] | None:
            for line in self._said:
                if key in line:
                    self._said.remove(line)
                    return line
            return None

        with self._changed:
            line = self._changed.wait_for(found, timeout_s)
        if line is None:
            raise Gone(f"the process of agents {self.indices.start}… did not say {key!r} within {timeout_s:g} s")
        return line

    def all_said(self, key: str) -> list[dict[str, Any]]:
        with self._changed:
            return [line for line in self._said if key in line]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Simulation:
    """A hub, its agents, and what is measured of them."""

    def __init__(
        self, agents: int, processes: int, heartbeat: float, run_dir: Path, say: Callable[[str], None]
    ) -> None:
        self.agents, self.run_dir, self.say = agents, run_dir, say
        self.results: dict[str, Any] = {"agents": agents}
        self.config = Config(
            cluster=ClusterConfig(local_nodes=agents),
            inference=InferenceConfig(engines=ENGINES),
            timing=Timing(join=REGISTER_S, heartbeat=heartbeat),
        )
        write_resolved(self.config, run_dir)
        create_secrets(run_dir, 0)
        self.load: list[LoadProcess] = []
        self._scale = max(1.0, agents / 5000 / heartbeat)
        self._before = 0
        self._stderr = (run_dir / "hub.stderr").open("w")
        argv = [sys.executable, "-m", "miles_hpc.hub.run", "--run-dir", str(run_dir), "--attempt", "0"]
        self.hub = subprocess.Popen([*argv, "--address", "127.0.0.1"], stdout=self._stderr, stderr=self._stderr)
        wait_for_rendezvous(run_dir, 0, time.monotonic() + START_S)
        self.process = psutil.Process(self.hub.pid)
        self._events = Tail(run_dir / "logs" / "attempt-0" / "hub.jsonl")
        self.events: list[dict[str, Any]] = []
        per_process = math.ceil(agents / processes)
        for first in range(0, agents, per_process):
            count = min(per_process, agents - first)
            self.load.append(LoadProcess(run_dir, first, count, agents, self.config.timing.anti_entropy * self._scale))
        for each in self.load:
            each.said("made")

    def _look(self) -> list[dict[str, Any]]:
        self.events += self._events.read()
        if self.hub.poll() is not None:
            raise Gone(f"the hub ended with {self.hub.returncode}: {(self.run_dir / 'hub.stderr').read_text()[-600:]}")
        return self.events

    def _cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def _threads_s(self) -> dict[str, float]:
        """CPU seconds by kind of thread: libzmq's, and the rest, which shares the interpreter lock."""
        found = {"zmq": 0.0, "python": 0.0}
        for task in Path(f"/proc/{self.hub.pid}/task").iterdir():
            name, fields = (task / "comm").read_text(), (task / "stat").read_text().rpartition(")")[2].split()
            kind = "zmq" if name.startswith("ZMQ") else "python"
            found[kind] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

    def register(self) -> None:
        """All agents connect at once, shake hands, and are let in."""
        self._before = self.process.memory_full_info().uss
        started, cpu = time.monotonic(), self._cpu_s()
        for each in self.load:
            each.tell("go")
        last = max(each.said("registered", REGISTER_S)["at"] for each in self.load)
        seconds = last - started
        self._until(lambda: any(e["event"] == "all_ready" for e in self._look()), "all cells ready", START_S)
        self.results |= {
            "registered_s": round(seconds, 3),
            "registered_per_s": round(self.agents / seconds),
            "register_cpu_s": round(self._cpu_s() - cpu, 2),
            "kb_per_agent": self._kb_per_agent(),
            "hub_files": self.process.num_fds(),
        }
        self.say(f"{self.agents} agents registered in {seconds:.2f} s ({self.agents / seconds:.0f} a second)")

    def _kb_per_agent(self) -> float:
        return float(round((self.process.memory_full_info().uss - self._before) / self.agents / 1024, 1))

    def measure(self, seconds: float) -> None:
        """Heartbeats and tables, nothing else."""
        for each in self.load:
            each.tell("window")
            each.said("window")
        cpu, started = self._threads_s(), time.monotonic()
        psutil.cpu_times_percent(None)
        self._until(lambda: False, "", seconds, give_up=False)
        took = time.monotonic() - started
        used = {kind: seconds - cpu[kind] for kind, seconds in self._threads_s().items()}
        idle = psutil.cpu_times_percent(None).idle
        lags: list[float] = []
        late, heard = 0.0, 0
        for each in self.load:
            each.tell("report")
            told = each.said("lags_ms")
            lags += told["lags_ms"]
            heard += told["heard"]
            late = max(late, told["late_s"])
            if told["refused"]:
                raise Gone(f"the hub refused an agent: {told['refused']}")
        self.results |= {
            "heartbeats_per_s": round(heard / took),
            "hub_cpu_pct": round(100 * sum(used.values()) / took, 1),
            "hub_python_pct": round(100 * used["python"] / took, 1),
            "hub_zmq_pct": round(100 * used["zmq"] / took, 1),
            "us_per_heartbeat": round(1e6 * sum(used.values()) / max(1, heard), 1),
            "lag_p50_ms": percentile(lags, 50),
            "lag_p99_ms": percentile(lags, 99),
            "load_late_ms": round(late * 1e3, 1),
            "machine_idle_pct": idle,
        }

    def command(self, seconds: float) -> None:
        """Heartbeats go on while an operator restarts cells."""
        sent = self._command(time.monotonic() + seconds)
        got = {(line["stop"], line["generation"]): line["at"] for each in self.load for line in each.all_said("stop")}
        took = [(got[key] - at) * 1e3 for key, at in sent.items() if key in got]
        self.results |= {
            "command_p50_ms": percentile(took, 50),
            "command_p99_ms": percentile(took, 99),
            "commands": len(took),
            "commands_lost": len(sent) - len(took),
            "kb_per_agent_end": self._kb_per_agent(),
        }

    def _command(self, until: float) -> dict[tuple[str, str], float]:
        """Restart engines in turn; returns when each order was given, by the worker and generation that it stops."""
        given: dict[tuple[str, str], float] = {}
        pause = threading.Event()
        with OperatorClient(self.run_dir, 0, timeout_s=20) as operator:
            n = 0
            while time.monotonic() < until:
                cell = next((row for row in operator.cells() if row.cell == f"engine-policy-0-{n % ENGINES:05d}"), None)
                if cell is not None and cell.state == "ready":
                    given[f"{cell.cell}-00000", str(cell.generation)] = time.monotonic()
                    operator.restart_cell(cell.cell, cell.generation)
                n += 1
                pause.wait(0.05)
        return given

    def kill(self, share: float, seed: int) -> None:
        """A part of the nodes loses power at one moment; the hub must name them, all of them and nobody else."""
        victims = sorted(random.Random(seed).sample(range(1, self.agents), max(1, round(self.agents * share))))
        for each in self.load:
            each.tell("die", *[index for index in victims if index in each.indices])
        dead_at = max(each.said("died")["at"] for each in self.load)
        scale = self._scale
        patience = self.config.timing.dead * scale + 4 * self.config.timing.heartbeat * scale + 20
        wanted = {node_id(index) for index in victims}

        def decided() -> dict[str, float]:
            return {e["node"]: e["time"] - dead_at for e in self._look() if e["event"] == "node_dead"}

        self._until(lambda: wanted <= set(decided()), "the death of all victims", patience, give_up=False)
        # As long again: a false one would come now.
        self._until(lambda: False, "", self.config.timing.suspect * scale, give_up=False)
        found = decided()
        took = [seconds for node, seconds in found.items() if node in wanted]
        self.results |= {
            "deaths": len(wanted),
            "deaths_decided": len(took),
            "false_deaths": len(set(found) - wanted),
            "false_suspects": len({e["node"] for e in self.events if e["event"] == "node_suspect"} - wanted),
            "decide_p50_s": percentile(took, 50),
            "decide_p99_s": percentile(took, 99),
        }

    def _until(self, condition: Callable[[], bool], what: str, seconds: float, give_up: bool = True) -> None:
        deadline = time.monotonic() + seconds
        pause = threading.Event()
        while not condition():
            if time.monotonic() > deadline:
                if give_up:
                    raise Gone(f"{what}: not within {seconds:g} s")
                return
            pause.wait(0.1)

    def end(self) -> None:
        """Let the run be cancelled, so that the end of a fleet is seen too."""
        started = time.monotonic()
        with OperatorClient(self.run_dir, 0, timeout_s=20) as operator:
            operator.cancel("the simulation is over")
        self.hub.wait(60)
        self.results["ended_s"] = round(time.monotonic() - started, 3)

    def close(self) -> None:
        for each in self.load:
            each.end()
        if self.hub.poll() is None:
            self.hub.send_signal(signal.SIGKILL)
        self.hub.wait()
        self._stderr.close()


def percentile(values: list[float], share: float) -> float | None:
    """Nearest rank; None for no values."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))], 3) if ordered else None


def misses(results: dict[str, Any]) -> dict[str, str]:
    """What each figure that is not as it should be was to be."""
    over = {name: f"at most {limit:g}" for name, limit in LIMITS.items() if (results.get(name) or 0.0) > limit}
    return over | wrong_deaths(results)


def wrong_deaths(results: dict[str, Any]) -> dict[str, str]:
    """As `misses`, of what no load excuses: the dead that were not named, and the living that were."""
    undecided = results["deaths_decided"] != results["deaths"]
    found = {"deaths_decided": str(results["deaths"])} if undecided else {}
    return found | ({"false_deaths": "0"} if results["false_deaths"] else {})


def prepare_limits(agents: int, processes: int) -> str:
    """Let this process and its children open what they need. Returns what was found out. Raises LimitTooLow."""
    hub = descriptors_needed(nodes=agents, workers=ENGINES + 20)
    load = AGENT_FILES * math.ceil(agents / processes) + 64
    raise_nofile(max(hub, load), f"a hub with {agents} agents and {processes} processes of simulated ones")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"files needed: hub {hub}, each process of agents {load}; limit {soft} (hard {hard})"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="simulate-fleet",
        description="How many agents fit a hub?",
        epilog="Ends with 1 when a death was not decided, or decided of a living agent. Other goals that were missed "
        "are marked in the table: they depend on the machine.",
    )
    parser.add_argument("--agents", type=int, default=10_000, help="simulated agents (default: 10000)")
    parser.add_argument("--processes", type=int, default=4, help="processes that hold them (default: 4)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measured heartbeats (default: 20)")
    parser.add_argument("--heartbeat", type=float, default=1.0, help="timing.heartbeat, before it is stretched (1.0)")
    parser.add_argument("--deaths", type=float, default=0.01, help="share of the agents that dies (default: 0.01)")
    parser.add_argument("--seed", type=int, default=0, help="who dies (default: 0)")
    parser.add_argument("--keep", action="store_true", help="keep the run directory and print its place")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    given = parser.parse_args()

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        say(prepare_limits(given.agents, given.processes))
    except LimitTooLow as refusal:
        print(f"simulate-fleet: {refusal}", file=sys.stderr)
        return 2
    place = Path(tempfile.mkdtemp(prefix="simulate-fleet-"))
    run_dir = place / "run"
    run_dir.mkdir()
    simulation = None
    try:
        load = os.getloadavg()[0]
        simulation = Simulation(given.agents, given.processes, given.heartbeat, run_dir, say)
        simulation.results["load_before"] = round(load, 2)
        simulation.register()
        simulation.measure(given.seconds)
        simulation.command(given.seconds / 2)
        simulation.kill(given.deaths, given.seed)
        simulation.end()
    except (Gone, HubError) as failure:
        if simulation is not None:
            say(str(simulation.results))
            given.keep = True
        print(f"simulate-fleet: {failure}", file=sys.stderr)
        return 1
    finally:
        if simulation is not None:
            simulation.close()
        if given.keep:
            say(f"kept: {run_dir}")
        else:
            shutil.rmtree(place, ignore_errors=True)
    missed = misses(simulation.results)
    for name, value in simulation.results.items():
        say(f"{name:<18} {value}" + (f"  missed: {missed[name]}" if name in missed else ""))
    say("lag: heartbeat sent until its receipt is taken; command: an operator's order until its agent has it; both on")
    say("one machine with the load itself, so they show the hub and the crowding of the processes, not a network.")
    if given.json:
        print(json.dumps(simulation.results))
    return 1 if wrong_deaths(simulation.results) else 0


if __name__ == "__main__":
    sys.exit(main())
