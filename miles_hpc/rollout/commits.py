"""The commit log: one chain of files in `<run_dir>/commits/` that orders every durable effect of a run.

A commit is published by link(2) of a complete temporary file, so exactly one writer wins a number, and it holds the
hash of the previous file. The end of the chain is found by trying the next number, never by listing: on a network file
system a listing may be stale, link(2) is not.

Only the driver writes. Its first act is `CommitLog.open()`: from that commit on, every older driver loses its next link
and gets `Superseded`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

FIRST = 1


class CommitError(Exception):
    """The commit log cannot be read or written; the text names the file and what to do."""


class ChainBroken(CommitError):
    """A commit does not follow from the one before it."""


class Superseded(CommitError):
    """Another driver wrote the commit that this one was about to write: exit, at no cost to the budget."""


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint, as its rank reported it after fsync. `file` is relative to the checkpoint."""

    file: str
    size: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint. `path` is relative to the run directory and never written twice."""

    path: str
    step: int
    files: list[ManifestFile]


class LedgerSegment(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger lines that one commit makes durable. `path` is relative to the run directory."""

    path: str
    lines: int
    sha256: str


class Commit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One link of the chain. `open` commits repeat the state of the commit before them."""

    n: int
    kind: Literal["open", "step"]
    previous: str
    """SHA-256 of the previous commit's file; empty for the first."""
    attempt: int
    epoch: int
    driver_generation: str
    incarnation: int
    step: int = 0
    """Training steps done."""
    weight_version: int = 0
    """Highest version published when this was written; versions only grow."""
    checkpoint: CheckpointManifest | None = None
    data_state: dict[str, Any] | None = None
    """What `ExecutorClient.open` takes to go on from here; none before the first step commit."""
    counts: dict[str, Any] = {}
    ledger: LedgerSegment | None = None
    extra: dict[str, Any] = {}
    """The driver's own facts, e.g. reward of the first step, for the summary of a resumed run."""
    wall_s: float = 0.0


def encode_commit(commit: Commit) -> bytes:
    """The exact bytes of a commit's file: readable JSON, field order fixed."""
    return (json.dumps(msgspec.to_builtins(commit), indent=1, ensure_ascii=False) + "\n").encode()


def decode_commit(data: bytes, path: Path) -> Commit:
    """Raises CommitError when `data` is not a commit; `path` is only named."""
    try:
        return msgspec.json.decode(data, type=Commit)
    except msgspec.MsgspecError as error:
        raise CommitError(
            f"{path}: not a commit ({error}); the file was changed by hand or by another program"
        ) from error


def chain_hash(data: bytes) -> str:
    """What the next commit holds as `previous`."""
    return hashlib.sha256(data).hexdigest()


def check_follows(commit: Commit, previous: Commit | None, previous_hash: str, path: Path) -> None:
    """Raises ChainBroken unless `commit` is the successor of `previous`."""
    expected = FIRST if previous is None else previous.n + 1
    if commit.n != expected:
        raise ChainBroken(f"{path}: holds number {commit.n}, expected {expected}")
    if commit.previous != previous_hash:
        raise ChainBroken(
            f"{path}: follows a commit with hash {commit.previous[:12] or 'none'}, but commit {expected - 1} has "
            f"{previous_hash[:12] or 'none'}: a commit file was changed; restore it, or start a new run directory"
        )
    if previous is not None and commit.incarnation < previous.incarnation:
        raise ChainBroken(f"{path}: incarnation {commit.incarnation} after {previous.incarnation}")


def ledger_text(lines: Iterable[dict[str, Any]]) -> bytes:
    """Ledger lines as JSON lines, in the order given."""
    return b"".join(json.dumps(line, ensure_ascii=False, separators=(", ", ": ")).encode() + b"\n" for line in lines)


def commit_path(run_dir: Path, n: int) -> Path:
    return run_dir / "commits" / f"{n:05d}.json"


def link_once(target: Path, data: bytes) -> bool:
    """Publish `data` as `target` unless it exists: True when this call's file is what `target` names.

    After EEXIST the inodes decide: the same one means that our link succeeded and a network file system lost the reply.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(6).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, target)
            won = True
        except FileExistsError:
            won = temporary.stat().st_ino == target.stat().st_ino
    finally:
        temporary.unlink(missing_ok=True)
    if won:
        _sync_directory(target.parent)
    return won


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(target: Path, parts: Iterable[Path]) -> None:
    """Make `target` the concatenation of `parts` in one rename."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(6).hex()}")
    try:
        with temporary.open("wb") as out:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, out)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def read_chain(run_dir: Path) -> list[Commit]:
    """Every commit of a run in order, the chain verified; empty for a run that never had a driver.

    For readers. A writer must not rely on it: it learns the end of the log from its own link.

    Raises:
        CommitError: a file does not decode or the chain is broken.
    """
    chain: list[Commit] = []
    previous_hash = ""
    while True:
        path = commit_path(run_dir, FIRST + len(chain))
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return chain
        commit = decode_commit(data, path)
        check_follows(commit, chain[-1] if chain else None, previous_hash, path)
        chain.append(commit)
        previous_hash = chain_hash(data)


def newest_commit(run_dir: Path) -> Commit | None:
    """The commit that a resumed run goes on from."""
    chain = read_chain(run_dir)
    return chain[-1] if chain else None


