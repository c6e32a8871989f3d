"""Bad input of `miles_hpc.submit` and `miles-hpc submit` that no run file shows."""

from __future__ import annotations

import pytest

import miles_hpc
from miles_hpc.cli import submit as submitting
from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import load, load_with_origins
from miles_hpc.launch import submission

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _slurm_is_there(tmp_path, monkeypatch):
    """Its commands fail, and nothing here comes to them."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "srun", "squeue", "scontrol"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    # Wherever the tests lie.
    monkeypatch.setattr(submission, "_PRIVATE_FILE_SYSTEMS", ())


def test_sets_beside_a_config_are_refused_instead_of_ignored(tmp_path):
    with pytest.raises(ConfigError, match="sets are for run files"):
        miles_hpc.submit(load(["smoke"]), run_dir=tmp_path / "run", sets=["steps=3"])


def test_a_config_and_keywords_that_do_not_fit_together_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cluster\.spare_nodes = 3 leaves no node to work"):
        miles_hpc.submit(load(["smoke"], ["cluster.spare_nodes=3", "slurm.nodes=4"]), run_dir=tmp_path / "run", nodes=2)
    assert not (tmp_path / "run").exists()


def test_a_broken_claim_in_the_directory_to_resume_is_bad_input(tmp_path):
    (tmp_path / "run" / "attempts").mkdir(parents=True)
    (tmp_path / "run" / "attempts" / "0.json").write_text("no claim")
    with pytest.raises(ConfigError, match=r"0\.json is no claim of an attempt"):
        submitting._submit(load_with_origins(["smoke"]), tmp_path / "run", resume=True)
