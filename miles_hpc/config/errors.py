"""What is wrong with a run file, in one line."""

from __future__ import annotations


class ConfigError(Exception):
    """A run file or `--set` that cannot be used. The text is one line: where, which key, what is wrong, the remedy."""


class ConflictError(ConfigError):
    """Values that do not fit together.

    `keys` are the dotted names of all keys involved; the text names them too, with their values and the remedy.
    """

    def __init__(self, keys: tuple[str, ...], text: str) -> None:
        super().__init__(text)
        self.keys = keys