def rebuild_ledger(run_dir: Path, chain: Sequence[Commit]) -> None:
    """Write `ledger.jsonl` from the chain's segments, and `ledger.rolled-back.jsonl` from all others.

    Raises:
        CommitError: a segment that the chain names is missing.
    """
    inside = [run_dir / commit.ledger.path for commit in chain if commit.ledger is not None]
    missing = [path for path in inside if not path.is_file()]
    if missing:
        raise CommitError(f"{missing[0]}: named by the commit log but missing; restore it from a copy of the run")
    replace_file(run_dir / "ledger.jsonl", inside)
    outside = sorted(set((run_dir / "commits").glob("*.ledger.jsonl")) - set(inside))
    if outside:
        replace_file(run_dir / "ledger.rolled-back.jsonl", outside)


class CommitLog:
    """The driver's end of the commit log.

    Args:
        run_dir: the run directory.
        attempt, epoch, generation: identity of this driver; `generation` as text, `1-3`.
    """

    def __init__(self, run_dir: Path, *, attempt: int, epoch: int, generation: str) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._epoch = epoch
        self._generation = generation
        self._chain: list[Commit] = []
        self._hash = ""
        self._opened = False
        (run_dir / "commits").mkdir(parents=True, exist_ok=True)

    @property
    def newest(self) -> Commit:
        """The last commit that this driver knows.

        Raises:
            CommitError: before `open`.
        """
        if not self._opened:
            raise CommitError("the commit log is not open: a driver's first act is CommitLog.open()")
        return self._chain[-1]

    @property
    def incarnation(self) -> int:
        """This driver's training incarnation."""
        return self.newest.incarnation

    def open(self) -> Commit:
        """Become the only driver: append an `open` commit that repeats the newest state, in the next incarnation.

        Returns:
            The open commit. Its step, checkpoint, data_state and weight_version are what to go on from; in a fresh run
            they are 0 and none.

        Raises:
            CommitError: a file does not decode or the chain is broken.
        """
        if self._opened:
            raise CommitError("the commit log is open already")
        # Every number is tried by link, not looked up: the link of a stale reader fails where its lookup would not.
        while not self._try_open():
            path = commit_path(self._run_dir, self._next)
            data = path.read_bytes()
            commit = decode_commit(data, path)
            check_follows(commit, self._chain[-1] if self._chain else None, self._hash, path)
            self._chain.append(commit)
            self._hash = chain_hash(data)
        self._opened = True
        rebuild_ledger(self._run_dir, self._chain)
        return self.newest

    @property
    def _next(self) -> int:
        return FIRST + len(self._chain)

    def _try_open(self) -> bool:
        last = self._chain[-1] if self._chain else None
        commit = Commit(
            n=self._next,
            kind="open",
            previous=self._hash,
            attempt=self._attempt,
            epoch=self._epoch,
            driver_generation=self._generation,
            incarnation=1 if last is None else last.incarnation + 1,
            step=0 if last is None else last.step,
            weight_version=0 if last is None else last.weight_version,
            checkpoint=None if last is None else last.checkpoint,
            data_state=None if last is None else last.data_state,
            counts={} if last is None else last.counts,
            extra={} if last is None else last.extra,
            wall_s=time.time(),
        )
        return self._link(commit)

    def _link(self, commit: Commit) -> bool:
        data = encode_commit(commit)
        if not link_once(commit_path(self._run_dir, commit.n), data):
            return False
        self._chain.append(commit)
        self._hash = chain_hash(data)
        return True

    def append(
        self,
        *,
        step: int,
        weight_version: int,
        checkpoint: CheckpointManifest | None,
        data_state: dict[str, Any],
        counts: dict[str, Any],
        ledger: Sequence[dict[str, Any]],
        extra: dict[str, Any] | None = None,
    ) -> Commit:
        """Make everything up to `step` durable; when this returns, the step cannot be lost.

        The checkpoint's files must have been synced before. `ledger.jsonl` is rebuilt afterwards.

        Raises:
            Superseded: a newer driver wrote this number; nothing of this commit counts.
            CommitError: steps or versions go backwards, or the file system refused.
        """
        last = self.newest
        if step < last.step or weight_version < last.weight_version:
            raise CommitError(
                f"commit {self._next} would go backwards: step {last.step} -> {step}, "
                f"weight version {last.weight_version} -> {weight_version}"
            )
        commit = Commit(
            n=self._next,
            kind="step",
            previous=self._hash,
            attempt=self._attempt,
            epoch=self._epoch,
            driver_generation=self._generation,
            incarnation=last.incarnation,
            step=step,
            weight_version=weight_version,
            checkpoint=checkpoint,
            data_state=data_state,
            counts=counts,
            ledger=self._write_segment(ledger),
            extra=last.extra if extra is None else extra,
            wall_s=time.time(),
        )
        if not self._link(commit):
            path = commit_path(self._run_dir, commit.n)
            winner = decode_commit(path.read_bytes(), path)
            raise Superseded(
                f"{path}: written by driver generation {winner.driver_generation} of attempt {winner.attempt}, "
                f"incarnation {winner.incarnation}; this is generation {self._generation} of attempt {self._attempt}, "
                f"incarnation {commit.incarnation}: it exits, its uncommitted steps are redone"
            )
        rebuild_ledger(self._run_dir, self._chain)
        return commit

    def _write_segment(self, lines: Sequence[dict[str, Any]]) -> LedgerSegment:
        relative = f"commits/{self._next:05d}.g{self._generation}.ledger.jsonl"
        path = self._run_dir / relative
        data = ledger_text(lines)
        # A generation's name is used once per number; an existing file is this driver's own earlier, unlinked try or
        # that of an attempt which lost: neither is in the chain, and a rename never touches a file that is.
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(6).hex()}")
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        return LedgerSegment(path=relative, lines=len(lines), sha256=hashlib.sha256(data).hexdigest())
