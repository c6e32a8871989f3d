"""A local run with the real hub and real agents that waits for one more node, so that it stands still but lives."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import ClusterConfig, Config, ModelConfig
from miles_hpc.launch.attempts import claim_attempt
from miles_hpc.launch.local import LocalRun, start_local
from miles_hpc.wire.security import create_secrets


def config_of(nodes: int) -> Config:
    return Config(cluster=ClusterConfig(local_nodes=nodes), model=ModelConfig(path="/nonexistent/model"))


@contextlib.contextmanager
def waiting_run(run_dir: Path, nodes: int = 2, *, resume: bool = False) -> Iterator[LocalRun]:
    """Nodes with agents, the first one with a hub that was told to expect one node more."""
    run_dir.mkdir(parents=True, exist_ok=True)
    attempt = claim_attempt(run_dir, resume=resume)
    create_secrets(run_dir, attempt.number)
    write_resolved(config_of(nodes + 1), run_dir)
    with start_local(config_of(nodes), run_dir, attempt) as run:
        yield run


def eventually(condition: Callable[[], bool], timeout_s: float = 40.0) -> bool:
    """Poll a condition of the outside world."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def joined(run: LocalRun, epoch: int = 1, *, anew: bool = False) -> int:
    """Nodes that the hub of an epoch has let in, or agent incarnations of them with `anew`."""
    log = run.run_dir / "logs" / f"attempt-{run.attempt.number}" / "hub.jsonl"
    if not log.exists():
        return 0
    rows = [msgspec.json.decode(line) for line in log.read_bytes().splitlines() if line.endswith(b"}")]
    started = [place for place, row in enumerate(rows) if row["event"] == "hub_started"]
    rows = rows[started[epoch - 1] :] if len(started) >= epoch else []
    return len({row["incarnation" if anew else "node"] for row in rows if row["event"] == "agent_joined"})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    with waiting_run(tmp_path / f"run-{os.getpid()}-{time.monotonic_ns() % 10**6}") as made:
        assert eventually(lambda: joined(made) == 2), made.poll()
        yield made
