from __future__ import annotations

import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.config.load import load
from miles_hpc.config.schema import EngineGroupConfig
from miles_hpc.specs.base import CommandWorkerSpec, LaunchCommandContext, SchedulingSpec
from miles_hpc.specs.compute import compute_specs
from miles_hpc.specs.models import served_models
from miles_hpc.specs.router import router_host
from miles_hpc.specs.sglang import server_arguments
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import PortInfo, Probe

pytestmark = pytest.mark.unit

HOSTILE = ["/m", "/a b/m", "/a'b/\"m", "/-m", "--port", "/m\n--host=evil", "/$(id)/`id`", "/ünï/☃", "-1"]


def config_of(*sets: str):
    return load([], ["data.prompts=/p.jsonl", "model.path=/m", *sets])


def specs_of(*sets: str) -> dict[str, CommandWorkerSpec]:
    return {spec.category: spec for spec in compute_specs(config_of(*sets), "/run")}


def context(host: str = "127.0.0.2", cell_index: int = 0, **ports: int) -> LaunchCommandContext:
    addrs = {name: HostAndPort(host, port) for name, port in ports.items()}
    return LaunchCommandContext(
        cell_index=cell_index,
        worker_index=0,
        local_gpu_ids=(),
        self_addrs=addrs,
        cell_addrs=(addrs,),
        pool_addrs={},
        run_dir="/run",
        attempt=0,
    )


def test_a_run_has_one_pool_of_each_kind():
    specs = compute_specs(config_of("inference.engines=3", "rollout.workers=4", "train.ranks=5"), "/run")
    assert {spec.name: (spec.scheduling.num_cells, spec.scheduling.num_workers_per_cell) for spec in specs} == {
        "router-policy": (1, 1),
        "session-server": (2, 1),
        "engine-policy-0": (3, 1),
        "controller": (1, 1),
        "rollout-worker": (4, 1),
        "executor": (1, 1),
        "trainer": (1, 5),
        "driver": (1, 1),
    }


def test_a_pool_without_cells_is_left_out():
    assert "session-server" not in specs_of("session.servers=0")


def test_every_pool_is_healed_and_the_training_incarnation_as_one():
    found = {name: (spec.state, spec.group) for name, spec in specs_of().items()}
    assert {spec.restart for spec in specs_of().values()} == {"restart"}
    healed, incarnation = ("stateless", ""), ("stateful", "training")
    assert found == {
        "router": healed,
        "session-server": healed,
        "engine": healed,
        "rollout-worker": healed,
        "controller": ("stateful", ""),
        "executor": ("stateful", ""),
        "trainer": incarnation,
        "driver": incarnation,
    }


def test_an_engine_may_be_silent_as_long_as_its_controller_lets_it_and_programs_that_count_are_judged_by_their_count():
    probes = {name: spec.probe for name, spec in specs_of("inference.stall_s=50").items()}
    assert {name: probe.silence for name, probe in probes.items() if probe.silence} == {"engine": 50}
    assert {name for name, probe in probes.items() if probe.stall} == {"session-server", "controller", "executor"}


def test_fixed_ports_are_fixed_and_others_are_dynamic():
    specs = specs_of("inference.router_port=8000", "session.port=9000")
    assert specs["router"].port_infos[0] == PortInfo(name="http", static_port=8000, allow_dynamic=False)
    assert specs["session-server"].port_infos == (
        PortInfo(name="http", static_port=9000, allow_dynamic=False, offset_by_cell=True),
    )
    assert all(port.allow_dynamic for spec in specs_of().values() for port in spec.port_infos)


def test_probes_use_ports_that_exist_and_the_engines_own_deadline():
    specs = specs_of("inference.start_deadline_s=77")
    assert (specs["engine"].probe.kind, specs["engine"].probe.start_deadline) == ("http", 77)
    assert specs["router"].probe.path == "/liveness"
    assert {name for name, spec in specs.items() if spec.probe.kind == "tcp"} == {"controller", "executor", "trainer"}
    assert {name for name, spec in specs.items() if spec.probe.kind == "none"} == {"rollout-worker", "driver"}


