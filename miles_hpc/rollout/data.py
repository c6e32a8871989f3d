"""Prompts: files of rows, and the order in which they are handed out."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from miles_hpc.config.check import split_slice
from miles_hpc.config.schema import DataConfig, ReasoningGymConfig
from miles_hpc.rollout.functions import load_function
from miles_hpc.rollout.sample import GroupSpec, Messages, group_id, parse_group_id
from miles_hpc.transport.columns import Array


class DataError(ValueError):
    """A prompt file cannot be used; one line with file, line or row, and remedy."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a prompt file."""

    prompt: str | Messages
    label: Any = None
    metadata: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Which keys of a row hold what; see `DataConfig`."""

    prompt: str = "prompt"
    label: str = "label"
    metadata: str = "metadata"
    tools: str = ""
    passed: tuple[str, ...] = ()
    """Keys that go into the metadata as they are, where a row has them."""


class Prompts(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Prompt: ...


def open_prompts(text: str, keys: Keys) -> Prompts:
    """Open `path` or `path@[a:b]`, and read every selected row once.

    Args:
        text: a `.parquet` file, or JSON lines in a file of any other name.
        keys: where prompt, label and metadata stand.

    Raises:
        DataError: no such file, no rows, a line that is no JSON object, or a row without its keys.
    """
    name, rows = split_slice(text)
    path = Path(name)
    if not path.is_file():
        raise DataError(f"{path}: no such prompt file; correct data.prompts or data.heldout")
    parquet = path.suffix == ".parquet"
    prompts: Prompts = _Spool(_parquet_rows(path, rows, keys)) if parquet else _JsonLines(path, rows, keys)
    if not len(prompts):
        raise DataError(f"{text}: no rows; name a file or a slice that holds prompts")
    return prompts


def read_row(row: Any, keys: Keys, where: str) -> Prompt:
    """A row as a Prompt; `where` begins the error text.

    Raises:
        DataError: the row lacks a key or has a value of another kind.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected an object with {keys.prompt!r}, found {type(row).__name__}")
    for key, option in ((keys.prompt, "data.prompt_key"), (keys.label, "data.label_key")):
        if key and key not in row:
            raise DataError(f"{where}: no key {key!r}, found {sorted(map(str, row))}; correct the file or set {option}")
    prompt = row[keys.prompt]
    if isinstance(prompt, list):
        bad = [m for m in prompt if not isinstance(m, Mapping) or not isinstance(m.get("role"), str)]
        if bad or not prompt:
            raise DataError(f"{where}: {keys.prompt!r} is a list, but not of chat messages with a role")
        prompt = [dict(message) for message in prompt]
    elif not isinstance(prompt, str) or not prompt:
        raise DataError(f"{where}: {keys.prompt!r} is {prompt!r:.40}; expected a text or a list of chat messages")
    metadata = row.get(keys.metadata) if keys.metadata else None
    if metadata is not None and not isinstance(metadata, Mapping):
        raise DataError(f"{where}: {keys.metadata!r} is {type(metadata).__name__}; expected an object")
    tools = row.get(keys.tools) if keys.tools else None
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools)):
        raise DataError(f"{where}: {keys.tools!r} is {tools!r:.40}; expected a list of tools")
    return Prompt(
        prompt=prompt,
        label=row.get(keys.label) if keys.label else None,
        metadata={**(metadata or {}), **{key: row[key] for key in keys.passed if key in row}},
        tools=[dict(tool) for tool in tools or []],
    )


class _JsonLines:
    """Rows stay in the file; only their places are held, 16 bytes a row."""

    def __init__(self, path: Path, rows: slice, keys: Keys) -> None:
        self._path = path
        self._keys = keys
        places = np.fromiter(self._scan(path), dtype=np.dtype((np.int64, 2)))[rows]
        self._offsets, self._numbers = places[:, 0], places[:, 1]
        self._file = path.open("rb")
        for row in range(len(self)):
            self[row]

    @staticmethod
    def _scan(path: Path) -> Iterator[tuple[int, int]]:
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield offset, number
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Prompt:
        self._file.seek(int(self._offsets[row]))
        where = f"{self._path}, line {self._numbers[row]}"
        try:
            found = msgspec.json.decode(self._file.readline())
        except msgspec.MsgspecError as error:
            raise DataError(f"{where}: broken JSON ({error}); correct or remove the line") from error
        return read_row(found, self._keys, where)


