"""What an installed SGLang and router can do is looked up in their own code before anything starts."""

import sys

import pytest

from miles_hpc.cli import preflight
from miles_hpc.cli.capabilities import _router_flags, check_capabilities
from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import load, load_with_origins
from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.inference.needs import NEEDED_CALLS
from miles_hpc.train.make_model import make_model

pytestmark = pytest.mark.unit

CALLS = [f'"{call}"' for call in NEEDED_CALLS] + ["weight_versions"]
SETS = ["data.prompts=/p", "model.path=/m", "inference.engine=sglang"]
FLAGS = _router_flags(load([], SETS))


@pytest.fixture
def runtime(tmp_path):
    """An interpreter whose sglang and sglang_router consist of these words."""

    def make(calls=CALLS, flags=FLAGS):
        packages = {"sglang/srt/entrypoints/http_server.py": calls, "sglang_router/router_args.py": flags}
        for name, words in packages.items():
            path = tmp_path / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(words))
            (tmp_path / "site" / name.split("/")[0] / "__init__.py").write_text("raise SystemExit('imported')")
        script = tmp_path / "python"
        script.write_text(
            f"#!{sys.executable}\nimport os, sys\nos.environ['PYTHONPATH'] = {str(tmp_path / 'site')!r}\n"
            f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
        )
        script.chmod(0o755)
        return str(script)

    return make


def check(python, *sets):
    runtimes = [f"runtimes.{kind}.python={python}" for kind in ("engine", "router")]
    check_capabilities(load_with_origins([], [*SETS, *runtimes, *sets]))


def test_what_has_everything_is_taken_without_being_imported(runtime):
    check(runtime())


def test_an_sglang_without_update_sessions_is_refused_in_one_line_with_what_it_lacks(runtime):
    old = [word for word in CALLS if "_weight_update" not in word]
    with pytest.raises(ConfigError, match="is too old: it lacks /begin_weight_update, /end_weight_update; ") as error:
        check(runtime(calls=old))
    assert "\n" not in str(error.value) and "runtimes.engine.python" in str(error.value)


def test_an_sglang_without_versions_of_tokens_is_refused(runtime):
    with pytest.raises(ConfigError, match="lacks weight_versions"):
        check(runtime(calls=CALLS[:-1]))


def test_a_router_of_another_age_is_refused_by_the_flag_that_it_does_not_know(runtime):
    with pytest.raises(ConfigError, match=r"sglang_router .* is too old: it lacks shutdown-grace-period-secs"):
        check(runtime(flags=[flag for flag in FLAGS if flag != "shutdown-grace-period-secs"]))


def test_a_layout_of_its_own_is_left_to_its_owner(runtime):
    check(runtime(calls=[]))


def test_an_sglang_that_nobody_starts_is_not_looked_at(runtime):
    check(runtime(calls=["nothing"]), "inference.external.a.url=http://h:1")


def test_an_interpreter_without_the_package_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot say what its sglang can do"):
        check("/bin/false")


def test_a_key_that_others_may_read_is_refused_before_anything_starts(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o644)
    sets = [*SETS, "inference.external.a.url=http://h:1", f"inference.external.a.key_file={key}"]
    with pytest.raises(ConfigError, match=r"inference\.external\.a\.key_file: .* chmod it to 0600"):
        preflight._check_engine_keys(load_with_origins([], sets))


def test_each_model_is_looked_at_under_its_own_key(tmp_path):
    with pytest.raises(ConfigError, match=r"models\.judge\.path = .*: holds no config\.json"):
        preflight._check_other_models(load_with_origins([], [*SETS, f"models.judge.path={tmp_path}"]))


def test_weights_that_are_cut_off_are_refused_before_an_engine_loads_them(tmp_path):
    model = make_model(MakeModelConfig(hidden_size=16, layers=1, heads=2), 0, tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    sets = [*SETS, f"model.path={model}"]
    with pytest.raises(ConfigError, match=r"model\.path = .*: model\.safetensors has \d+ bytes where its header says"):
        preflight._check_model(load_with_origins([], sets))
    preflight._check_model(load_with_origins([], [*sets, "inference.engine=fake"]))
