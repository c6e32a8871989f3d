"""Calls into the C library."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from miles_hpc.wire import libc

pytestmark = pytest.mark.unit

PR_GET_DUMPABLE = 3


@pytest.fixture(params=["by the extension", "by ctypes"])
def either_way(request, monkeypatch):
    if request.param == "by ctypes":
        monkeypatch.delattr("_ctypes.call_function")


@pytest.mark.usefixtures("either_way")
def test_a_function_gets_its_numbers_and_its_result_comes_back():
    assert libc.call("getpid") == os.getpid()
    assert libc.call("prctl", PR_GET_DUMPABLE, 0, 0, 0, 0) in (0, 1, 2)


@pytest.mark.usefixtures("either_way")
def test_a_failure_carries_its_errno_and_says_what_was_called():
    with pytest.raises(OSError, match=r"prctl\(123456, 0, 0, 0, 0\) failed: Invalid argument") as caught:
        libc.call("prctl", 123456, 0, 0, 0, 0)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.usefixtures("either_way")
def test_a_function_that_is_not_there_is_named():
    with pytest.raises(OSError, match="no no_such_function"):
        libc.call("no_such_function")


def test_a_call_that_succeeds_loads_no_ctypes():
    code = "import sys; from miles_hpc.wire import libc; libc.call('getpid'); print('ctypes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
