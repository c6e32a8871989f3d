"""The end of a log as the reason of a death; the lines are of the real SGLang 0.5.23, shortened."""

import pytest

from miles_hpc.hub.causes import last_words

pytestmark = pytest.mark.unit

TRACE = 'Traceback (most recent call last):\n  File "/s/scheduler.py", line 9, in run\n    raise\n'
SIGQUIT = "\n\n[2026-11-30 23:00:52] Received sigquit from a child process. It usually means the child failed.\n"
LOADS = {
    "ValueError: Cannot find model module. 'NoSuchForCausalLM' is not a registered model in the Transformers": (
        "architecture is unknown"
    ),
    "ValueError: The checkpoint you are trying to load has model type `x` but Transformers does not recognize this "
    "architecture. This could be": "architecture is unknown",
    "RuntimeError: Cannot find any model weights with `/m`": "file of the model is missing",
    "FileNotFoundError: [Errno 2] No such file or directory: '/m/model.safetensors'": "file of the model is missing",
    "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata": "missing or broken",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has": "mem_fraction_static",
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.": "mem_fraction_static",
    "MemoryError": "the node's memory",
    "RuntimeError: No CUDA GPUs are available": "CUDA is missing",
    "AssertionError: Torch not compiled with CUDA enabled": "CUDA is missing",
    "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 3): address already in use": "ports",
    "ValueError: nccl_port at 21003 is not available in 30 seconds. nccl_port is used by a process already.": "ports",
    "ValueError: scheduler_input_port at 21001 is not available in 60 seconds. scheduler_input_port at 21001": "ports",
    "ModuleNotFoundError: No module named 'sglang'": "package is missing",
    "RuntimeError: The size of tensor a (4) must match the size of tensor b (8)": "do not fit the model's config",
}


@pytest.mark.parametrize(("error", "cause"), LOADS.items())
def test_the_error_of_a_scheduler_that_killed_its_engine_is_told_with_the_likely_cause(error, cause):
    said = last_words(f"noise\n{TRACE}{error}{SIGQUIT}", killed=True)
    assert said.startswith(f"; its last error: {error}; likely cause: ") and cause in said and "\n" not in said


def test_an_error_in_the_last_line_and_one_with_advice_behind_it():
    assert last_words(f"{TRACE}ValueError: no", killed=False) == "; its last line: ValueError: no"
    advice = "\n\nYou can update Transformers with the command pip\n"
    assert last_words(f"{TRACE}ValueError: no{advice}", killed=False) == "; its last error: ValueError: no"
    usage = "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --no-such\n"
    assert "look at inference.sglang" in last_words(usage, killed=False)


def test_the_server_that_finds_its_port_taken_says_so_before_it_has_shut_down():
    taken = (
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use"
    )
    farewell = "[2026-11-30 23:00:52] INFO:     Waiting for application shutdown.\n"
    said = last_words(f"[2026-11-30 23:00:52] {taken}\n{farewell}", killed=False)
    assert said == f"; its last error: {taken}; likely cause: another program has one of its ports"


def test_a_program_that_gave_up_without_an_error_is_quoted_and_a_killed_one_is_not():
    assert last_words("starting\nno such luck\n", killed=False) == "; its last line: no such luck"
    assert last_words("starting\nall is well\n", killed=True) == ""
    assert last_words("", killed=False) == last_words("\n", killed=True) == ""


def test_an_error_that_a_killed_program_had_survived_is_not_its_cause():
    log = f"{TRACE}ValueError: one request was wrong\n" + "answered\n" * 12
    assert last_words(log, killed=True) == ""


def test_long_errors_are_cut():
    assert len(last_words("ValueError: " + "x" * 5000 + SIGQUIT, killed=True)) < 400
