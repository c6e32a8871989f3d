"""External engines, several models, orders for cells, and the end of a controller."""

import asyncio

import pytest
from aiohttp import TraceRequestStartParams
from multidict import CIMultiDict
from yarl import URL

from miles_hpc.config.load import load
from miles_hpc.inference import keeper
from miles_hpc.inference import service as service_module
from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.engine_api import EngineApi
from miles_hpc.inference.http_session import HttpKeys, http_keys, open_http
from miles_hpc.inference.needs import NEEDED_CALLS
from miles_hpc.inference.run_controller import Holds, by_model
from miles_hpc.inference.service import ControllerService
from miles_hpc.inference.windows import ControllerError, Disposed, EngineInfo
from miles_hpc.wire import security
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellRow
from miles_hpc.wire.rpc import RpcRemoteError
from miles_hpc.wire.sockets import HubError

from .fleet import run, two_engines, until

pytestmark = pytest.mark.unit


class Orders:
    """What a hub would carry out, and which cells it has."""

    def __init__(self):
        self.done = []
        self.states = {}

    def cells(self):
        return [
            CellRow(
                cell=cell, pool=cell[:-6], node="", generation=Generation(1, 1), state=state, workers=[], restarts=0
            )
            for cell, state in self.states.items()
        ]

    def stop_cell(self, cell, generation, reason=""):
        self.done.append(("stop", cell, str(generation), reason))

    def start_cell(self, cell):
        if cell.endswith("9"):
            raise HubError("no such cell")
        self.done.append(("start", cell))


def external(engine, name="mine", ranks=1):
    return EngineInfo(cell=f"external-{name}", generation=Generation(0, 1), url=engine.url, ranks=ranks)


def with_external(scenario, **settings):
    """A fleet of one router and one external engine."""

    async def body(p, fleet):
        engine = await p.engine()
        told = []
        fleet.service = ControllerService(
            p.http,
            lambda *told: pytest.fail(f"the hub was asked to replace {told}"),
            engines_wanted=1,
            start_deadline_s=20.0,
            window_timeout_s=20.0,
            reconcile_s=0.1,
            external=[external(engine)],
            give_up=told.append,
            **settings,
        )
        running = asyncio.ensure_future(fleet.service.run(tick_s=0.05))
        try:
            router = await p.router()
            fleet.put("router-policy", 0, router.url)
            await scenario(p, fleet, router, engine, told)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return body


def test_an_external_engine_is_registered_updated_and_taken_out_when_it_is_lost_but_never_replaced(parts, monkeypatch):
    monkeypatch.setattr(keeper, "READMIT_S", 0.1)

    async def scenario(p, fleet, router, engine, told):
        await fleet.publish(1, p.http)
        await fleet.serving(1)
        assert router.listed() == {engine.url} and router.worker_keys[engine.url] == "its-own-key"
        engine.moves = False  # its scheduler hangs behind a living server
        await until(lambda: router.listed() == set(), 10)
        engine.healthy, engine.moves, engine.label = False, True, "default"
        await asyncio.sleep(0.3)  # long enough for a registration that must not come
        assert router.listed() == set()
        engine.healthy = True
        await fleet.serving(1)
        assert (engine.label, router.listed()) == ("1", {engine.url})
        await fleet.publish(2, p.http)
        assert (await fleet.serving(1))["engines"][0]["weight_version"] == 2 and told == []

    run(parts, with_external(scenario, stall_s=1.0, worker_key=lambda url: "its-own-key"))


def test_an_external_engine_that_was_started_again_takes_the_weights_before_it_gets_traffic_again(parts, monkeypatch):
    monkeypatch.setattr(keeper, "READMIT_S", 0.1)

    async def scenario(p, fleet, router, engine, told):
        await fleet.publish(3, p.http)
        await fleet.serving(1)
        engine.label, router.calls = "default", []  # as quickly as that: no connection failed meanwhile
        await until(lambda: engine.label == "3")
        await fleet.serving(1)
        assert router.calls == [f"remove {engine.url}", f"add {engine.url}"] and told == []

    run(parts, with_external(scenario, stall_s=1.0))


def test_a_window_does_not_wait_for_an_external_engine_that_was_lost(parts, monkeypatch):
    monkeypatch.setattr(keeper, "READMIT_S", 0.05)

    async def scenario(p, fleet, router, engine, told):
        await fleet.publish(1, p.http)
        own = await p.engine()
        fleet.put("engine-policy-0", 0, own.url)
        fleet.service._engines_wanted = 2
        engine.healthy = engine.moves = False
        await until(lambda: router.listed() == {own.url}, 10)
        assert [one.url for one in (await fleet.start(5)).engines] == [own.url]

    run(parts, with_external(scenario, stall_s=1.0))