class _Spool:
    """Rows that were read once lie as msgpack in an unnamed temporary file; 8 bytes a row are held.

    Args:
        prompts: the rows, read to their end.

    Raises:
        DataError: a row holds something that cannot be sent to a worker.
    """

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the prompts
        encoder, ends = msgspec.msgpack.Encoder(), [0]
        for number, prompt in enumerate(prompts):
            try:
                packed = encoder.encode(prompt)
            except (TypeError, ValueError, OverflowError) as error:
                raise DataError(
                    f"prompt {number} cannot be sent to a worker: {error}; rows may hold texts, numbers, bytes, lists "
                    f"and tables"
                ) from error
            ends.append(ends[-1] + self._file.write(packed))
        self._file.flush()
        self._ends = np.array(ends, np.int64)
        self._decoder = msgspec.msgpack.Decoder(Prompt)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> Prompt:
        start, end = int(self._ends[row]), int(self._ends[row + 1])
        return self._decoder.decode(os.pread(self._file.fileno(), end - start, start))


def _parquet_rows(path: Path, rows: slice, keys: Keys) -> Iterator[Prompt]:
    """The selected rows, one row group after the other; the table's other columns are never read."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow; pip install 'miles-hpc[data]'") from error
    try:
        file = ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file ({error}); correct data.prompts or data.heldout") from error
    names = file.schema_arrow.names
    for key, option in ((keys.prompt, "data.prompt_key"), (keys.label, "data.label_key")):
        if key and key not in names:
            raise DataError(f"{path}: no column {key!r}, found {names}; correct the file or set {option}")
    wanted = [name for name in (keys.prompt, keys.label, keys.metadata, keys.tools, *keys.passed) if name in names]
    selected = range(file.metadata.num_rows)[rows]
    number = 0
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if number + count > selected.start and number < selected.stop:
            at = number
            for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=list(dict.fromkeys(wanted))):
                try:
                    found = batch.to_pylist()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}, rows {at} to {at + batch.num_rows - 1}: a text is not UTF-8 ({error}); write it again"
                    ) from error
                for row in found:
                    if at in selected:
                        yield read_row(row, keys, f"{path}, row {at}")
                    at += 1
        number += count


def _gym_rows(settings: ReasoningGymConfig) -> Iterator[Prompt]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError("[data.reasoning_gym] needs reasoning-gym; pip install 'miles-hpc[gym]'") from error
    try:
        made = reasoning_gym.create_dataset(settings.task, size=settings.size, seed=settings.seed, **settings.config)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(f"data.reasoning_gym.task = {settings.task!r} cannot be made: {error}") from error
    for entry in made:
        yield Prompt(prompt=entry["question"], label=entry["answer"], metadata={"entry": json.loads(json.dumps(entry))})


def _own_rows(path: str, keys: Keys) -> Iterator[Prompt]:
    rows = load_function(path, "data.source")()
    for number, row in enumerate(rows):
        yield read_row(row, keys, f"data.source = {path!r}, row {number}")


def open_source(data: DataConfig) -> Prompts:
    """The prompts that are trained on: `data.prompts`, `data.source` or `[data.reasoning_gym]`.

    Raises:
        DataError: they cannot be read, or there are none.
        FunctionPathError: `data.source` cannot be imported.
    """
    keys = keys_of(data)
    if data.reasoning_gym is not None:
        prompts: Prompts = _Spool(_gym_rows(data.reasoning_gym))
    elif data.source:
        prompts = _Spool(_own_rows(data.source, keys))
    else:
        return open_prompts(data.prompts, keys)
    if not len(prompts):
        raise DataError(f"data.source = {data.source!r} returned no rows")
    return prompts


def keys_of(data: DataConfig) -> Keys:
    """Where the rows of a run's files hold what."""
    return Keys(
        prompt=data.prompt_key,
        label=data.label_key,
        metadata=data.metadata_key,
        tools=data.tools_key,
        passed=tuple(data.multimodal_keys),
    )


