"""Parcels of finished groups, fetched from the workers that keep them."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import threading

from miles_hpc.transport.bulk import BulkClient, BulkError, BulkTimeout
from miles_hpc.transport.carriers import ParcelRef
from miles_hpc.transport.segments import SegmentMaps, SegmentUnreachable
from miles_hpc.wire.address import HostAndPort

_PULL_S = 30.0
_SILENT_S = 120.0
"""From a port that was silent nothing is asked for so long; then one parcel tries whether it answers again."""


class ParcelFetcher:
    """Maps parcels of this node and pulls those of others. Belongs to one event loop."""

    def __init__(self) -> None:
        self._maps = SegmentMaps()
        self._clients: dict[HostAndPort, tuple[BulkClient, asyncio.Lock]] = {}
        self._silent: dict[tuple[HostAndPort, bytes], float] = {}
        """Ports that did not answer, and until when they are not asked; on the loop's clock."""

    def view(self, ref: ParcelRef) -> memoryview | None:
        """A parcel of this node, read-only; valid until its group is committed. None: it must be pulled."""
        try:
            return self._maps.view(ref.segment, ref.nbytes)
        except SegmentUnreachable:
            return None

    async def pull(self, ref: ParcelRef) -> memoryview:
        """A parcel in memory of its own.

        Raises:
            BulkError: it did not come.
        """
        port = ref.address, ref.key
        client, lock = self._client(ref)
        again = port in self._silent
        if again:
            self._refuse_silent(ref)
            self._be_silent(ref)  # the parcels beside this one do not wait for what becomes of it
        async with lock:
            if not again:
                self._refuse_silent(ref)
            memory = memoryview(mmap.mmap(-1, ref.nbytes))
            try:
                await _in_thread(client, ref.id, memory)
            except BulkTimeout:
                self._be_silent(ref)
                raise
            except BulkError:
                self._silent.pop(port, None)  # it has answered
                raise
            self._silent.pop(port, None)
        return memory.toreadonly()

    def _refuse_silent(self, ref: ParcelRef) -> None:
        if asyncio.get_running_loop().time() < self._silent.get((ref.address, ref.key), 0.0):
            raise BulkTimeout(f"{ref.address.netloc} did not answer before")

    def _be_silent(self, ref: ParcelRef) -> None:
        self._silent[ref.address, ref.key] = asyncio.get_running_loop().time() + _SILENT_S

    def _client(self, ref: ParcelRef) -> tuple[BulkClient, asyncio.Lock]:
        found = self._clients.get(ref.address)
        if found is not None and found[0].key == ref.key:
            return found
        if found is not None and not found[1].locked():
            found[0].close()
        self._clients[ref.address] = made = BulkClient(ref.address, ref.key), asyncio.Lock()
        return made

    def close(self) -> None:
        """Close the connections that are not in use; the others end with the process."""
        for client, lock in self._clients.values():
            if not lock.locked():
                client.close()


async def _in_thread(client: BulkClient, parcel: bytes, into: memoryview) -> None:
    """`client.pull` in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end(error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def work() -> None:
        failure: Exception | None = None
        try:
            client.pull(parcel, into, _PULL_S)
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end, failure)

    threading.Thread(target=work, name="pull", daemon=True).start()
    await done
