"""Starts the real sglang-router: in a tenth of its own start's CPU time, and with the run's key where there is one.

The key can only be given on the router's command line, where everyone could read it. And before anything else the
router (0.3.2) imports a load balancer in Python for debugging, with FastAPI and aiohttp, which only `--mini-lb` uses:
that is nine tenths of the CPU time until it listens, and all requests wait for a router that comes back.

Run as a file, in the router's own runtime: the standard library and sglang_router are all that is there. The arguments
are the router's own; MILES_HPC_ROUTER_KEY names the file that holds the key.
"""

import os
import sys
import types
from pathlib import Path

KEY_FILE = "MILES_HPC_ROUTER_KEY"
_UNUSED = "sglang_router.mini_lb"


def _nothing(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


def main() -> None:
    """Start the router; returns when it has stopped."""
    # This file's directory comes first on the path of a program run as a file, and holds modules of other names.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    unused = types.ModuleType(_UNUSED)
    unused.__getattr__ = _nothing  # type: ignore[method-assign] # whatever is imported from it is None
    sys.modules[_UNUSED] = unused
    from sglang_router.launch_router import launch_router, parse_router_args

    arguments = parse_router_args(sys.argv[1:])
    if KEY_FILE in os.environ:
        arguments.api_key = Path(os.environ[KEY_FILE]).read_text().strip()
    launch_router(arguments)


if __name__ == "__main__":
    main()
