"""Why a program ended, as far as the end of its log tells: its last error, and what usually lies behind such a one."""

from __future__ import annotations

import re
from typing import Final

LINE_LIMIT: Final = 300
_LOOK_BACK: Final = 80
"""Lines from the end in which a cause is looked for."""
_LAST: Final = 12
"""Lines from the end in which the error must stand when the program was killed: it may have lived on after an older.
SGLang's scheduler writes its error and kills the program."""
_ERROR = re.compile(
    r"^(?:\[[^\]]*\]\s*)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Died)(?::.*|\s*$)"
    r"|error: .*|ERROR:\s.*)"
)
_KNOWN: Final = (
    (
        r"CUDA out of memory|OutOfMemoryError|Not enough memory|memory capacity is unbalanced",
        "the GPU's memory does not hold it: lower inference.sglang.mem_fraction_static, or give an engine more GPUs",
    ),
    (r"MemoryError|Cannot allocate memory|Unable to allocate", "the node's memory does not hold it"),
    (
        r"No CUDA GPUs|libcuda\.so|libcudart|driver version is insufficient|not compiled with CUDA|no NVIDIA driver"
        r"|no kernel image|CUDA-capable device|No accelerator",
        "CUDA is missing here, or does not fit the GPU: look at the runtime, and at inference.gpus_per_engine",
    ),
    (
        r"does not recognize this architecture|Cannot find model module|not a registered model"
        r"|are not supported for now|no SGLang implementation|no causal LM",
        "the model's architecture is unknown to this engine: upgrade its runtime",
    ),
    (
        r"Cannot find any model weights|FileNotFoundError|No such file or directory|does not appear to have a file"
        r"|SafetensorError|no weights",
        "a file of the model is missing or broken",
    ),
    (r"size mismatch|shape mismatch|The size of tensor", "the weights do not fit the model's config.json"),
    (
        r"EADDRINUSE|[Aa]ddress already in use|\[Errno 98\]|os error 98|[Pp]ort \d* ?is (?:already )?in use"
        r"|_port at \d+ is not available",
        "another program has one of its ports",
    ),
    (r"ModuleNotFoundError|ImportError|No module named", "a package is missing in its runtime"),
    (r"unrecognized arguments|error: argument", "it does not know one of its arguments: look at inference.sglang"),
)


def last_words(log_tail: str, *, killed: bool) -> str:
    """`; its last error: …; likely cause: …`, or what there is of that; empty when the log tells nothing.

    Args:
        killed: by a signal: then its last line is not why, and an error counts only as one of the last things said.
    """
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    recent = lines[-_LAST:] if killed else lines[-_LOOK_BACK:]
    error = next((match[1] for line in reversed(recent) if (match := _ERROR.match(line))), "")
    if error and not (lines and lines[-1].endswith(error)):
        said = f"; its last error: {error[:LINE_LIMIT]}"
    elif lines and (error or not killed):
        said = f"; its last line: {lines[-1][:LINE_LIMIT]}"
    else:
        return ""
    cause = likely_cause(error or lines[-1])
    return said + (f"; likely cause: {cause}" if cause else "")


def likely_cause(text: str) -> str:
    """What usually lies behind an error; empty for one that is not known."""
    return next((cause for pattern, cause in _KNOWN if re.search(pattern, text)), "")