def test_an_external_engine_in_an_open_window_generates_again_when_the_controller_ends(parts):
    async def scenario(p, fleet, router, engine, told):
        await fleet.start()
        engine.paused = "retract"
        await fleet.service.dispose()
        assert engine.paused is None and router.listed() == set()

    run(parts, with_external(scenario))


def test_an_external_engine_of_an_aborted_window_waits_for_the_next_one_where_no_path_has_the_weights(
    parts, monkeypatch
):
    monkeypatch.setattr(keeper, "READMIT_S", 0.05)
    monkeypatch.setattr(keeper, "_OTHERS_S", 0.05)

    async def broadcast(fleet, engine, version):
        window = await fleet.start()
        engine.label, params = str(version), {"window_id": window.window_id, "version": version, "path": ""}
        await fleet.service.end_update_weights({**params, "failed": {}}, [])
        await fleet.serving(1)

    async def scenario(p, fleet, router, engine, told):
        await broadcast(fleet, engine, 1)
        window = await fleet.start()
        engine.paused = "retract"
        await fleet.service.abort_update_weights({"window_id": window.window_id, "reason": "it broke"}, [])
        await until(lambda: engine.paused is None and not fleet.service.state.window_obstacle(1))
        engine.calls.clear()
        await until(lambda: engine.calls.count("/model_info") >= 3)  # looked at for changes by others
        assert fleet.service._external["external-mine"].generation.n == 1
        await until(lambda: router.listed() == set())
        fleet.service._readmit("external-mine")  # as after a connection that failed
        await until(lambda: not fleet.service.state.window_obstacle(1))
        assert fleet.service.state.wanted_urls() == set()
        await broadcast(fleet, engine, 2)
        assert router.listed() == {engine.url} and told == []

    run(parts, with_external(scenario, stall_s=6.0))


def test_an_engine_or_a_router_that_is_too_old_ends_it_all_in_one_line(parts):
    async def old_engine(p, fleet):
        engine, told = await p.engine(), []
        engine.openapi = [call for call in NEEDED_CALLS if "weight_update" not in call]
        fleet.service._give_up = told.append
        fleet.put("engine-policy-0", 0, engine.url)
        await until(lambda: told)
        assert "/begin_weight_update, /end_weight_update: install SGLang" in str(told[0]) and "\n" not in str(told[0])
        assert fleet.replaced == []

    async def old_router(p, fleet):
        router, told = await p.router(), []
        router.too_old = True
        fleet.service._give_up = told.append
        fleet.put("router-policy", 0, router.url)
        await until(lambda: told)
        assert "/workers: no such call: install sglang-router 0.3.2 or newer" in str(told[0])

    run(parts, old_engine)
    run(parts, old_router)


def test_engines_of_a_model_that_is_not_updated_serve_what_they_were_started_with(parts):
    async def scenario(p, fleet):
        router, engines = await two_engines(p, fleet)
        await fleet.serving(2)
        assert {engine.label for engine in engines} == {"default"} and router.listed() == {e.url for e in engines}
        with pytest.raises(ControllerError, match="no window opens"):
            await fleet.start()

    run(parts, scenario, updated=False)


def test_each_model_has_its_own_engines_and_routers_and_a_call_names_the_model(parts):
    async def scenario(p, fleet):
        engine, other = await p.engine(), await p.engine()
        fleet.put("engine-policy-0", 0, engine.url)
        fleet.put("engine-judge-0", 0, other.url, model="judge")
        fleet.put("router-judge", 0, (await p.router()).url, model="judge")
        judge = ControllerService(
            p.http, lambda *told: None, engines_wanted=1, start_deadline_s=9, window_timeout_s=9, model="judge"
        )
        judge.on_pools(fleet.pools)
        assert list(judge.state.engines) == ["engine-judge-0-00000"] and list(judge.state.routers) == [
            "router-judge-00000"
        ]
        methods = by_model({"policy": fleet.service.methods(), "judge": judge.methods()}, "policy")
        assert len((await methods["status"]({"model": "judge"}, []))["engines"]) == 1
        assert "engine-policy-0-00000" in [row["cell"] for row in (await methods["status"]({}, []))["engines"]]
        with pytest.raises(ControllerError, match="no model 'jury' in this run: it has policy, judge"):
            await methods["status"]({"model": "jury"}, [])

    run(parts, scenario)


