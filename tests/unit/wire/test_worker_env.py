import dataclasses
from pathlib import Path

import pytest

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.worker_env import WorkerEnv, WorkerEnvError

pytestmark = pytest.mark.unit

ENV = WorkerEnv(
    run_dir=Path("/runs/a b"),
    attempt=2,
    worker="engine-policy-0-00003-00001",
    pool="engine-policy-0",
    cell_index=3,
    worker_index=1,
    generation=Generation(1, 7),
    node="node-00001",
    listen={"http": HostAndPort("127.0.0.2", 20001), "rpc": HostAndPort("::1", 20002)},
    master={"master": HostAndPort("127.0.0.2", 20003)},
    cell_size=2,
)


def test_an_environment_reads_back_as_it_was_written():
    assert WorkerEnv.from_environ(ENV.to_environ()) == ENV
    assert ENV.cell == "engine-policy-0-00003"


def test_the_hub_s_json_form_of_ports_is_read():
    environ = {**ENV.to_environ(), "MILES_HPC_LISTEN": '{"rpc": "127.0.0.2:20001"}', "MILES_HPC_MASTER": "{}"}
    found = WorkerEnv.from_environ(environ)
    assert found.listen == {"rpc": HostAndPort("127.0.0.2", 20001)}
    assert found.master == {}


@pytest.mark.parametrize("name", ["RUN_DIR", "ATTEMPT", "WORKER", "GENERATION", "NODE"])
def test_a_missing_variable_is_named(name):
    environ = ENV.to_environ()
    del environ[f"MILES_HPC_{name}"]
    with pytest.raises(WorkerEnvError, match=f"MILES_HPC_{name} is not set"):
        WorkerEnv.from_environ(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [("ATTEMPT", "x"), ("WORKER", "engine"), ("GENERATION", "1"), ("LISTEN", "[1]"), ("LISTEN", '{"rpc": "h"}')],
)
def test_a_value_that_does_not_parse_is_reported(name, value):
    with pytest.raises(WorkerEnvError):
        WorkerEnv.from_environ({**ENV.to_environ(), f"MILES_HPC_{name}": value})


def test_the_identity_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ENV.attempt = 3
