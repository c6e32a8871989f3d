"""Our plane on this machine, in its own interpreter: start-up, idle memory, deaths. Prints one JSON object."""

import time

BEGUN = time.time()

import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

import miles_hpc.wire.lean  # noqa: E402, F401  as `miles-hpc run` does

# isort: split
from processes import IDLE_S, percentile, pss_mb  # noqa: E402

from miles_hpc.config.load import write_resolved  # noqa: E402
from miles_hpc.config.schema import Config, HealConfig, InferenceConfig, ModelConfig, RuntimeConfig  # noqa: E402
from miles_hpc.launch.attempts import claim_attempt  # noqa: E402
from miles_hpc.launch.local import LocalRun, start_local  # noqa: E402
from miles_hpc.wire.security import create_secrets  # noqa: E402

DEATHS, ENGINES = 40, 4


def stub(place: Path) -> Path:
    """Stands in for every program: says when its first instruction runs, and sleeps."""
    path = place / "program"
    path.write_text(
        f'#!/bin/bash\necho "$EPOCHREALTIME $MILES_HPC_GENERATION $$" >> {place}/stamps/"$MILES_HPC_WORKER"\n'
        "exec sleep 100000\n"
    )
    path.chmod(0o755)
    return path


class Plane:
    """One node with the real warden, agent and hub."""

    def __init__(self, place: Path) -> None:
        self.stamps = place / "stamps"
        self.stamps.mkdir()
        config = Config(
            model=ModelConfig(path=str(place)),
            inference=InferenceConfig(engine="fake", engines=ENGINES),
            runtimes={"default": RuntimeConfig(python=str(stub(place)))},
            heal=HealConfig(budget=10_000, backoff_s=0.0, quarantine=0),
        )
        run_dir = place / "run"
        run_dir.mkdir()
        attempt = claim_attempt(run_dir)
        create_secrets(run_dir, attempt.number)
        write_resolved(config, run_dir)
        self.run: LocalRun = start_local(config, run_dir, attempt)
        from miles_hpc.postmortem.reading import Tail  # no part of a start

        self._events = Tail(run_dir / "logs" / f"attempt-{attempt.number}" / "hub.jsonl")
        self._seen: list[dict[str, object]] = []

    def first_exec(self) -> float:
        """When the first worker's first instruction ran."""

        def first() -> float | None:
            found = [float(path.read_text().split()[0]) for path in self.stamps.iterdir() if path.stat().st_size]
            return min(found, default=None)

        return self._wait(first, "first worker")

    def processes(self) -> dict[str, int]:
        """Pids of warden, agent and hub."""
        warden = self.run.nodes[0].warden.pid
        (agent,) = children(warden)
        (hub,) = [pid for pid in children(agent) if b"miles_hpc" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return {"warden": warden, "agent": agent, "hub": hub}

    def stamp(self, worker: str, generation: int) -> tuple[float, int]:
        """When a generation of a worker ran its first instruction, and its pid."""

        def found() -> tuple[float, int] | None:
            path = self.stamps / worker
            for line in path.read_text().splitlines() if path.exists() else ():
                when, which, pid = line.split()
                if which.endswith(f"-{generation}"):
                    return float(when), int(pid)
            return None

        return self._wait(found, f"{worker} generation {generation}")

    def death_seen(self, worker: str, generation: int) -> float:
        """When the hub noted that a generation of a worker is gone."""

        def found() -> float | None:
            self._seen += self._events.read()
            for event in self._seen:
                wanted = event["event"] == "worker_exited" and event["worker"] == worker
                if wanted and str(event["generation"]).endswith(f"-{generation}"):
                    return float(str(event["time"]))
            return None

        return self._wait(found, f"death of {worker}")

    def _wait(self, condition, what, seconds=60.0):
        deadline = time.monotonic() + seconds
        while (found := condition()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {seconds:g} s: {self.run.poll()}")
            time.sleep(0.002)
        return found


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def main() -> None:
    place = Path(tempfile.mkdtemp(prefix="bench-control-"))
    plane = Plane(place)
    with plane.run:
        ready_s = plane.first_exec() - BEGUN
        for index in range(ENGINES):
            plane.stamp(f"engine-policy-0-{index:05d}-00000", 1)
        time.sleep(IDLE_S)
        pids = plane.processes()
        sizes = {name: pss_mb([pid]) for name, pid in pids.items()}
        deaths, respawns = [], []
        for n in range(DEATHS):
            worker, generation = f"engine-policy-0-{n % ENGINES:05d}-00000", n // ENGINES + 1
            _, pid = plane.stamp(worker, generation)
            killed = time.time()
            os.kill(pid, 9)
            seen = plane.death_seen(worker, generation)
            again, _ = plane.stamp(worker, generation + 1)
            deaths.append((seen - killed) * 1e3)
            respawns.append((again - seen) * 1e3)
    shutil.rmtree(place, ignore_errors=True)
    print(
        json.dumps(
            {
                "ready_s": round(ready_s, 3),
                "pss_mb": round(sum(sizes.values()), 1),
                "hub_pss_mb": sizes["hub"],
                "warden_pss_mb": sizes["warden"],
                "agent_pss_mb": sizes["agent"],
                "death_ms_p50": round(percentile(deaths, 50), 2),
                "death_ms_p99": round(percentile(deaths, 99), 2),
                "respawn_ms_p50": round(percentile(respawns, 50), 2),
                "respawn_ms_p99": round(percentile(respawns, 99), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