def epoch_order(rows: int, seed: int, epoch: int) -> Array:
    """The shuffled order of an epoch, `[rows] int64`.

    Rows are sorted by a hash (splitmix64) of seed, epoch and row, so the order is the same with every version of every
    library, which a saved position relies on.
    """
    base = _splitmix(_splitmix(np.array([seed & (2**64 - 1)], np.uint64)) ^ np.uint64(epoch))
    return np.argsort(_splitmix(base ^ _splitmix(np.arange(rows, dtype=np.uint64))), kind="stable").astype(np.int64)


def _splitmix(value: Array) -> Array:
    """https://prng.di.unimi.it/splitmix64.c, one step, modulo 2^64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = value ^ (value >> np.uint64(31))
    return mixed


class DataState(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the data order, part of every commit."""

    epoch: int = 0
    offset: int = 0
    """Groups of this epoch that were handed out."""
    buffer: list[GroupSpec] = []
    """Groups that were handed out and came back; they are handed out first."""


class DataSource:
    """Hands out prompt groups in an order that seed and epoch determine, without end.

    Args:
        rows: size of the data set.
        seed: of the run.
        shuffle: False keeps the file's order in every epoch.

    Raises:
        DataError: there are no rows.
    """

    def __init__(self, rows: int, *, seed: int, shuffle: bool) -> None:
        if rows < 1:
            raise DataError("the data set is empty; name a file that holds prompts")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._buffer: list[GroupSpec] = []
        self._start_epoch(0, 0)

    def next(self, count: int) -> list[GroupSpec]:
        """The next groups, those that came back first."""
        groups, self._buffer = self._buffer[:count], self._buffer[count:]
        while len(groups) < count:
            if self._offset == self._rows:
                self._start_epoch(self._epoch + 1, 0)
            groups.append(
                GroupSpec(
                    id=group_id(self._epoch, self._offset),
                    epoch=self._epoch,
                    index=self._offset,
                    prompt_index=int(self._order[self._offset]),
                )
            )
            self._offset += 1
        return groups

    def spec(self, name: str) -> GroupSpec:
        """The group of an id, as `next` hands it out."""
        epoch, index = parse_group_id(name)
        order = self._order if epoch == self._epoch else self._order_of(epoch)
        return GroupSpec(id=name, epoch=epoch, index=index, prompt_index=int(order[index]))

    def give_back(self, groups: list[GroupSpec]) -> None:
        """Groups that were not used; they are handed out again before new ones, in data order."""
        self._buffer = sorted([*self._buffer, *groups], key=lambda group: (group.epoch, group.index))

    def state(self) -> DataState:
        """Where the source stands now."""
        return DataState(epoch=self._epoch, offset=self._offset, buffer=list(self._buffer))

    def restore(self, state: DataState) -> None:
        """Go to a saved place.

        Raises:
            DataError: the place is outside the data set, so the file has changed since it was saved.
        """
        if not 0 <= state.offset <= self._rows:
            raise DataError(
                f"saved position {state.offset} of epoch {state.epoch} is outside the {self._rows} prompts: "
                f"data.prompts is shorter than when the run was started; resume with the same file"
            )
        self._start_epoch(state.epoch, state.offset)
        self._buffer = list(state.buffer)

    def _start_epoch(self, epoch: int, offset: int) -> None:
        self._epoch, self._offset = epoch, offset
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> Array:
        return epoch_order(self._rows, self._seed, epoch) if self._shuffle else np.arange(self._rows)
