"""The environment that a worker was started with, in a file beside its log: for people who ask why it did what it did.

Only for the user (mode 0600), and without secrets all the same: such files are sent around.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

MASK = "***"
_SECRET_ENDINGS = (
    "KEY", "KEYS", "TOKEN", "SECRET", "SECRETS", "PASS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS", "BEARER",
    "HEADERS",
)  # fmt: skip
_SECRET_WORDS = {"AUTH", "AUTHORIZATION", "COOKIE", "CREDENTIAL", "JWT", "PAT", "PWD"}
_DIRECTORIES = {"PWD", "OLDPWD"}
_LOGIN = re.compile(r"(?<=://)\S+(?=@)")
"""`user:password` in an address, up to the last @: a password may hold one, and a slash."""
_SECRET_VALUE = re.compile(
    r"\b(bearer|basic)\s+\S|PRIVATE KEY-"
    r"|(api.?key|(account|access).?key|authorization|tokens?|password|passwd|\bpwd|passphrase|secrets?)[\\\"']*\s*"
    r"(=|:(?!/))",  # a list of directories is none
    re.IGNORECASE,
)
"""What a value holds that names a secret itself: headers, connection strings, JSON, exported shell functions."""


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with a mask for each value that its name or its text calls a secret, and for logins in addresses."""
    return {
        name: MASK if value and (_is_secret(name, value) or _SECRET_VALUE.search(value)) else _LOGIN.sub(MASK, value)
        for name, value in env.items()
    }


def _is_secret(name: str, value: str) -> bool:
    if name in _DIRECTORIES:
        return False
    # A number of TOKENS is a limit of a language model.
    endings = _SECRET_ENDINGS if value.isdecimal() else (*_SECRET_ENDINGS, "TOKENS")
    words = re.split(r"[^A-Z]+", name.upper())
    return any(word in _SECRET_WORDS or word.endswith(endings) for word in words if word)


class EnvironFiles:
    """Writes them from a thread: a file system that stalls delays no start, and one that fails costs the file only."""

    def __init__(self) -> None:
        self._files: queue.SimpleQueue[tuple[Path, Mapping[str, str]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, path: Path, env: Mapping[str, str]) -> None:
        """Have a worker's environment written; a file that is there is replaced."""
        if self._thread is None:
            # A daemon: one that hangs in the file system must not keep the agent from leaving.
            self._thread = threading.Thread(target=self._run, name="environs", daemon=True)
            self._thread.start()
        self._files.put((path, env))

    def close(self, patience_s: float = 1.0) -> None:
        """Write what waits, for `patience_s` at most."""
        self._files.put(None)
        if self._thread is not None:
            self._thread.join(patience_s)

    def _run(self) -> None:
        while (item := self._files.get()) is not None:
            with contextlib.suppress(OSError):
                _write(*item)


def _write(path: Path, env: Mapping[str, str]) -> None:
    # The operating system's bytes need not be text.
    shown = {name: os.fsencode(value).decode(errors="replace") for name, value in without_secrets(env).items()}
    content = msgspec.json.format(msgspec.json.encode(shown, order="sorted"), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a mode is given to a new file only
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content + b"\n")