def test_the_holds_of_two_models_are_one_for_the_hub():
    told = []
    holds = Holds(lambda cells, seconds: told.append((sorted(cells), seconds)))
    policy, judge = holds.of("policy"), holds.of("judge")
    policy({"a": Generation(1, 1)}, 20.0)
    judge({"b": Generation(1, 1)}, 20.0)
    policy({}, 0.0)
    judge({}, 0.0)
    assert told == [(["a"], 20.0), (["a", "b"], 20.0), (["b"], 20.0), ([], 0.0)]


def test_a_stop_while_a_window_waits_lets_it_begin_with_the_others(parts):
    orders = Orders()

    async def scenario(p, fleet):
        engine = await p.engine()
        fleet.put("engine-policy-0", 0, engine.url)
        fleet.put("engine-policy-0", 1, engine.url.replace("127.0.0.1", "127.0.0.9"))
        waiting = asyncio.ensure_future(fleet.start(20))
        await until(lambda: fleet.service.state.window_wanted)
        await fleet.service.stop_cell({"cell": "engine-policy-0-00001", "reason": "too hot"}, [])
        assert [one.cell for one in (await waiting).engines] == ["engine-policy-0-00000"]
        assert orders.done == [("stop", "engine-policy-0-00001", "1-1", "too hot")]
        await fleet.service.start_cell({"cell": "engine-policy-0-00001"}, [])
        assert fleet.service._wanted(None) == 2

    run(parts, scenario, orders=orders)


def test_a_cell_that_an_operator_stopped_is_not_waited_for(parts, monkeypatch):
    monkeypatch.setattr(service_module, "_CELLS_EVERY_S", 0.1)
    orders = Orders()

    async def scenario(p, fleet):
        fleet.put("engine-policy-0", 0, (await p.engine()).url)
        orders.states = {"engine-policy-0-00001": "stopped", "router-policy-00000": "stopped"}
        assert len((await fleet.start(10)).engines) == 1

    run(parts, scenario, orders=orders)


def test_orders_for_what_is_no_engine_of_the_run_are_refused_with_the_reason(parts):
    async def scenario(p, fleet, router, engine, told):
        service = fleet.service
        for cell, text in (
            ("external-mine", "neither started nor stopped by this run"),
            ("trainer-00000", "no engine of model 'policy'"),
            ("x", "no engine of model 'policy'"),
            ("engine-policy-0-00003", "not running"),
        ):
            with pytest.raises(ControllerError, match=text):
                await service.stop_cell({"cell": cell}, [])
        with pytest.raises(ControllerError, match="start_cell: no such cell"):
            await service.start_cell({"cell": "engine-policy-0-00009"}, [])

    run(parts, with_external(scenario, orders=Orders()))


def test_after_dispose_nothing_gets_traffic_and_every_call_says_so(parts):
    async def scenario(p, fleet):
        router, _ = await two_engines(p, fleet)
        await fleet.publish(1, p.http)
        await fleet.serving(2)
        window = await fleet.start()
        methods = fleet.service.methods()
        await methods["dispose"]({}, [])
        await methods["dispose"]({}, [])
        await until(lambda: router.listed() == set())
        assert {row.state for row in fleet.service.state.status().engines} == {"disposed"}
        for name in ("start_update_weights", "status", "abort_all", "wait_serving", "stop_cell"):
            with pytest.raises(Disposed, match="disposed of"):
                await methods[name]({"window_id": window.window_id}, [])
        assert fleet.replaced == []

    run(parts, scenario)


def test_an_engine_that_is_healed_after_dispose_gets_no_traffic(parts):
    async def scenario(p, fleet):
        router, engines = await two_engines(p, fleet)
        await fleet.publish(1, p.http)
        await fleet.serving(2)
        await fleet.service.dispose()
        await until(lambda: router.listed() == set())
        engines[0].calls.clear()
        fleet.drop("engine-policy-0", 0)
        fleet.put("engine-policy-0", 0, engines[0].url, n=2)  # its label says already that it has the weights
        fleet.drop("router-policy", 0)
        new = await p.router(engines[1])
        fleet.put("router-policy", 0, new.url, n=2)
        await until(lambda: new.listed() == set())
        assert {row.state for row in fleet.service.state.status().engines} == {"disposed"}
        assert engines[0].calls == [] and router.listed() == set()

    run(parts, scenario)


def test_the_keeper_of_a_router_ends_though_it_is_cancelled_and_kicked_at_once(parts):
    async def scenario(p, fleet):
        fleet.put("router-policy", 0, (await p.router()).url)
        _, task = fleet.service._router_tasks["router-policy-00000"]
        await until(lambda: "router-policy-00000" in fleet.service.state.listed)  # now it waits
        fleet.service._sync_routers()
        fleet.drop("router-policy", 0)
        await until(task.done)
        assert task.cancelled()

    run(parts, scenario, reconcile_s=60.0)


