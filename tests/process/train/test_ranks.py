import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.train.make_model import make_model

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("rank_program.py")
# The kernel tells the others at once; what takes long on a busy machine is the import.
START_S = 120
NOTICE_S = 20


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    make = MakeModelConfig(hidden_size=16, layers=1, heads=2)
    return make_model(make, 0, tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture
def ranks(model_dir, tmp_path):
    """ranks(plan of rank 0, plan of rank 1, ...) -> processes"""
    started = []

    def start(*plans):
        port, world = free_port(), len(plans)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        made = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(rank), str(world), str(port), str(model_dir), str(tmp_path), plan],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank, plan in enumerate(plans)
        ]
        started.extend(made)
        return made

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def said(process):
    out, err = process.communicate(timeout=START_S)
    assert process.returncode == 0, err
    return out.split("\n")[1].split()


def test_two_ranks_stay_equal_bit_by_bit_and_learn_what_one_would(ranks, tmp_path):
    (one,) = ranks("train")
    alone = said(one)
    first, second = (said(process) for process in ranks("train", "train"))
    assert first == second
    assert [float(value) for value in first[1:]] == pytest.approx([float(value) for value in alone[1:]], abs=1e-4)
    apart = torch.load(tmp_path / "weights-0-of-1.pt") - torch.load(tmp_path / "weights-0-of-2.pt")
    # Two steps of Adam move a weight by up to 2e-3; rounding may turn a few that have next to no gradient around.
    assert float(apart.abs().mean()) < 2e-5


def test_a_killed_rank_ends_the_others_wait(ranks):
    waiting, victim = ranks("collective", "idle")
    assert [process.stdout.readline() for process in (waiting, victim)] == ["joined\n"] * 2
    victim.kill()
    _, err = waiting.communicate(timeout=NOTICE_S)
    assert waiting.returncode == 1 and "RankLost: rank 0 of 2 lost another rank" in err