@pytest.mark.parametrize("host", ["127.0.0.2", "10.0.0.7", "::1", "fd00::2"])
@pytest.mark.parametrize("policy", ["random", "round_robin", "cache_aware", "power_of_two", "manual"])
def test_the_routers_own_parser_reads_its_command_as_meant(host, policy):
    parse = pytest.importorskip("sglang_router.launch_router").parse_router_args
    spec = specs_of(f"inference.router_policy={policy}")["router"]
    argv = spec.launch_command(context(host, http=1234, prometheus=5678))
    assert argv[0] == sys.executable and argv[1].endswith("inference/start_router.py")
    args = parse(argv[2:])
    assert args.host == (f"[{host}]" if ":" in host else host)
    assert (args.port, args.policy, args.worker_urls) == (1234, policy, [])
    assert (args.prometheus_host, args.prometheus_port) == (host, 5678)
    assert (args.health_check_interval_secs, args.health_failure_threshold) == (1, 2)
    assert (args.health_check_endpoint, args.disable_circuit_breaker) == ("/health", True)
    assert args.shutdown_grace_period_secs == 1
    assert args.request_timeout_secs >= 1800


def test_the_router_gets_ip_literals_only():
    assert router_host("127.0.0.2") == "127.0.0.2"
    with pytest.raises(ValueError, match="IP literals only"):
        router_host("node-7.cluster")


def test_the_routers_client_sees_no_proxy():
    env = specs_of()["router"].env(context(http=1, prometheus=2))
    assert {name: env[name] for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY")} == {
        "http_proxy": "",
        "HTTPS_PROXY": "",
        "ALL_PROXY": "",
    }


@pytest.mark.parametrize("path", HOSTILE)
@pytest.mark.parametrize("engine", ["fake", "embedded"])
def test_an_engines_own_parser_reads_hostile_paths_as_they_are(engine, path):
    import argparse

    from miles_hpc.engine.api import add_arguments

    config = config_of(f"inference.engine={engine}", "inference.fake_token_ms=2.5", "inference.threads=3")
    model = msgspec.structs.replace(config.model, path=path, chat_template=path)
    config = msgspec.structs.replace(config, model=model)
    spec = {spec.category: spec for spec in compute_specs(config, "/run")}["engine"]
    argv = spec.launch_command(context(http=4321))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--token-ms", type=float)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv[3:])
    assert (args.model_path, args.chat_template, args.host, args.port) == (path, path, "127.0.0.2", 4321)
    assert (args.token_ms, args.threads) == ((2.5, None) if engine == "fake" else (None, 3))
    assert argv[2] == {"fake": "miles_hpc.engine.fake", "embedded": "miles_hpc.engine.serve"}[engine]
    assert args.incremental_streaming_output is True


