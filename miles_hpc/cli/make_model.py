"""`miles-hpc make-model`."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from miles_hpc.cli.exits import FINISHED, refuse
from miles_hpc.config.schema import MakeModelConfig


def make_model(arguments: argparse.Namespace) -> int:
    """Build a tiny model directory and print its path."""
    from miles_hpc.train.make_model import make_model as build

    given = {
        name: value for name in ("hidden_size", "layers", "heads") if (value := getattr(arguments, name)) is not None
    }
    try:
        out = build(msgspec.convert(given, MakeModelConfig), arguments.seed, Path(arguments.out))
    except msgspec.ValidationError as error:
        return refuse(f"make-model: {error}")
    except (ValueError, OSError) as error:
        return refuse(f"make-model {arguments.out}: {error}")
    print(out)
    return FINISHED
