"""The hub's status as Prometheus metrics; imported by the first request for them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
_NODE_STATES = ("alive", "suspect", "dead")


def render(status: Mapping[str, Any], counters: Mapping[str, int], pid: int) -> bytes:
    """All metrics in the text format of Prometheus.

    Args:
        status: what `views.status_object` gives; `{}` before the first.
        counters: what did not get through, by reason.
        pid: of the hub.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(status, counters, pid))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, status: Mapping[str, Any], counters: Mapping[str, int], pid: int) -> None:
        self._status, self._counters, self._pid = status, counters, pid

    def collect(self) -> Iterable[Metric]:
        yield from self._run()
        yield from self._fleet()
        dropped = CounterMetricFamily("miles_hpc_hub_dropped", "What did not get through.", labels=["reason"])
        for reason, count in self._counters.items():
            dropped.add_metric([reason], count)
        yield dropped
        yield from self._process()

    def _run(self) -> Iterable[Metric]:
        status = self._status
        yield GaugeMetricFamily("miles_hpc_attempt", "Attempt of the run.", value=status.get("attempt", 0))
        yield GaugeMetricFamily("miles_hpc_epoch", "Epoch of the hub.", value=status.get("epoch", 0))
        yield GaugeMetricFamily("miles_hpc_step", "Last step of the driver.", value=status.get("step", 0))
        yield GaugeMetricFamily(
            "miles_hpc_weight_version", "Weight version of the engines.", value=status.get("weight_version", 0)
        )
        yield CounterMetricFamily("miles_hpc_healed", "Cells started again.", value=status.get("healed", 0))
        yield GaugeMetricFamily(
            "miles_hpc_status_time_seconds", "When this was taken, since 1970.", value=status.get("written_at", 0.0)
        )

    def _fleet(self) -> Iterable[Metric]:
        nodes = GaugeMetricFamily("miles_hpc_nodes", "Nodes by state.", labels=["state"])
        of_state = Counter(node.state for node in self._status.get("nodes", ()))
        for state in _NODE_STATES:
            nodes.add_metric([state], of_state[state])
        yield nodes
        cells = GaugeMetricFamily("miles_hpc_cells", "Cells by pool and state.", labels=["pool", "state"])
        restarts = CounterMetricFamily("miles_hpc_cell_restarts", "Starts beyond a cell's first.", labels=["pool"])
        rows = self._status.get("cells", ())
        for (pool, state), count in sorted(Counter((row.pool, row.state) for row in rows).items()):
            cells.add_metric([pool, state], count)
        restarted: Counter[str] = Counter()
        for row in rows:
            restarted[row.pool] += row.restarts
        for pool, count in sorted(restarted.items()):
            restarts.add_metric([pool], count)
        yield cells
        yield restarts

    def _process(self) -> Iterable[Metric]:
        place = Path("/proc") / str(self._pid)
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        pages = int((place / "statm").read_text().split()[1])
        files = len(list((place / "fd").iterdir()))
        yield CounterMetricFamily("miles_hpc_hub_cpu_seconds", "CPU time of the hub.", value=seconds)
        yield GaugeMetricFamily(
            "miles_hpc_hub_memory_bytes", "Resident memory of the hub.", value=pages * os.sysconf("SC_PAGE_SIZE")
        )
        yield GaugeMetricFamily("miles_hpc_hub_open_files", "Descriptors of the hub.", value=files)