def test_the_real_sglang_gets_server_arguments_by_field_name():
    spec = specs_of(
        "inference.engine=sglang",
        "inference.gpus_per_engine=2",
        "inference.sglang.mem_fraction_static=0.8",
        "inference.sglang.enable_metrics=true",
        "inference.sglang.log_level=info",
    )["engine"]
    argv = spec.launch_command(context(cell_index=1, http=4321, nccl=4400))
    assert argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    for word in ("--model-path=/m", "--tensor-parallel-size=2", "--mem-fraction-static=0.8", "--enable-metrics"):
        assert word in argv
    assert "--log-level=info" in argv and "--log-level=warning" not in argv
    assert "--nccl-port=4400" in argv and "--random-seed=1" in argv
    assert spec.scheduling == SchedulingSpec(num_cells=2, num_gpus_per_worker=2, num_cpus_per_worker=1.0)
    assert spec.meta(1) == {"model": "policy", "engine": "sglang", "gpu_offset": 2, "gpus": 2, "ranks": 2}
    env = spec.env(context())
    assert (env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"], env["NCCL_CUMEM_ENABLE"]) == ("0", "0")


@pytest.mark.parametrize(("tokens", "interval"), [(256, 8), (4096, 32), (8192, 64), (65536, 64)])
def test_long_answers_are_streamed_in_larger_pieces(tokens, interval):
    spec = specs_of("inference.engine=sglang", f"rollout.max_response_tokens={tokens}")["engine"]
    assert f"--stream-interval={interval}" in spec.launch_command(context(http=1, nccl=2))


@pytest.mark.parametrize(
    ("own", "incremental"), [((), True), (("inference.sglang.incremental-streaming-output=false",), False)]
)
def test_streams_are_incremental_unless_the_run_file_says_otherwise(own, incremental):
    argv = specs_of("inference.engine=sglang", *own)["engine"].launch_command(context(http=1, nccl=2))
    assert ("--incremental-streaming-output" in argv) is incremental


@pytest.mark.parametrize(("own", "tensor", "ranks"), [((), 2, 4), (("inference.sglang.tp=1",), 1, 2)])
def test_the_stages_of_an_engine_share_its_gpus(own, tensor, ranks):
    spec = specs_of("inference.engine=sglang", "inference.gpus_per_engine=4", "inference.sglang.pp-size=2", *own)[
        "engine"
    ]
    argv = spec.launch_command(context(http=1, nccl=2))
    assert "--pipeline-parallel-size=2" in argv
    assert [word for word in argv if word.startswith("--tensor-parallel-size")] == [f"--tensor-parallel-size={tensor}"]
    assert spec.meta(0)["ranks"] == ranks and spec.scheduling.num_gpus_per_worker == 4


def test_a_group_s_own_spelling_wins_over_that_of_all_groups():
    spec = specs_of(
        *("inference.engine=sglang", "inference.gpus_per_engine=4", "inference.sglang.tensor_parallel_size=4"),
        "inference.groups=[{sglang={tp_size=2}}]",
    )["engine"]
    argv = spec.launch_command(context(http=1, nccl=2))
    assert [word for word in argv if word.startswith("--tensor-parallel-size")] == ["--tensor-parallel-size=2"]
    assert spec.meta(0)["ranks"] == 2


def test_keys_lie_in_a_file_and_never_in_argv_or_environment():
    specs = specs_of("inference.engine=sglang")
    argv = specs["engine"].launch_command(context(http=1, nccl=2))
    assert argv[argv.index("--config") + 1] == "/run/secrets/attempt-0/sglang.yaml"
    router = specs["router"]
    argv = router.launch_command(context(http=1, prometheus=2))
    assert argv[1].endswith("inference/start_router.py") and "--api-key" not in " ".join(argv)
    assert router.env(context(http=1, prometheus=2))["MILES_HPC_ROUTER_KEY"] == "/run/secrets/attempt-0/http.key"
    open_specs = specs_of("inference.engine=sglang", "inference.keyed=false")
    assert "--config" not in open_specs["engine"].launch_command(context(http=1, nccl=2))
    assert "MILES_HPC_ROUTER_KEY" not in open_specs["router"].env(context(http=1, prometheus=2))


def test_weights_swapped_in_place_turn_the_prefix_cache_off():
    argv = specs_of("inference.engine=sglang", "inference.pause_mode=in_place")["engine"].launch_command(
        context(http=1, nccl=2)
    )
    assert "--disable-radix-cache" in argv
    argv = specs_of("inference.engine=sglang")["engine"].launch_command(context(http=1, nccl=2))
    assert "--disable-radix-cache" not in argv


def test_groups_are_pools_of_their_own_with_their_own_arguments_and_gpu_offsets():
    config = config_of("inference.engine=sglang", "inference.gpus_per_engine=2", "inference.sglang.dtype=float16")
    groups = [
        EngineGroupConfig(engines=2),
        EngineGroupConfig(engines=1, gpus_per_engine=4, nodes_per_engine=2, sglang={"dtype": "bfloat16"}),
    ]
    inference = msgspec.structs.replace(config.inference, groups=groups)
    config = msgspec.structs.replace(config, inference=inference)
    first, second = (spec for spec in compute_specs(config, "/run") if spec.category == "engine")
    assert (first.name, second.name) == ("engine-policy-0", "engine-policy-1")
    assert [first.meta(i)["gpu_offset"] for i in range(2)] == [0, 2]
    assert second.meta(0) == {"model": "policy", "engine": "sglang", "gpu_offset": 4, "gpus": 8, "ranks": 8}
    assert (second.scheduling.num_workers_per_cell, second.scheduling.num_gpus_per_worker) == (2, 4)
    assert "--dtype=float16" in first.launch_command(context(http=1, nccl=2))
    addrs = [{"http": HostAndPort(f"10.0.0.{i}", 1), "dist": HostAndPort("10.0.0.0", 9)} for i in range(2)]
    for rank in range(2):
        ctx = LaunchCommandContext(
            cell_index=0,
            worker_index=rank,
            local_gpu_ids=(),
            self_addrs=addrs[rank],
            cell_addrs=tuple(addrs),
            pool_addrs={},
            run_dir="/run",
            attempt=0,
        )
        argv = second.launch_command(ctx)
        assert {"--nnodes=2", f"--node-rank={rank}", "--dist-init-addr=10.0.0.0:9", "--dtype=bfloat16"} <= set(argv)
        assert {"--tensor-parallel-size=8", "--random-seed=2"} <= set(argv)


def test_each_model_has_a_router_and_pools_of_its_own_and_gpus_behind_those_of_the_others():
    config = config_of(
        *("inference.engine=sglang", "inference.gpus_per_engine=2", "inference.sglang.dtype=float16"),
        *("models.judge.path=/j", "models.judge.engines=3", "models.judge.gpus_per_engine=1"),
        "models.judge.sglang.dtype=bfloat16",
    )
    specs = {spec.name: spec for spec in compute_specs(config, "/run")}
    assert [name for name in specs if name.startswith(("router-", "engine-"))] == [
        *("router-policy", "router-judge", "engine-policy-0", "engine-judge-0")
    ]
    judge = specs["engine-judge-0"]
    assert judge.scheduling.num_cells == 3
    assert [judge.meta(i)["gpu_offset"] for i in range(3)] == [4, 5, 6] and judge.meta(0)["model"] == "judge"
    argv = judge.launch_command(context(http=1, nccl=2))
    assert {"--model-path=/j", "--served-model-name=judge", "--dtype=bfloat16"} <= set(argv)
    assert "--dtype=float16" in specs["engine-policy-0"].launch_command(context(http=1, nccl=2))
    assert [specs[f"router-{name}"].meta(0) for name in ("policy", "judge")] == [
        {"model": "policy"},
        {"model": "judge"},
    ]


def test_external_engines_take_the_place_of_engines_of_the_run():
    sets = ["inference.external.a.url=http://h:1", "models.j.path=/j", "models.j.external.b.url=http://h:2"]
    names = [spec.name for spec in compute_specs(config_of(*sets), "/run")]
    assert [name for name in names if name.startswith(("router-", "engine-"))] == ["router-policy", "router-j"]
    policy, judge = served_models(config_of(*sets))
    assert (policy.engines, judge.engines, policy.updated, judge.updated) == (1, 1, True, False)


def test_only_the_real_sglang_is_told_before_its_stop():
    paths = {
        engine: [call.path for call in specs_of(f"inference.engine={engine}")["engine"].farewell]
        for engine in ("fake", "embedded", "sglang")
    }
    assert paths == {"fake": [], "embedded": [], "sglang": ["/abort_request", "/continue_generation"]}


def test_only_the_real_sglang_has_processes_that_an_engine_cannot_live_without():
    parts = {
        engine: specs_of(f"inference.engine={engine}")["engine"].essential_processes
        for engine in ("fake", "embedded", "sglang")
    }
    assert parts["fake"] == parts["embedded"] == ()
    assert {"sglang::scheduler", "sglang::detokenizer"} < set(parts["sglang"])


def test_a_run_that_only_generates_has_no_trainer():
    assert "trainer" not in specs_of("mode=rollout") and "driver" in specs_of("mode=rollout")


def test_another_program_can_stand_in_for_sglangs_launcher():
    spec = specs_of("inference.engine=sglang", "inference.sglang_program=/opt/serve_cpu.py")["engine"]
    argv = spec.launch_command(context(http=1, nccl=2))
    assert argv[1] == "/opt/serve_cpu.py" and "--device=cpu" in argv


@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), st.text(), max_size=4))
def test_server_arguments_keep_every_text_in_its_own_word(given_arguments):
    words = server_arguments(given_arguments)
    assert dict(word[2:].split("=", 1) for word in words) == {
        name.replace("_", "-"): value for name, value in given_arguments.items()
    }