def test_an_external_engine_gets_its_own_key_or_none_and_never_the_runs(parts, tmp_path):
    secrets = tmp_path / "its.key"
    secrets.write_text("its-own-secret\n")
    secrets.chmod(0o600)
    security.create_secrets(tmp_path, 0)
    run_key = f"Bearer {security.load_http_key(tmp_path, 0)}"

    async def scenario(p, fleet):
        keyed, open_, own = [await p.engine() for _ in range(3)]
        sets = [f"inference.external.a.url={keyed.url}/", f"inference.external.a.key_file={secrets}"]
        config = load([], [*sets, f"models.j.external.b.url={open_.url}"])
        keys = http_keys(config, tmp_path, 0)
        assert "secret" not in repr(keys) and run_key.split()[1] not in repr(keys)
        async with open_http(keys) as http:
            for engine in (keyed, open_, own):
                api = EngineApi(engine.url, http)
                await api.model_info()
                await api.generate({"input_ids": [1]})
        assert (keyed.keys, open_.keys, own.keys) == ({"Bearer its-own-secret"}, {None}, {run_key})

    run(parts, scenario)
    secrets.chmod(0o640)
    with pytest.raises(security.SecurityError, match="mode 0640: others may read the key; chmod it to 0600"):
        security.read_engine_key(secrets)
    secrets.chmod(0o600)
    secrets.write_text("two\nlines")
    with pytest.raises(security.SecurityError, match="expected one line with a key"):
        security.read_engine_key(secrets)


@pytest.mark.parametrize(
    "base", ["http://[::1]:3000", "http://[2001:DB8:0::1]:3000", "http://Node7:3000", "http://n:80"]
)
def test_the_key_of_an_external_engine_is_found_however_its_url_is_spelled(base):
    async def sent(keys):
        request = TraceRequestStartParams("GET", URL(f"{base}/model_info"), CIMultiDict(Authorization="Bearer run"))
        async with open_http(keys) as http:
            for tracing in http.trace_configs:
                tracing.freeze()
                await tracing.on_request_start.send(http, None, request)
        return request.headers.get("Authorization")

    assert asyncio.run(sent(HttpKeys("run", {base: "its-own"}))) == "Bearer its-own"
    assert asyncio.run(sent(HttpKeys("run", {base: ""}))) is None
    assert asyncio.run(sent(HttpKeys("run", {"http://other:3000": "its-own"}))) == "Bearer run"


def test_an_engine_that_hangs_after_a_broken_broadcast_is_replaced_within_a_bound_and_the_other_serves(parts, caplog):
    async def scenario(p, fleet):
        router, engines = await two_engines(p, fleet)
        await fleet.publish(1, p.http)
        window = await fleet.start()
        engines[0].moves = False  # its scheduler waits in the broken group
        for engine in engines:
            engine.paused = "retract"
        reason = "weights 2: the broadcast to 2 engines broke: no answer in time"
        await fleet.service.abort_update_weights({"window_id": window.window_id, "reason": reason}, [])
        began = asyncio.get_running_loop().time()
        await until(lambda: fleet.replaced)
        assert asyncio.get_running_loop().time() - began < 3
        ((cell, _, why),) = fleet.replaced
        assert cell == "engine-policy-0-00000" and "did not continue after an aborted weight window" in why
        await fleet.serving(1)
        assert engines[1].paused is None and router.listed() == {engines[1].url}
        assert f"aborted: {reason}" in caplog.text and why in caplog.text

    run(parts, scenario, stall_s=1.2)


def test_a_client_of_another_model_names_it_in_each_call_and_gets_the_controllers_own_errors():
    class Rpc:
        def __init__(self):
            self.seen = []

        async def call(self, method, params, timeout_s):
            self.seen.append((method, params))
            raise RpcRemoteError("Disposed", "it ends", "")

    client = ControllerClient.__new__(ControllerClient)  # without an address book
    client._rpc, client._model, client._owner, client._renewals = Rpc(), "judge", [], {}

    async def ask():
        for call in (client.stop_cell("engine-judge-0-00000", "hot"), client.statuses(), client.prepare_eval(1, 1.0)):
            with pytest.raises(Disposed, match="it ends"):
                await call

    asyncio.run(ask())
    assert client._rpc.seen == [
        ("stop_cell", {"cell": "engine-judge-0-00000", "reason": "hot", "model": "judge"}),
        ("status", {"model": "judge"}),
        ("wait_serving", {"n": 1, "timeout_s": 1.0, "model": "judge"}),
    ]
