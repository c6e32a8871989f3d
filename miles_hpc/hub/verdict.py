"""What an attempt leaves for good: its verdict by link(2), summary.json by rename, and status.json while it runs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.hub.actions import EXIT_CODES, Outcome, WriteVerdict


def verdict_path(run_dir: Path, attempt: int) -> Path:
    """`<run_dir>/verdicts/attempt-<n>.json`."""
    return run_dir / "verdicts" / f"attempt-{attempt}.json"


def write_verdict(run_dir: Path, attempt: int, verdict: WriteVerdict) -> bool:
    """Publish the verdict of an attempt, once, then summary.json as its copy unless a newer attempt exists.

    Returns:
        False when the attempt had a verdict already; that one stands and nothing is written.

    Raises:
        OSError: when the run directory cannot be written.
    """
    target = verdict_path(run_dir, attempt)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(target, verdict.summary)
    try:
        try:
            os.link(draft, target)
        except FileExistsError:
            # Over NFS a link(2) whose answer was lost is sent again and then finds its own file.
            if draft.stat().st_nlink != 2:
                return False
    finally:
        draft.unlink(missing_ok=True)
    if not _newer_attempt(run_dir, attempt):
        replace_json(run_dir / "summary.json", verdict.summary)
    return True


def read_outcome(run_dir: Path, attempt: int) -> Outcome | None:
    """How the attempt has ended; None while it has not. A verdict that says nothing we know counts as failed."""
    try:
        found = json.loads(verdict_path(run_dir, attempt).read_bytes()).get("outcome")
    except FileNotFoundError:
        return None
    return found if found in EXIT_CODES else "failed"


def _newer_attempt(run_dir: Path, attempt: int) -> bool:
    return (run_dir / "attempts" / f"{attempt + 1}.json").exists()


def replace_json(target: Path, content: dict[str, Any]) -> None:
    """Replace a file by rename: a reader sees the old content or the new one, complete.

    Raises:
        OSError: when its directory cannot be written.
    """
    _draft(target, content).replace(target)


def _draft(target: Path, content: dict[str, Any]) -> Path:
    draft = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}")
    with draft.open("x") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    return draft


def _replace(target: Path, content: bytes, *, durable: bool = False) -> None:
    """As `replace_json`; what need not outlast a crash of the machine is not `durable`."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    draft.replace(target)
    if durable:
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class FileWriter:
    """A thread that does the hub's file work, so that a stalled file system stalls no loop.

    Verdicts are written in order and reported by `on_verdict`; of several waiting status objects only the newest is.

    Args:
        on_verdict: called in the writer's thread with what `write_verdict` returned, or with the error.
        after_verdict: called before that, when a verdict is on disk; may raise OSError.
        on_kept: called in the writer's thread with the ticket of a journal that is on disk, and "" or why it is not.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        on_verdict: Callable[[bool | OSError], None],
        after_verdict: Callable[[], None] = lambda: None,
        on_kept: Callable[[int, str], None] = lambda ticket, error: None,
    ) -> None:
        self._run_dir, self._attempt, self._on_verdict = run_dir, attempt, on_verdict
        self._after_verdict, self._on_kept = after_verdict, on_kept
        self._changed = threading.Condition()
        self._verdict: WriteVerdict | None = None
        self._status: dict[str, Any] | None = None
        self._journal: bytes | None = None
        self._ticket = 0
        self._closing = False
        self.status_failures = 0
        self._thread = threading.Thread(target=self._run, name="files", daemon=True)
        self._thread.start()

    def write_verdict(self, verdict: WriteVerdict) -> None:
        with self._changed:
            self._verdict = verdict
            self._changed.notify()

    def write_status(self, status: dict[str, Any]) -> None:
        with self._changed:
            self._status = status
            self._changed.notify()

    def write_journal(self, path: Path, content: bytes, ticket: int = 0) -> None:
        """Replace the hub's journal; of several that wait only the newest is written.

        Args:
            ticket: when not 0, somebody waits until this journal or a later one is on disk; tickets only grow.
        """
        with self._changed:
            self._journal_path, self._journal = path, content
            self._ticket = ticket or self._ticket
            self._changed.notify()

    def close(self, patience_s: float = 2.0) -> None:
        """Finish what waits, for `patience_s` at most: the thread is a daemon and ends with the process."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(patience_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._verdict or self._status or self._journal or self._closing)
                verdict, self._verdict = self._verdict, None
                status, self._status = self._status, None
                journal, self._journal = self._journal, None
                ticket, self._ticket = self._ticket, 0
                if verdict is None and status is None and journal is None:
                    return
            if verdict is not None:
                try:
                    first = write_verdict(self._run_dir, self._attempt, verdict)
                    self._after_verdict()
                    self._on_verdict(first)
                except OSError as error:
                    self._on_verdict(error)
            if journal is not None:
                self._keep(journal, ticket)
            if status is not None:
                try:
                    _replace(self._run_dir / "status.json", msgspec.json.encode(status) + b"\n")
                except OSError:
                    # Counted and shown with the next status; status.json is a convenience and never ends a run.
                    self.status_failures += 1

    def _keep(self, journal: bytes, ticket: int) -> None:
        failed = ""
        try:
            self._journal_path.parent.mkdir(exist_ok=True)
            _replace(self._journal_path, journal, durable=ticket > 0)
        except OSError as error:
            self.status_failures += 1
            failed = f"{error.filename or self._journal_path}: {error.strerror}"
        if ticket:
            self._on_kept(ticket, failed)
