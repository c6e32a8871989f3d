"""What operators and status.json are shown."""

from __future__ import annotations

from typing import Any

from miles_hpc.hub.core import Core
from miles_hpc.wire.messages import CellRow, NodeRow, StatusReply, WorkerRow


def node_rows(core: Core) -> list[NodeRow]:
    return [
        NodeRow(
            node=node.id,
            host=node.host,
            address=node.address,
            state="dead" if node.left else node.condition,
            silent_s=round(core.now - node.last_heard, 3),
            pid=node.pid,
            dropped=node.dropped,
        )
        for node in sorted(core.nodes.values(), key=lambda node: node.index)
    ]


def cell_rows(core: Core) -> list[CellRow]:
    return [
        CellRow(
            cell=cell.id,
            pool=cell.pool,
            node=cell.workers[0].node if cell.workers else "",
            generation=cell.generation,
            state=cell.phase.value,
            workers=[WorkerRow(pid=worker.pid, ports=worker.ports or {}) for worker in cell.workers if not worker.gone],
            restarts=cell.restarts,
        )
        for cell in core.cells.values()
    ]


def status_reply(core: Core, call_id: str) -> StatusReply:
    """A live answer: `age_s` is 0; a reader of status.json computes it from `written_at`."""
    return StatusReply(
        call_id=call_id,
        run_id=core.info.run_id,
        attempt=core.info.attempt,
        epoch=core.info.epoch,
        hub=core.info.hub,
        step=core.step,
        weight_version=core.weight_version,
        nodes=node_rows(core),
        cells=cell_rows(core),
        age_s=0.0,
        summary=core.driver_summary,
        outcome=core.outcome or "",
        http=core.info.http,
        draining="" if core.drain is None else core.drain.reason,
        dropped=core.dropped,
    )


def status_object(core: Core, written_at: float) -> dict[str, Any]:
    """The content of status.json: the fields of a StatusReply, its wall clock time, and the summary's seconds.

    Rows stay Structs: turning those of a large fleet into plain values is the encoder's work, in another thread.
    """
    reply = status_reply(core, "")
    fields = {name: getattr(reply, name) for name in reply.__struct_fields__ if name != "call_id"}
    return {**fields, "written_at": written_at, "healed": core.healed(), "seconds": core.seconds()}
