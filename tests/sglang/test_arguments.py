"""Every rendered command is read back by the real program's own parser, in its own runtime."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import msgspec
import pytest

from miles_hpc.specs.base import LaunchCommandContext
from miles_hpc.specs.engine import engine_specs
from miles_hpc.specs.router import router_specs
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.security import create_secrets, load_http_key

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

HOSTILE = ["/a b/m", "/a'b/\"m", "--port", "-1", "/m\n--host=evil", "/$(id)/`id`", "/ünï/☃", "{not json"]

_READ_SGLANG = """
import argparse, json, runpy, sys
runpy.run_path(sys.argv[1])  # declares what a CPU torch lacks
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
found = []
for argv in json.load(sys.stdin):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if "--config" in argv:
        argv = ConfigArgumentMerger(parser).merge_config_with_args(argv)
    found.append(vars(parser.parse_args(argv)))
print(json.dumps(found, default=str))
"""
_READ_ROUTER = """
import json, sys
from sglang_router.launch_router import parse_router_args
print(json.dumps([vars(parse_router_args(argv)) for argv in json.load(sys.stdin)], default=str))
"""


def read_back(python: Any, program: str, commands: list[list[str]], *more: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    ran = subprocess.run(
        [str(python), "-c", program, *more], input=json.dumps(commands), text=True, capture_output=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def context(run_dir: str, rank: int = 0, **ports: int) -> LaunchCommandContext:
    workers = [
        {name: HostAndPort(f"127.0.0.{2 + i}", port) for name, port in ports.items()} for i in range(max(2, rank + 1))
    ]
    return LaunchCommandContext(
        cell_index=1,
        worker_index=rank,
        local_gpu_ids=(),
        self_addrs=workers[rank],
        cell_addrs=tuple(workers),
        pool_addrs={},
        run_dir=run_dir,
        attempt=0,
    )


def arguments_of(config: Any, ctx: LaunchCommandContext) -> list[str]:
    argv = engine_specs(config)[0].launch_command(ctx)
    return argv[argv.index(config.inference.sglang_program) + 1 :]


def test_sglang_reads_its_command_as_meant_hostile_strings_included(runtimes, tmp_path, real_config):
    create_secrets(tmp_path, 0)
    ctx = context(str(tmp_path), http=4321, nccl=4400, dist=4500)
    config = real_config(
        "seed=7", "inference.sglang.json_model_override_args={a = 1}", "inference.sglang.log-level=error"
    )
    commands = [arguments_of(config, ctx)]
    for text in HOSTILE:
        model = msgspec.structs.replace(config.model, path=text, chat_template=text)
        commands.append(arguments_of(msgspec.structs.replace(config, model=model), ctx))
    spanning = real_config("inference.nodes_per_engine=2")
    commands += [
        arguments_of(spanning, context(str(tmp_path), rank, http=4321, nccl=4400, dist=4500)) for rank in (0, 1)
    ]
    plain, *rest = read_back(
        runtimes / "sglang" / "bin" / "python", _READ_SGLANG, commands, config.inference.sglang_program
    )
    assert (plain["host"], plain["port"], plain["nccl_port"], plain["random_seed"]) == ("127.0.0.2", 4321, 4400, 8)
    assert (plain["served_model_name"], plain["log_level"], plain["device"]) == ("policy", "error", "cpu")
    assert json.loads(plain["json_model_override_args"]) == {"a": 1}
    assert (plain["sleep_on_idle"], plain["max_total_tokens"], plain["enable_metrics"]) == (True, 8192, True)
    assert plain["incremental_streaming_output"] is True
    assert plain["api_key"] == load_http_key(tmp_path, 0)
    for text, found in zip(HOSTILE, rest, strict=False):
        assert (found["model_path"], found["chat_template"], found["host"]) == (text, text, "127.0.0.2")
    for rank, found in enumerate(rest[-2:]):
        assert (found["nnodes"], found["node_rank"], found["dist_init_addr"]) == (2, rank, "127.0.0.2:4500")
        assert (found["tp_size"], found["host"]) == (2, f"127.0.0.{2 + rank}")
    key = load_http_key(tmp_path, 0)
    assert all(key not in word for command in commands for word in command)


def test_the_router_reads_its_command_as_meant(runtimes, tmp_path, real_config):
    create_secrets(tmp_path, 0)
    ctx = context(str(tmp_path), http=1234, prometheus=5678)
    spec = router_specs(real_config())[0]
    argv = spec.launch_command(ctx)
    assert argv[0] == str(runtimes / "router" / "bin" / "python") and argv[1].endswith("start_router.py")
    (found,) = read_back(argv[0], _READ_ROUTER, [argv[2:]])
    assert (found["host"], found["port"], found["health_check_endpoint"]) == ("127.0.0.2", 1234, "/health")
    assert load_http_key(tmp_path, 0) not in " ".join(argv)
