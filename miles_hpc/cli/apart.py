"""A function in a process of its own: what it imports and leaves in memory ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from miles_hpc.config.errors import ConfigError


class ApartFailed(RuntimeError):
    """The function raised what it must not, or its process died."""


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a forked child and return its result, which must be JSON.

    The command stays small while a run goes on; and it must have no threads yet, as fork(2) demands.

    Raises:
        ConfigError: when the function raised one.
        ApartFailed: when it raised anything else (its traceback is on stderr), or the child died.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    # A handler that raises must not do so where the child is not looked after yet.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        child = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    if child == 0:
        # A group of its own, so that an interrupted parent ends this process together with what it started.
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(read_end)
        code = 1
        try:
            with os.fdopen(write_end, "w") as out:
                json.dump(_outcome(function, arguments), out)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(write_end)
        with os.fdopen(read_end) as answers:
            text = answers.read()
    except BaseException:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
            os.killpg(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if not text:
        raise ApartFailed(f"{function.__name__} ended with {os.waitstatus_to_exitcode(status)} and said nothing")
    outcome = json.loads(text)
    if "refused" in outcome:
        raise ConfigError(outcome["refused"])
    if "failed" in outcome:
        raise ApartFailed(outcome["failed"])
    return outcome["result"]


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return {"result": function(*arguments)}
    except ConfigError as error:
        return {"refused": str(error)}
    except KeyboardInterrupt:
        return {"failed": "interrupted"}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
