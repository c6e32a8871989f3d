"""Whether prompt files can be read, row by row, before anything is started."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.config.check import split_slice
from miles_hpc.config.errors import ConfigError


def check_rows(where: str, key: str, text: str, needed: dict[str, str]) -> int:
    """Read a whole prompt file and count the rows of its slice.

    Args:
        where: the run file that the message names.
        key: the dotted key that holds `text`, a path with an optional `@[a:b]`.
        needed: keys that every row of the slice must have -> the dotted setting that names them.

    Raises:
        ConfigError: one line that names run file, key, prompt file, line and remedy.
    """
    name, rows = split_slice(text)
    path = Path(name)
    start = f"{where}: {key} = {name!r}"
    if path.is_dir():
        raise ConfigError(f"{start}: is a directory: name a jsonl or parquet file in it")
    if not path.exists():
        near = _near(path)
        raise ConfigError(f"{start}: no such file: {near or f'create it, or set {key} to a file that exists'}")
    try:
        if path.suffix == ".parquet":
            count = _check_parquet(path, start, needed)
        else:
            count = _check_jsonl(path, start, needed, rows)
    except OSError as error:
        raise ConfigError(f"{start}: cannot be read ({error.strerror}): check its permissions") from error
    chosen = len(range(count)[rows])
    if not chosen:
        what = (
            f"the slice [{_end(rows.start)}:{_end(rows.stop)}] of its {count} rows is empty"
            if count
            else "holds no row"
        )
        raise ConfigError(f"{start}: {what}: {'change the slice' if count else 'write prompts into it'}")
    return chosen


def _end(value: int | None) -> str:
    return "" if value is None else str(value)


def _near(path: Path) -> str:
    import difflib

    if not path.parent.is_dir():
        return ""
    found = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f"did you mean {found[0]!r} beside it?" if found else ""


def _check_jsonl(path: Path, start: str, needed: dict[str, str], rows: slice) -> int:
    count = 0
    inside = _membership(rows)
    with path.open("rb") as file:
        for number, row in _decoded(file, start):
            if inside(count):
                _check_row(row, start, f"line {number}", needed)
            count += 1
    return count


def _membership(rows: slice) -> Any:
    negative = any(end is not None and end < 0 for end in (rows.start, rows.stop))
    # A slice counted from the end is known only after the file was read; its rows are then all checked.
    return (lambda index: True) if negative else range(1 << 60)[rows].__contains__


def _decoded(file: Any, start: str) -> Iterator[tuple[int, Any]]:
    decoder = msgspec.json.Decoder()
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{start}: line {number} is not valid JSON ({error}): correct or remove it") from error


def _check_row(row: Any, start: str, place: str, needed: dict[str, str]) -> None:
    if not isinstance(row, dict):
        raise ConfigError(f'{start}: {place} is not a JSON object: write one object a line, such as {{"prompt": "…"}}')
    for name, setting in needed.items():
        if name not in row:
            raise ConfigError(
                f"{start}: {place} has no key {name!r} ({setting}); {_keys(row)}: set {setting}, or add it"
            )


def _keys(row: Collection[str]) -> str:
    return f"its keys are {', '.join(sorted(map(repr, row)))}" if row else "it is empty"


def _check_parquet(path: Path, start: str, needed: dict[str, str]) -> int:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{start}: parquet needs the package pyarrow: pip install 'miles-hpc[data]', or use jsonl")
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names, count = file.schema_arrow.names, file.metadata.num_rows
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{start}: is not a parquet file ({error}): write it again") from error
    for name, setting in needed.items():
        if name not in names:
            raise ConfigError(
                f"{start}: has no column {name!r} ({setting}); {_keys(names)}: set {setting}, or add the column"
            )
    return int(count)
