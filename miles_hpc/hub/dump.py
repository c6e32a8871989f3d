"""All that a hub knows, as plain values, for those who look for a fault in it."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.hub import views
from miles_hpc.hub.core import Cell, Core, Node
from miles_hpc.hub.state import HubState


def state(hub: HubState) -> dict[str, Any]:
    """The state machine: what status shows, and what it keeps to itself. Times are seconds ago, or from now."""
    core = hub.core
    return {
        "status": msgspec.to_builtins(views.status_reply(core, "")),
        "timing": msgspec.to_builtins(core.timing),
        "heal": msgspec.to_builtins(core.heal),
        "begun": core.begun,
        "draining": core.drain.reason if core.drain else "",
        "revision": hub.revision,
        "waiting": list(core.waiting),
        "reserved": list(core.reserved),
        "clients": {peer.hex(): f"{client.worker} g{client.generation}" for peer, client in core.clients.items()},
        "nodes": [_node(core, node) for node in core.nodes.values()],
        "cells": [_cell(core, cell) for cell in core.cells.values()],
    }


def _node(core: Core, node: Node) -> dict[str, Any]:
    return {
        "node": node.id,
        "key": node.key,
        "incarnation": node.incarnation,
        "condition": node.condition,
        "left": node.left,
        "silent_s": round(core.now - node.last_heard, 3),
        "interface": node.interface,
        "versions": dict(zip(("miles_hpc", "python", "kernel"), node.versions, strict=True)),
        "cpus": node.cpus,
        "gpus": [gpu.uuid for gpu in node.gpus],
        "gpu_holders": {
            str(slot): f"{worker} g{generation}" for slot, (worker, generation) in node.gpu_holders.items()
        },
        "strays": {worker: str(generation) for worker, generation in node.strays.items()},
    }


def _cell(core: Core, cell: Cell) -> dict[str, Any]:
    return {
        "cell": cell.id,
        "phase": cell.phase.value,
        "wanted": cell.wanted,
        "generation": str(cell.generation),
        "starts": cell.starts,
        "deaths_s_ago": [round(core.now - death, 3) for death in cell.deaths],
        "retry_in_s": round(cell.retry_at - core.now, 3) if cell.retry_at > core.now else 0.0,
        "unplaced_for_s": None if cell.unplaced_since is None else round(core.now - cell.unplaced_since, 3),
        "workers": [
            {
                "worker": worker.id,
                "node": worker.node,
                "gpu_slots": list(worker.gpu_slots),
                "ports": worker.ports,
                "pid": worker.pid,
                "ready": worker.ready,
                "gone": worker.gone,
                "argv": worker.order.argv if worker.order else None,
            }
            for worker in cell.workers
        ],
    }


def process() -> dict[str, Any]:
    """This process: what it holds open, how much memory it has, and where its threads stand."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    return {
        "pid": os.getpid(),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "threads": {names.get(ident, str(ident)): traceback.format_stack(frame) for ident, frame in frames.items()},
    }
