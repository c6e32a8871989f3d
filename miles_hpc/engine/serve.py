"""The embedded CPU engine as a program: `python -m miles_hpc.engine.serve --port P --model-path DIR`."""

from __future__ import annotations

import argparse
import logging
import os

from miles_hpc.engine.api import add_arguments, common_settings, run_program, serve
from miles_hpc.wire.program import setup_logging


async def _main(args: argparse.Namespace) -> None:
    from miles_hpc.engine.embedded.backend import EmbeddedBackend

    backend = EmbeddedBackend(args.model_path, threads=args.threads, **common_settings(args))
    await serve(backend, args)


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM; 2 when the model directory is not usable, 1 when the port is not."""
    parser = argparse.ArgumentParser(prog="python -m miles_hpc.engine.serve", description="Embedded CPU engine.")
    add_arguments(parser)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    args = parser.parse_args(argv)
    # Read by OpenMP when torch is imported.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    setup_logging()
    return run_program(parser, _main(args))


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # All is closed. The interpreter would spend a second more on taking torch's modules apart, while an agent waits.
    os._exit(status)
