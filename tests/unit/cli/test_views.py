from __future__ import annotations

import io
import os

import pytest

from miles_hpc.cli.apart import apart
from miles_hpc.cli.dry_run import NotPlaceable, plan, show
from miles_hpc.cli.live import LinesView, TableView, make_view, step_line, topology
from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import load

pytestmark = pytest.mark.unit

ROW = {
    "step": 3,
    "reward": 0.4123,
    "tokens_per_s": 1234.6,
    "weight_version": 4,
    "healed": 1,
    "heldout": None,
    "seconds": {"rollout": 1.0, "train": 1.26},
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_one_plain_line():
    assert step_line(ROW, 20) == "step 3/20  reward 0.412  tokens/s 1235  weights 4  healed 1  2.3 s"
    assert step_line({}, 20) == "step ?/20"


def test_in_a_pipe_lines_are_plain_and_progress_is_said_once():
    out = io.StringIO()
    view = make_view(out)
    assert isinstance(view, LinesView)
    for text in ("waiting", "waiting", "ready"):
        view.progress(text)
    view.step(ROW, 20)
    view.close()
    assert out.getvalue() == f"waiting\nready\n{step_line(ROW, 20)}\n"


def test_on_a_terminal_steps_are_a_table(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    view = make_view(out)
    assert isinstance(view, TableView)
    view.say("[not markup]")
    view.progress("ready")
    for step in range(1, 30):
        view.step({**ROW, "step": step}, 30)
    view.close()
    text = out.getvalue()
    assert "[not markup]" in text and "tokens/s" in text and "29/30" in text


def test_the_topology_shows_each_node_with_its_cells():
    cells = [
        {"cell": "router-policy-00000", "node": "node-00000", "workers": [{}]},
        {"cell": "trainer-00000", "node": "node-00001", "workers": [{}, {}]},
    ]
    nodes = [{"node": f"node-0000{index}", "address": f"127.0.0.{index + 2}"} for index in range(3)]
    assert topology(cells, nodes) == [
        "  node-00000  127.0.0.2  router-policy-00000",
        "  node-00001  127.0.0.3  trainer-00000 (2 ranks)",
        "  node-00002  127.0.0.4  (nothing)",
    ]


def config_of(*sets: str):
    return load([], ["data.prompts=/p.jsonl", "model.path=/m", "cluster.local_nodes=2", *sets])


def test_a_plan_has_every_worker_with_its_command(tmp_path):
    planned = plan(config_of(), tmp_path / "run")
    assert len(planned) == 12
    assert {row.node for row in planned} == {"node-00000", "node-00001"}
    router = next(row for row in planned if row.worker.startswith("router"))
    assert "--port {router-policy-00000-00000:http}" in router.command and f"--host {router.address}" in router.command
    assert not list(tmp_path.iterdir())


def test_fixed_ports_are_shown_as_numbers(tmp_path):
    planned = plan(config_of("inference.router_port=8123"), tmp_path / "run")
    assert any("--port 8123" in row.command for row in planned)


def test_a_cell_that_fits_nowhere_is_said_with_the_numbers(tmp_path):
    config = config_of("inference.engine=sglang", "inference.gpus_per_engine=4")
    with pytest.raises(NotPlaceable, match="needs 4 GPUs"):
        plan(config, tmp_path / "run")


def test_a_dry_run_shows_config_placement_and_commands(tmp_path):
    text = "\n".join(show(config_of(), tmp_path / "run"))
    assert "[rollout]" in text and "node-00001  127.0.0.3" in text and "miles_hpc.train.run_driver" in text


def test_apart_runs_in_another_process_and_brings_the_result_back():
    assert apart(lambda a, b: [a, b, os.getpid()], 1, "x")[:2] == [1, "x"]
    assert apart(os.getpid) != os.getpid()


def test_apart_raises_what_was_refused_or_failed(capfd):
    def refuse():
        raise ConfigError("no such thing")

    def break_down():
        raise ValueError("out of order")

    with pytest.raises(ConfigError, match="no such thing"):
        apart(refuse)
    with pytest.raises(RuntimeError, match="ValueError: out of order"):
        apart(break_down)
    assert "Traceback" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="said nothing"):
        apart(os._exit, 3)
