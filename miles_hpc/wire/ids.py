"""Ids of nodes, cells and workers, and the generation that every order and report carries."""

from __future__ import annotations

import msgspec

WIDTH = 5
_LIMIT = 10**WIDTH


class Generation(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Which start of a cell: the hub's epoch, then a counter inside that epoch. A stale one is refused."""

    epoch: int
    n: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.n}"

    @classmethod
    def parse(cls, text: str) -> Generation:
        epoch, _, n = text.partition("-")
        return cls(int(epoch), int(n))


def _padded(index: int) -> str:
    if not 0 <= index < _LIMIT:
        raise ValueError(f"index {index} is outside 0..{_LIMIT - 1}")
    return f"{index:0{WIDTH}d}"


def node_id(index: int) -> str:
    """`node-00003`."""
    return f"node-{_padded(index)}"


def cell_id(pool: str, cell: int) -> str:
    """`pool-00002`; ids sort as text."""
    return f"{pool}-{_padded(cell)}"


def worker_id(cell: str, worker: int) -> str:
    """`pool-00002-00001`."""
    return f"{cell}-{_padded(worker)}"


def _split_last(text: str, what: str) -> tuple[str, int]:
    head, _, tail = text.rpartition("-")
    if not head or len(tail) != WIDTH or not (tail.isascii() and tail.isdigit()):
        raise ValueError(f"{text!r} is not a {what} id: expected <name>-<{WIDTH} digits>")
    return head, int(tail)


def parse_cell_id(text: str) -> tuple[str, int]:
    """Pool and cell index; parsed from the right, so a pool name may hold hyphens.

    Raises:
        ValueError: when `text` is not a cell id.
    """
    return _split_last(text, "cell")


def parse_worker_id(text: str) -> tuple[str, int, int]:
    """Pool, cell index and worker index.

    Raises:
        ValueError: when `text` is not a worker id.
    """
    cell, worker = _split_last(text, "worker")
    pool, index = _split_last(cell, "worker")
    return pool, index, worker


def cell_of(worker: str) -> str:
    """The id of the cell that a worker belongs to."""
    return _split_last(worker, "worker")[0]
