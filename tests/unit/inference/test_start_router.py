"""The router's start, with a package in the real one's place that notes what became of it."""

import runpy
import sys
from pathlib import Path

import pytest

from miles_hpc.inference import service

pytestmark = pytest.mark.unit

PROGRAM = Path(service.__file__).with_name("start_router.py")
LAUNCH = """
import argparse
from sglang_router.mini_lb import MiniLoadBalancer

started = []

def parse_router_args(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--api-key")
    return parser.parse_args(words)

def launch_router(arguments):
    started.append((arguments.port, arguments.api_key, MiniLoadBalancer))
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    package = tmp_path / "site" / "sglang_router"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_router.py").write_text(LAUNCH)
    (package / "mini_lb.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--port", "7"])
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang_router"]:
        monkeypatch.delitem(sys.modules, name)

    def run():
        runpy.run_path(str(PROGRAM), run_name="__main__")
        return sys.modules["sglang_router.launch_router"].started

    yield run
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang_router"]:
        del sys.modules[name]


def test_the_load_balancer_for_debugging_is_not_imported(started, monkeypatch):
    monkeypatch.delenv("MILES_HPC_ROUTER_KEY", raising=False)
    assert started() == [(7, None, None)]


def test_the_key_comes_from_its_file(started, monkeypatch, tmp_path):
    (tmp_path / "key").write_text("k3y\n")
    monkeypatch.setenv("MILES_HPC_ROUTER_KEY", str(tmp_path / "key"))
    assert started() == [(7, "k3y", None)]
