"""The fleet of the inference room's process tests, with session servers in it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[1] / "inference" / "conftest.py"
_NAME = "process_inference_fleet"
_SPEC = importlib.util.spec_from_file_location(_NAME, _PATH)
assert _SPEC is not None and _SPEC.loader is not None
_FLEET = importlib.util.module_from_spec(_SPEC)
sys.modules[_NAME] = _FLEET
_SPEC.loader.exec_module(_FLEET)

make_fleet = _FLEET.make_fleet
until = _FLEET.until
