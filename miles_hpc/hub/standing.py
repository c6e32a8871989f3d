"""Whether this hub hears enough of the run to act for all of it: a majority, or half of it and a live lease."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from miles_hpc.wire.messages import Peer, Roster, Standing

if TYPE_CHECKING:
    from miles_hpc.hub.core import Core

LEASE_FRESH_S = 8.0
"""At exactly half of the nodes a hub acts while its lease was renewed this recently."""
LET_GO_S = 10.0
"""A hub that hears less than half for this long lets its lease stop, so that another may claim."""
ROSTER_LIMIT = 64
"""Agents in the roster: enough for candidates and witnesses, also in a run of thousands."""
SAY_EVERY_S = 1.0
"""How often the agent beside the hub hears of its standing: it renews the lease only while this loop moves."""


class StandingState(msgspec.Struct):
    """Times are on the hub's monotonic clock."""

    acts: bool = True
    heard_half_at: float = 0.0
    lease_renewed_at: float = -math.inf
    said_at: float = -math.inf
    said: Standing | None = None
    roster_dirty: bool = False
    roster_at: float = -math.inf


def heard_of_first_job(core: Core) -> tuple[int, int]:
    """How many agents of the first job are heard, and how many of them there are; those that left or are known to be
    down count as neither."""
    wanted = core.info.expected_nodes
    first_job = [node for node in core.nodes.values() if node.index < wanted]
    unheard = (core.left_before | core.down_unheard) - core.nodes.keys()
    out = sum(1 for node in first_job if node.left or node.down) + len(unheard)
    heard = sum(1 for node in first_job if node.condition == "alive" and not (node.left or node.down))
    return heard, wanted - out


def watch(core: Core) -> None:
    """Judge the standing, and tell it."""
    state, (heard, total) = core.standing, heard_of_first_job(core)
    if 2 * heard >= total:
        state.heard_half_at = core.now
    majority = 2 * heard > total or total == 0
    acts = majority or (2 * heard == total and core.now - state.lease_renewed_at <= LEASE_FRESH_S)
    if not core.begun and core.recovery is None:
        # A run that has not begun has nothing to lose: nothing is placed before all nodes are here.
        acts, state.heard_half_at = True, core.now
    if acts != state.acts:
        state.acts = acts
        core.note("acts" if acts else "stands_by", "info" if acts else "error", heard=heard, of=total)
        if acts and core.held_decision is not None:
            core.decide(*core.held_decision)
    now = Standing(acts=acts, lease=core.now - state.heard_half_at <= LET_GO_S)
    # Joins of a large fleet come in crowds, and one roster a second is enough for all of them.
    pause = SAY_EVERY_S if len(core.nodes) > ROSTER_LIMIT else 0.0
    if state.roster_dirty and core.now - state.roster_at >= pause:
        state.roster_dirty, state.roster_at = False, core.now
        _send_roster(core)
    if now != state.said:
        for node in core.nodes.values():
            core.send_node(node.id, now)
    elif core.now - state.said_at >= SAY_EVERY_S:
        core.send_node(core.info.hub_node, now)
    else:
        return
    state.said, state.said_at = now, core.now


def on_hello(core: Core, node: str) -> None:
    """An agent has said hello: it hears of the standing, and all hear whom they may ask."""
    core.standing.roster_dirty = True
    if not core.standing.acts:
        watch(core)
    if core.standing.said is not None:
        core.send_node(node, core.standing.said)


def _send_roster(core: Core) -> None:
    peers = [
        Peer(node=node.id, host=node.host, address=node.address, port=node.peer_port)
        for node in sorted(core.nodes.values(), key=lambda node: node.index)
        if node.peer_port and not node.left and node.index < core.info.expected_nodes
    ]
    if peers:
        roster = Roster(hub_node=core.info.hub_node, peers=peers[:ROSTER_LIMIT])
        for node in core.nodes.values():
            core.send_node(node.id, roster)
