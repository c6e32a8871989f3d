"""Versions of a real SGLang and router are looked at before anything starts."""

import sys

import pytest

from miles_hpc.cli import preflight
from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import load_with_origins

pytestmark = pytest.mark.unit


@pytest.fixture
def runtime(tmp_path):
    """A program that answers like an interpreter whose packages have these versions."""

    def make(**versions):
        script = tmp_path / "python"
        script.write_text(
            f"#!{sys.executable}\nimport json, sys\nknown = {versions!r}\n"
            "print(json.dumps({name: known.get(name, '') for name in sys.argv[3:]}))\n"
        )
        script.chmod(0o755)
        return str(script)

    return make


def check(python):
    sets = ["data.prompts=/p", "model.path=/m", "inference.engine=sglang"]
    sets += [f"runtimes.{kind}.python={python}" for kind in ("engine", "router")]
    preflight._check_versions(load_with_origins([], sets))


def test_an_old_sglang_is_refused_in_one_line_with_what_it_lacks(runtime):
    with pytest.raises(
        ConfigError, match=r"sglang 0\.5\.15 .* is too old: 0\.5\.23 or newer has weight updates"
    ) as error:
        check(runtime(sglang="0.5.15", sglang_router="0.3.2"))
    assert "\n" not in str(error.value)


def test_an_old_router_is_refused(runtime):
    with pytest.raises(ConfigError, match=r"sglang_router 0\.2\.9"):
        check(runtime(sglang="0.5.23", sglang_router="0.2.9"))


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.6.0", "1.0", "0.5.24.dev3+g1234", ""])
def test_new_ones_and_those_of_unknown_version_are_taken(runtime, version):
    check(runtime(sglang=version, sglang_router="0.3.2"))
