"""New weights into running engines: in SGLang's order, verified, and one engine's failure stays its own."""

import asyncio

import pytest

from miles_hpc.inference import weights
from miles_hpc.inference.engine_api import EngineApi, EngineRefused, version_of
from miles_hpc.inference.weights import WeightsNotTaken, load_from_disk, update_from_disk
from miles_hpc.inference.windows import EngineInfo
from miles_hpc.wire.ids import Generation

pytestmark = pytest.mark.unit

NOT_FLUSHED = {"success": False, "message": "Weights were updated, but the cache was not flushed because requests …"}


def run(parts, scenario):
    async def main():
        async with parts() as p:
            return await asyncio.wait_for(scenario(p), 20)

    return asyncio.run(main())


def info(engine, index=0):
    return EngineInfo(cell=f"engine-policy-0-{index:05d}", generation=Generation(1, 1), url=engine.url)


def test_the_order_is_pause_load_verify_continue(parts):
    async def scenario(p):
        engine = await p.engine()
        result = await update_from_disk([info(engine)], "/w/5", 5, "retract", http=p.http)
        return engine, result

    engine, result = run(parts, scenario)
    assert engine.calls == ["/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation"]
    assert engine.bodies[0] == {"mode": "retract"}
    assert engine.bodies[1] == {"model_path": "/w/5", "weight_version": "5", "flush_cache": True}
    assert (result.failed, result.unflushed, engine.paused) == ({}, [], None)
    assert len(result.updated) == 1


def test_in_place_asks_for_no_flush_and_flushes_by_itself(parts):
    async def scenario(p):
        engine = await p.engine()
        await update_from_disk([info(engine)], "/w/5", 5, "in_place", http=p.http)
        return engine

    engine = run(parts, scenario)
    assert engine.bodies[1]["flush_cache"] is False
    assert engine.calls[2] == "/flush_cache"


def test_in_place_with_live_requests_reports_the_old_cache(parts):
    async def scenario(p):
        engine = await p.engine()
        engine.fail["/flush_cache"] = (400, "requests are live")
        return await update_from_disk([info(engine)], "/w/5", 5, "in_place", http=p.http)

    assert run(parts, scenario).unflushed == ["engine-policy-0-00000"]


def test_weights_that_were_taken_without_a_flush_get_flush_and_label_after(parts):
    async def scenario(p):
        engine = await p.engine()
        engine.fail["/update_weights_from_disk"] = (400, NOT_FLUSHED)
        result = await update_from_disk([info(engine)], "/w/5", 5, http=p.http)
        return engine, result

    engine, result = run(parts, scenario)
    assert engine.label == "5" and engine.flushes == 1 and len(result.updated) == 1
    label = engine.bodies[engine.calls.index("/update_weight_version")]
    assert label == {"new_version": "5", "abort_all_requests": False}


def test_a_cache_that_cannot_be_flushed_fails_the_engine_within_its_budget(parts, monkeypatch):
    monkeypatch.setattr(weights, "FLUSH_BUDGET_S", 0.3)

    async def scenario(p):
        engine, good = await p.engine(), await p.engine()
        engine.fail = {"/update_weights_from_disk": (400, NOT_FLUSHED), "/flush_cache": (400, "live")}
        return await update_from_disk([info(engine), info(good, 1)], "/w/5", 5, http=p.http)

    result = run(parts, scenario)
    assert list(result.failed) == ["engine-policy-0-00000"] and "flushed within" in str(result.failed)


def test_an_engine_that_refuses_or_dies_does_not_stop_the_others(parts):
    async def scenario(p):
        good, refuses, dies, lies = [await p.engine() for _ in range(4)]
        refuses.fail["/update_weights_from_disk"] = (400, {"success": False, "message": "no such path"})
        dies.fail["/update_weights_from_disk"] = (0, None)
        lies.loads_wrong_label = True
        engines = [info(e, i) for i, e in enumerate((good, refuses, dies, lies))]
        return await update_from_disk(engines, "/w/5", 5, http=p.http)

    result = run(parts, scenario)
    assert [e.cell for e in result.updated] == ["engine-policy-0-00000"]
    assert "no such path" in result.failed["engine-policy-0-00001"]
    assert "update_weights_from_disk" in result.failed["engine-policy-0-00002"]
    assert "label says -1" in result.failed["engine-policy-0-00003"]


def test_weights_that_every_engine_refuses_are_an_error_but_a_lost_engine_alone_is_none(parts):
    async def scenario(p):
        refuses, dies = await p.engine(), await p.engine()
        refuses.fail["/update_weights_from_disk"] = (400, {"success": False, "message": "no such path"})
        dies.fail["/pause_generation"] = (0, None)
        result = await update_from_disk([info(dies)], "/w/5", 5, http=p.http)
        assert result.updated == [] and list(result.failed) == ["engine-policy-0-00000"]
        with pytest.raises(WeightsNotTaken, match="no such path"):
            await update_from_disk([info(refuses), info(dies, 1)], "/w/5", 5, http=p.http)

    run(parts, scenario)


def test_an_update_that_hangs_fails_the_engine_at_the_deadline(parts):
    async def scenario(p):
        engine = await p.engine()

        async def never(request):
            await asyncio.sleep(30)

        engine._on = never
        await engine.stop()
        await engine.start()
        return await update_from_disk([info(engine)], "/w/5", 5, http=p.http, timeout_s=0.3)

    assert "within 0.3 s" in str(run(parts, scenario).failed)


def test_a_load_outside_a_window_pauses_nothing_and_is_verified(parts):
    async def scenario(p):
        engine = await p.engine()
        await load_from_disk(EngineApi(engine.url, p.http), "/w/5", 5)
        engine.fail["/update_weights_from_disk"] = (400, {"success": False, "message": "gone"})
        with pytest.raises(EngineRefused, match="gone"):
            await load_from_disk(EngineApi(engine.url, p.http), "/w/6", 6)
        return engine.calls

    assert "/pause_generation" not in run(parts, scenario)


def test_only_decimal_labels_are_versions():
    assert [version_of(label) for label in ("7", 7, "default", "tens-1", None, "")] == [7, 7, -1, -1, -1, -1]
