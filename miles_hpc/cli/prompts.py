"""Whether prompt files can be read, row by row, before anything is started."""

from __future__ import annotations

import difflib
from pathlib import Path

from miles_hpc.config.check import split_slice
from miles_hpc.config.errors import ConfigError
from miles_hpc.rollout.data import DataError, Keys, open_prompts


def check_rows(where: str, key: str, text: str, keys: Keys, settings: dict[str, str] | None = None) -> int:
    """Read every selected row as the run will, and count them.

    Args:
        where: the run file that the message names.
        key: the dotted key that holds `text`, a path with an optional `@[a:b]`.
        settings: names in the reader's messages -> the settings that are meant here.

    Raises:
        ConfigError: one line that names run file, key, prompt file, line and remedy.
    """
    path = Path(split_slice(text)[0])
    start = f"{where}: {key}"
    if not path.exists():
        raise ConfigError(f"{start} = {str(path)!r}: no such file: {_near(path) or f'create it, or correct {key}'}")
    if path.is_dir():
        raise ConfigError(f"{start} = {str(path)!r}: is a directory: name a jsonl or parquet file in it")
    try:
        return len(open_prompts(text, keys))
    except DataError as error:
        said = str(error)
        for name, setting in (settings or {}).items():
            said = said.replace(name, setting)
        raise ConfigError(f"{start}: {said}") from error
    except OSError as error:
        raise ConfigError(
            f"{start} = {str(path)!r}: cannot be read ({error.strerror}): check its permissions"
        ) from error


def check_saved(where: str, directory: Path) -> None:
    """Whether a directory holds saved rollouts.

    Raises:
        ConfigError: it does not.
    """
    if not any(directory.glob("*.parcel")):
        raise ConfigError(
            f"{where}: rollout.load_debug = {str(directory)!r}: holds no saved rollouts (*.parcel): name the "
            "directory rollouts of a run that had rollout.save_debug = true"
        )


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    found = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f"did you mean {found[0]!r} beside it?" if found else ""
