"""Follows a started run to its verdict, shows what it does, and ends it when the user asks."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from miles_hpc.cli.live import View, topology
from miles_hpc.config.schema import Config
from miles_hpc.launch.local import LocalRun
from miles_hpc.postmortem.reading import Tail, read_json
from miles_hpc.postmortem.report import committed_steps, rewards

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_EVERY_S = 0.2
_ASK_HUB_S = 2.0
_HUB_STOPS_IN_S = 6.0
_STOP_IN_S = 3.0
"""Together below the 10 s in which a cancelled run must be gone."""


class Follower:
    """Takes over SIGINT, SIGTERM and SIGHUP while it is entered; before, during and after the run itself."""

    def __init__(self, config: Config, run_dir: Path, attempt: int, view: View) -> None:
        self._config, self._run_dir, self._attempt, self._view = config, run_dir, attempt, view
        self._asked: list[str] = []
        self._metrics = Tail(run_dir / "metrics.jsonl")
        self._metrics.skip_to_end()
        self._shown_topology = False

    def __enter__(self) -> Follower:
        # A signal writes a byte into this pipe, which ends a wait: nothing is done inside the handlers.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._old_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._old = {signum: signal.signal(signum, self._on_signal) for signum in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._asked.append(signal.Signals(signum).name)

    def _pause(self, seconds: float) -> None:
        """Wait, at most until the next signal."""
        ready, _, _ = select.select([self._wake_read], [], [], seconds)
        if ready:
            os.read(self._wake_read, 512)

    def follow(self, local: LocalRun) -> dict[str, Any]:
        """Show the run until every process of it is gone. Returns its summary, which is then on disk."""
        while (verdict := local.poll()) is None and not self._asked:
            self._show()
            self._pause(_LOOK_EVERY_S)
        if verdict is None:
            verdict = self._cancel(local)
        self._show_steps()
        if verdict.get("outcome") != "finished":
            self._view.progress("stopping")
        self._let_go(local)
        if left := local.leftovers():
            names = ", ".join(f"{pid} ({command[:60]})" for pid, command in left[:5])
            self._view.say(f"note: {len(left)} processes of this run could not be stopped: {names}")
        return self._settle(local.verdict() or verdict)

    def _let_go(self, local: LocalRun) -> None:
        """After the verdict the hub stops everything; wait for that, and less long once the user is impatient."""
        asked = len(self._asked)
        patience = time.monotonic() + max(self._config.timing.trainer_stop_grace, self._config.timing.stop_grace) + 5.0
        while local.alive() and time.monotonic() < patience and len(self._asked) == asked:
            self._pause(_LOOK_EVERY_S / 4)
        local.stop("the run has its verdict", _STOP_IN_S)

    def _cancel(self, local: LocalRun) -> dict[str, Any]:
        """End the run as cancelled: by the hub, which writes the verdict; without it, by stopping the nodes."""
        reason = f"cancelled by {self._asked[0]}"
        self._view.progress(f"{reason}: stopping everything; once more to stop at once")
        started, asked = time.monotonic(), len(self._asked)
        if self._ask_hub(reason):
            # A second Ctrl-C goes on at once.
            while local.alive() and time.monotonic() - started < _HUB_STOPS_IN_S and len(self._asked) == asked:
                self._pause(_LOOK_EVERY_S / 4)
        local.stop(reason, 1.0 if len(self._asked) > asked else _STOP_IN_S)
        return local.verdict() or {"outcome": "cancelled", "reason": reason, "exit_code": 130}

    def _ask_hub(self, reason: str) -> bool:
        from miles_hpc.wire.operator import OperatorClient
        from miles_hpc.wire.sockets import HubError

        try:
            with OperatorClient(self._run_dir, self._attempt, timeout_s=_ASK_HUB_S) as hub:
                hub.cancel(reason)
        except HubError:
            return False
        return True

    def _show_steps(self) -> None:
        for row in self._metrics.read():
            self._view.step(row, self._config.steps)

    def _show(self) -> None:
        self._show_status()
        self._show_steps()

    def _show_status(self) -> None:
        status = read_json(self._run_dir / "status.json")
        if status.get("attempt") != self._attempt:
            return
        cells = status.get("cells") or []
        placed = [cell for cell in cells if cell.get("node")]
        if not self._shown_topology and cells and len(placed) == len(cells):
            self._shown_topology = True
            nodes = status["nodes"]
            title = "1 node:" if len(nodes) == 1 else f"{len(nodes)} nodes:"
            self._view.say("\n".join([title, *topology(cells, nodes)]))
        self._view.progress(self._now(status, cells))

    def _now(self, status: dict[str, Any], cells: list[dict[str, Any]]) -> str:
        ready = sum(1 for cell in cells if cell.get("state") == "ready")
        if ready < len(cells):
            late = sorted({str(cell.get("pool")) for cell in cells if cell.get("state") != "ready"})
            return f"{ready} of {len(cells)} cells ready, waiting for {', '.join(late)}"
        healed = status.get("healed", 0)
        return f"all {len(cells)} cells ready" + (f", {healed} healed so far" if healed else "")

    def _settle(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """The verdict as it is on disk; where no hub wrote one, written here from the last status."""
        if "seconds" in verdict:
            return verdict
        from miles_hpc.hub.actions import WriteVerdict
        from miles_hpc.hub.summary import merged_summary
        from miles_hpc.hub.verdict import verdict_path, write_verdict

        status = read_json(self._run_dir / "status.json")
        if status.get("attempt") != self._attempt:
            status = {}
        outcome, reason = verdict["outcome"], str(verdict.get("reason", ""))
        # The last status is up to a second older than the last step; metrics.jsonl is the younger witness.
        steps = committed_steps(Tail(self._run_dir / "metrics.jsonl").read())
        last = steps[-1] if steps else {}
        summary = merged_summary(
            {**(status.get("summary") or {}), **rewards(steps)},
            outcome=outcome,
            reason=reason,
            exit_code=verdict["exit_code"],
            attempt=self._attempt,
            step=last.get("step", 0),
            weight_version=last.get("weight_version", status.get("weight_version", 0)),
            started=sum(1 for cell in status.get("cells", []) if cell.get("workers") or cell.get("restarts")),
            healed=status.get("healed", 0),
            ready=None,
            first_step=None,
            total=status.get("age_s", 0.0),
        )
        try:
            write_verdict(self._run_dir, self._attempt, WriteVerdict(outcome, reason, verdict["exit_code"], summary))
        except OSError as error:
            # Then nothing else on that disk says why, either.
            target = verdict_path(self._run_dir, self._attempt)
            summary["reason"] = f"{reason}; {target} could not be written: {error.strerror}".removeprefix("; ")
        return summary
