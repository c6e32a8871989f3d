"""The hub as a supervised child of the first node's agent."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from miles_hpc.agent import procfs
from miles_hpc.agent.log import JsonLog
from miles_hpc.agent.log_files import LogFiles
from miles_hpc.agent.options import Options
from miles_hpc.agent.patience import Patience, Stalled
from miles_hpc.agent.supervise import Exit, Supervisor
from miles_hpc.wire import rendezvous
from miles_hpc.wire.ids import Generation

LOG = "hub.log"
EPOCH_TAKEN = 3
"""Exit code of a hub that found its epoch, or a higher one, taken."""


class _Verdict(msgspec.Struct):
    exit_code: int = 1


class HubProcess:
    """Starts the hub, and says what its end means."""

    name = "hub"

    def __init__(self, options: Options, logs: LogFiles, supervisor: Supervisor) -> None:
        self._options, self._logs, self._supervisor = options, logs, supervisor
        self._log_path = logs.home_of(Path(LOG))
        self._patience = Patience()

    def begin(self, log: JsonLog) -> None:
        """Start the hub of a run, or the next one when this node's agent died with the last one. A hub that another
        node has is left alone.

        Raises:
            SpawnError, RendezvousError.
            OSError: when its log can be written nowhere.
        """
        options = self._options
        found = rendezvous.newest(options.run_dir, options.attempt, options.run_id)
        if found is None:
            self.start()
        elif found.node in ("", options.node):
            self.start(found.epoch + 1)
        else:
            log.write("hub_is_elsewhere", epoch=found.epoch, node=found.node)

    def start(self, epoch: int = 0) -> None:
        """Start a hub that claims this epoch, or the next free one.

        Raises:
            SpawnError.
            OSError: when its log can be written nowhere.
        """
        argv = [sys.executable, "-m", "miles_hpc.cli.hub"]
        options = self._options
        argv += ["--run-dir", str(options.run_dir), "--run-id", options.run_id, "--attempt", str(options.attempt)]
        argv += ["--address", options.address, "--node", options.node]
        for address in options.also:
            argv += ["--also", address]
        if epoch:
            argv += ["--epoch", str(epoch)]
        if options.slurm:
            argv.append("--slurm")
        env = procfs.worker_environ(os.environ)
        with self._logs.opened(LOG, f"hub.{int(time.time())}.log") as (log, self._log_path):
            self._supervisor.spawn(self.name, Generation(0, 0), argv, env, log)

    @property
    def _verdict_path(self) -> Path:
        return self._options.run_dir / "verdicts" / f"attempt-{self._options.attempt}.json"

    def verdict_stands(self) -> bool:
        """Whether the attempt has its verdict. While the file system stalls it is taken to have none."""
        try:
            return self._patience.do(self._verdict_path.exists)
        except Stalled:
            return False

    def describe(self, ended: Exit) -> str:
        """How the hub ended."""
        how = f"signal {ended.signal}" if ended.signal is not None else f"exit code {ended.exit_code}"
        lines = [line for line in self._logs.tail(self._log_path, 4096).splitlines() if line.strip()]
        last = f"; its last line: {lines[-1]}" if lines else ""
        return f"the hub ended by {how} without a verdict (log {self._logs.home_of(self._log_path)}){last}"

    def verdict_exit_code(self) -> int:
        """The exit code that the verdict asks for; 1 when it cannot be read."""
        try:
            content = self._patience.do(self._verdict_path.read_bytes)
            return msgspec.json.decode(content, type=_Verdict).exit_code
        except (OSError, msgspec.MsgspecError):
            return 1
