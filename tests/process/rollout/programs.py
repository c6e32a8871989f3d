"""The real executor and worker programs around an address book that is a file: `programs.py executor|worker`."""

import asyncio
import sys
import threading
import time
from pathlib import Path

import msgspec

from miles_hpc.config.load import read_resolved
from miles_hpc.rollout.run_executor import execute
from miles_hpc.rollout.run_worker import work
from miles_hpc.wire.messages import CellAddrs
from miles_hpc.wire.program import setup_logging
from miles_hpc.wire.worker_env import WorkerEnv


class FileBook:
    """What a HubClient offers of the address book, read from `<run_dir>/book.json`."""

    def __init__(self, env: WorkerEnv) -> None:
        self.env = env
        self._path = env.run_dir / "book.json"
        self._callbacks = []
        self._stamp = None
        self.pools = {}
        self._look()
        threading.Thread(target=self._watch, daemon=True).start()

    def _look(self) -> bool:
        stamp = self._path.stat().st_mtime_ns
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self.pools = msgspec.json.decode(self._path.read_bytes(), type=dict[str, list[CellAddrs]])
        return True

    def _watch(self) -> None:
        while True:
            time.sleep(0.02)
            if self._look():
                for callback in list(self._callbacks):
                    callback(self.pools)

    def on_change(self, callback):
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    async def async_changes(self):
        seen = None
        while True:
            if self.pools is not seen:
                seen = self.pools
                yield seen
            await asyncio.sleep(0.02)


def main() -> None:
    setup_logging()
    env = WorkerEnv.from_environ()
    config = read_resolved(env.run_dir)
    sys.path.insert(0, str(Path(__file__).parent))
    program = {"executor": execute, "worker": work}[sys.argv[1]]
    asyncio.run(program(env, config, FileBook(env)))


if __name__ == "__main__":
    main()