def test_flags_lists_and_tables_of_server_arguments():
    assert server_arguments({"a_b": True, "c": False, "d": None, "e": [1, 2], "f": {"x": 1}}) == [
        "--a-b",
        "--e",
        "1",
        "2",
        '--f={"x": 1}',
    ]


def test_a_runtime_gives_interpreter_and_environment_to_its_kind_only():
    specs = specs_of(
        "runtimes.router.python=/r/bin/python",
        "runtimes.trainer.env.NCCL_DEBUG=INFO",
        "runtimes.trainer.env.OMP_NUM_THREADS=7",
        "runtimes.default.env.ALL=1",
    )
    assert specs["router"].launch_command(context(http=1, prometheus=2))[0] == "/r/bin/python"
    assert specs["trainer"].launch_command(context())[0] == sys.executable
    trainer = specs["trainer"].env(context())
    assert (trainer["NCCL_DEBUG"], trainer["OMP_NUM_THREADS"]) == ("INFO", "7")
    assert "ALL" not in trainer and specs["driver"].env(context())["ALL"] == "1"


def test_the_bare_name_of_an_interpreter_is_looked_up_in_path(tmp_path, monkeypatch):
    for name in ("first/python9", "second/python9"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "second/python9").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/none:{tmp_path}/first:{tmp_path}/second:/bin")
    specs = specs_of("runtimes.trainer.python=python9", "runtimes.driver.python=python0")
    assert specs["trainer"].launch_command(context())[0] == f"{tmp_path}/second/python9"
    assert specs["driver"].launch_command(context())[0] == "python0"


def test_engine_and_trainer_threads_reach_their_libraries():
    specs = specs_of("inference.threads=4", "train.threads=3")
    assert specs["engine"].env(context())["OMP_NUM_THREADS"] == "4"
    assert specs["trainer"].env(context())["OPENBLAS_NUM_THREADS"] == "3"
    assert specs["executor"].env(context())["OPENBLAS_NUM_THREADS"] == "1"


def test_own_code_is_on_the_path_of_our_programs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/before")
    specs = specs_of("python_path=['/mine']")
    assert specs["rollout-worker"].env(context())["PYTHONPATH"] == "/mine:/before"
    assert "PYTHONPATH" not in specs["router"].env(context())


def test_a_spec_with_a_port_twice_or_a_probe_without_port_is_refused():
    with pytest.raises(ValueError, match="twice"):
        CommandWorkerSpec(
            name="x",
            category="driver",
            launch_command=lambda ctx: [],
            port_infos=(PortInfo(name="a"), PortInfo(name="a")),
        )
    with pytest.raises(ValueError, match="does not declare"):
        CommandWorkerSpec(
            name="x", category="driver", launch_command=lambda ctx: [], probe=Probe(kind="tcp", port="rpc")
        )
