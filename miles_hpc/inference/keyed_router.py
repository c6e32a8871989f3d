"""The real sglang-router with the run's key, which it can only take on its command line, where everyone could read it.

Run as a file, in the router's own runtime: the standard library and sglang_router are all that is there. The arguments
are the router's own; MILES_HPC_ROUTER_KEY names the file that holds the key.
"""

import os
import sys
from pathlib import Path

KEY_FILE = "MILES_HPC_ROUTER_KEY"


def main() -> None:
    """Start the router; returns when it has stopped."""
    # This file's directory comes first on the path of a program run as a file, and holds modules of other names.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    from sglang_router.launch_router import launch_router, parse_router_args

    arguments = parse_router_args(sys.argv[1:])
    arguments.api_key = Path(os.environ[KEY_FILE]).read_text().strip()
    launch_router(arguments)


if __name__ == "__main__":
    main()
