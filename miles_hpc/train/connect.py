"""`miles_hpc.connect(run_dir)`: pull a run's batches into your own trainer, and publish its weights.

Works in any process that sees the run directory as the run's user, also in each rank under torchrun. Imports neither
torch nor anything of the run's own environment but this package.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from miles_hpc.wire.address import HostAndPort

if TYPE_CHECKING:
    from miles_hpc.rollout.convert import TrainBatch

log = logging.getLogger(__name__)

_FILE = "external.json"
_CALL_S = 60.0
_POLL_S = 0.2


class ConnectError(Exception):
    """The run cannot be reached, or is none that can be connected to; one line with what to do."""


class RunEnded(ConnectError):
    """The run has ended."""


class Client:
    """One rank's connection to a run of `mode = "external"`. One thread at a time.

    A batch is acknowledged by `commit`, or by asking for the next one; when all ranks have, the run commits the step.
    What was not committed is given again after a failure of the run, under the same `rollout_id`.

    Args:
        run_dir: of a run with `mode = "external"`, which may still be starting.
        timeout_s: until it must be there.

    Raises:
        ConnectError: it is not there in time.
    """

    def __init__(self, run_dir: str | Path, *, timeout_s: float = 600.0) -> None:
        self.run_dir = Path(run_dir).resolve()
        self._timeout_s = timeout_s
        self._rank, self._size = 0, 1
        self._pending: TrainBatch | None = None
        self._told: dict[str, Any] = {}
        self._closers: list[Any] = []
        self._content: dict[str, Any] = {}
        self._attach()

    def _attach(self) -> None:
        """Find the driver that serves now, and the executor beside it."""
        from miles_hpc.rollout.client import BatchReader
        from miles_hpc.wire.rpc import RpcError, SyncRpcClient

        deadline, why = time.monotonic() + self._timeout_s, "the run has not started"
        while True:
            self._detach()
            try:
                content = json.loads((self.run_dir / _FILE).read_text(encoding="utf-8"))
                address = HostAndPort.parse(content["driver"])
                driver = SyncRpcClient(address, self.run_dir, content["attempt"])
                self._closers.append(driver)
                content |= driver.call("hello", {}, timeout_s=min(_CALL_S, 5.0))
                break
            except FileNotFoundError:
                self._refuse_other_modes()
            except (OSError, ValueError, KeyError, RpcError) as error:
                why = f"{type(error).__name__}: {error}"
            self._unless_ended()
            if time.monotonic() > deadline:
                raise ConnectError(
                    f"{self.run_dir}: nothing to connect to within {self._timeout_s:g} s ({why}); "
                    f"`miles-hpc status {self.run_dir}` says how the run is"
                )
            time.sleep(_POLL_S)
        self._content, self._driver = content, driver
        executor = HostAndPort.parse(content["executor"])
        self._reader = BatchReader.at(executor, self.run_dir, content["attempt"], content["incarnation"])
        self._closers.append(self._reader)
        self._after = int(content["step"])

    def _refuse_other_modes(self) -> None:
        path = self.run_dir / "config.resolved.toml"
        if path.is_file():
            from miles_hpc.config.load import read_resolved

            mode = read_resolved(self.run_dir).mode
            if mode != "external":
                raise ConnectError(
                    f'{self.run_dir}: this run has mode = "{mode}" and trains by itself; connecting needs "external"'
                )

    def _unless_ended(self) -> None:
        verdict = self.run_dir / "summary.json"
        if verdict.is_file():
            outcome = json.loads(verdict.read_text(encoding="utf-8")).get("outcome")
            attempts = [int(path.stem) for path in (self.run_dir / "attempts").glob("*.json") if path.stem.isdigit()]
            found = json.loads(verdict.read_text(encoding="utf-8")).get("attempt")
            if outcome and found == max(attempts, default=found):
                raise RunEnded(f"{self.run_dir}: the run has ended ({outcome})")

    def _detach(self) -> None:
        while self._closers:
            self._closers.pop().close()

    @property
    def step(self) -> int:
        """Steps that are committed, as far as this client knows: what your trainer goes on from."""
        return self._after

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return int(self._content["steps"])

    @property
    def checkpoint(self) -> str:
        """What `commit(checkpoint=…)` of rank 0 said at the last commit before this client connected, or nothing."""
        return str(self._content["checkpoint"])

    def batches(self, *, dp_rank: int = 0, dp_size: int = 1) -> Iterator[TrainBatch]:
        """This rank's shard of each rollout until the run is finished; see `TrainBatch`. Its arrays are valid until
        the next one is asked for.

        Raises:
            ConnectError: the run ended otherwise, or is gone.
        """
        self._rank, self._size = dp_rank, dp_size
        while (batch := self.next_batch(dp_rank=dp_rank, dp_size=dp_size)) is not None:
            yield batch

    def next_batch(self, *, dp_rank: int = 0, dp_size: int = 1) -> TrainBatch | None:
        """Acknowledge the batch before, then wait for the next one; None when the run is finished. Raises as
        `batches`."""
        self._rank, self._size = dp_rank, dp_size
        self.commit()
        while True:
            answer = self._call("next", after=self._after, timeout_s=30.0)
            if answer is None:
                continue
            if answer.get("ended") == "finished":
                return None
            if answer.get("ended"):
                raise RunEnded(f"{self.run_dir}: the run is {answer['ended']}")
            if "rollout" in answer:
                batch = self._pull(answer["rollout"])
                if batch is not None:
                    self._pending = batch
                    return batch

    def commit(self, *, checkpoint: str = "", metrics: Mapping[str, float] | None = None) -> None:
        """Acknowledge the batch that was given last; does nothing when there is none. With all ranks' the step is
        committed.

        Args:
            checkpoint: of rank 0: where your trainer saved its state of this step; given back by `checkpoint`.
            metrics: of rank 0: go into metrics.jsonl.
        """
        if self._pending is None:
            return
        rollout = self._pending.rollout_id
        self._told = {"checkpoint": checkpoint, "metrics": dict(metrics or {})}
        self._pending = None
        if self._call("ack", rollout=rollout, **self._told) is not None:
            self._after = rollout
            try:
                self._reader.ack(rollout, self._rank)
            except Exception as error:
                # The run has committed the step, which frees the shard too.
                log.debug("shard of rollout %d: %s", rollout, error)

    def publish_weights(self, path: str | Path) -> int:
        """Bring an HF model directory into all engines; it is copied, and may be changed afterwards. Call on one rank.

        Returns:
            The weight version.

        Raises:
            ConnectError: the directory is no model, or no engine took it.
        """
        while True:
            answer = self._call("publish", path=str(Path(path).resolve()), long=True)
            if answer is not None:
                return int(answer)

    def _call(self, method: str, *, long: bool = False, **params: Any) -> Any:
        """The driver's answer ({} for none); None when the run went back to its last commit meanwhile."""
        from miles_hpc.wire.rpc import RpcError, RpcRemoteError

        everything = {
            "incarnation": self._content["incarnation"],
            "dp_rank": self._rank,
            "dp_size": self._size,
            **params,
        }
        try:
            answer = self._driver.call(method, everything, timeout_s=3600.0 if long else _CALL_S + 30.0)
            return {} if answer is None else answer
        except RpcRemoteError as error:
            if "StaleIncarnation" not in str(error):
                raise ConnectError(str(error)) from error
        except RpcError as error:
            log.warning("the run's driver is lost (%s); waiting for it to come back", error)
        self._attach()
        return None

    def _pull(self, rollout: int) -> TrainBatch | None:
        from miles_hpc.transport.bulk import BulkError
        from miles_hpc.wire.rpc import RpcError, RpcRemoteError

        try:
            return self._reader.get(rollout, self._rank, self._size, timeout_s=600.0)
        except RpcRemoteError as error:
            if "StaleIncarnation" not in str(error):
                raise ConnectError(str(error)) from error
        except (RpcError, BulkError) as error:
            log.warning("the run's executor is lost (%s); waiting for it to come back", error)
        self._attach()
        return None

    def close(self) -> None:
        """Close the connections. A batch that was not acknowledged is given again to the next client."""
        self._detach()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio: each call runs in a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.run_dir = client.run_dir

    @property
    def checkpoint(self) -> str:
        """As `Client.checkpoint`."""
        return self._client.checkpoint

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def batches(self, *, dp_rank: int = 0, dp_size: int = 1) -> AsyncIterator[TrainBatch]:
        """As `Client.batches`."""
        while True:
            batch = await asyncio.to_thread(self._client.next_batch, dp_rank=dp_rank, dp_size=dp_size)
            if batch is None:
                return
            yield batch

    async def commit(self, *, checkpoint: str = "", metrics: Mapping[str, float] | None = None) -> None:
        """As `Client.commit`."""
        await asyncio.to_thread(self._client.commit, checkpoint=checkpoint, metrics=metrics)

    async def publish_weights(self, path: str | Path) -> int:
        """As `Client.publish_weights`."""
        return await asyncio.to_thread(self._client.publish_weights, path)

    async def close(self) -> None:
        """As `Client.close`."""
        await asyncio.to_thread(self._client.close)


def connect(run_dir: str | Path, *, timeout_s: float = 600.0) -> Client:
    """Connect to a run of `mode = "external"`; see `Client`."""
    return Client(run_dir, timeout_s=timeout_s)


async def connect_async(run_dir: str | Path, *, timeout_s: float = 600.0) -> AsyncClient:
    """The same for asyncio."""
    return AsyncClient(await asyncio.to_thread(Client, run_dir, timeout_s=timeout_s))
