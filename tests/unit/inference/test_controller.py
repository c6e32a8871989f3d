"""Decisions of the controller: no engine gets traffic without the published weights, whatever dies in between."""

import pytest

from miles_hpc.inference.controller import (
    MAX_LOAD_FAILURES,
    AwaitHealth,
    Controller,
    EngineState,
    Forget,
    LoadWeights,
    Owner,
    Published,
    Replace,
    Resume,
    SyncRouters,
)
from miles_hpc.inference.engine_api import UNPUBLISHED
from miles_hpc.inference.windows import EngineInfo, WindowLost
from miles_hpc.wire.ids import Generation

pytestmark = pytest.mark.unit

ROUTER = "router-policy-00000"


def engine(index: int = 0, n: int = 1, url: str | None = None) -> EngineInfo:
    return EngineInfo(
        cell=f"engine-policy-0-{index:05d}",
        generation=Generation(1, n),
        url=f"http://127.0.0.2:{9000 + index}" if url is None else url,
        gpu_offset=index,
    )


def with_router(n: int = 1) -> Controller:
    controller = Controller()
    controller.on_routers({ROUTER: (Generation(1, n), "http://127.0.0.2:8000")})
    return controller


def pending(*engines: EngineInfo) -> Controller:
    controller = with_router()
    controller.on_engines(engines)
    for info in engines:
        controller.on_healthy(info, UNPUBLISHED)
    return controller


def serving(*engines: EngineInfo, version: int = 1) -> Controller:
    controller = pending(*engines)
    controller.open_window("w0", len(engines), deadline=100.0)
    controller.on_window_end("w0", version, f"/weights/{version}", {})
    controller.on_router_list(ROUTER, Generation(1, 1), {e.url for e in engines})
    assert states(controller) == [EngineState.SERVING] * len(engines)
    return controller


def states(controller: Controller) -> list[EngineState]:
    return [controller.engines[cell].state for cell in sorted(controller.engines)]


def test_a_new_engine_is_waited_for_and_gets_no_traffic():
    controller = with_router()
    assert controller.on_engines([engine()]) == [AwaitHealth(engine())]
    assert states(controller) == [EngineState.INITIALIZING]
    assert controller.wanted_urls() == set()
    assert controller.on_engines([engine()]) == []


def test_an_engine_without_an_address_stays_uninitialized_until_it_has_one():
    controller = with_router()
    assert controller.on_engines([engine(url="")]) == []
    assert states(controller) == [EngineState.UNINITIALIZED]
    assert controller.on_engines([engine()]) == [AwaitHealth(engine())]


def test_before_the_first_publication_a_healthy_engine_waits_for_weights():
    controller = with_router()
    controller.on_engines([engine()])
    assert controller.on_healthy(engine(), UNPUBLISHED) == [SyncRouters()]
    assert states(controller) == [EngineState.PENDING_WEIGHTS]
    assert controller.wanted_urls() == set()


def test_the_end_of_the_first_window_asks_for_traffic_and_the_routers_list_gives_it():
    controller = pending(engine(0), engine(1))
    window = controller.open_window("w1", 2, deadline=60.0)
    assert [e.cell for e in window.engines] == [engine(0).cell, engine(1).cell]
    assert controller.on_window_end("w1", 7, "/weights/7", {}) == [SyncRouters()]
    assert controller.wanted_urls() == {engine(0).url, engine(1).url}
    assert states(controller) == [EngineState.PENDING_WEIGHTS] * 2
    controller.on_router_list(ROUTER, Generation(1, 1), {engine(0).url})
    assert states(controller) == [EngineState.SERVING, EngineState.PENDING_WEIGHTS]
    controller.on_router_list(ROUTER, Generation(1, 1), {engine(0).url, engine(1).url})
    assert controller.serving() == 2


def test_a_healed_engine_loads_the_published_weights_before_the_router_hears_of_it():
    controller = serving(engine(0), engine(1))
    healed = engine(0, n=2)
    assert controller.on_engines([healed, engine(1)]) == [Forget(engine(0)), AwaitHealth(healed), SyncRouters()]
    assert controller.wanted_urls() == {engine(1).url}
    assert controller.on_healthy(healed, UNPUBLISHED) == [LoadWeights(healed, 1, "/weights/1")]
    assert controller.wanted_urls() == {engine(1).url}
    assert controller.on_loaded(healed, 1) == [SyncRouters()]
    assert controller.wanted_urls() == {engine(0).url, engine(1).url}


def test_a_healed_engine_at_the_old_url_does_not_inherit_the_routers_word_about_the_old_one():
    controller = serving(engine(0), engine(1))
    healed = engine(0, n=2)
    controller.on_engines([healed, engine(1)])
    assert engine(0).url not in controller.listed[ROUTER]


def test_a_lost_engine_is_taken_from_the_routers_at_once():
    controller = serving(engine(0), engine(1))
    assert controller.on_engines([engine(1)]) == [Forget(engine(0)), SyncRouters()]
    assert controller.wanted_urls() == {engine(1).url}


def test_reports_of_an_older_generation_change_nothing():
    controller = serving(engine(0))
    controller.on_engines([engine(0, n=2)])
    assert controller.on_healthy(engine(0), UNPUBLISHED) == []
    assert controller.on_loaded(engine(0), 1) == []
    assert controller.on_failed(engine(0), "late") == []
    assert states(controller) == [EngineState.INITIALIZING]


def test_a_restarted_router_is_filled_again_and_engines_keep_serving():
    controller = serving(engine(0), engine(1))
    again = {ROUTER: (Generation(1, 2), "http://127.0.0.2:8000")}
    assert controller.on_routers(again) == [SyncRouters()]
    assert controller.listed == {}
    assert controller.wanted_urls() == {engine(0).url, engine(1).url}
    controller.on_router_list(ROUTER, Generation(1, 1), {engine(0).url})
    assert controller.listed == {}, "the old router's list says nothing about the new one"


def test_an_engine_serves_only_when_every_router_lists_it():
    controller = serving(engine(0))
    second = "router-policy-00001"
    controller.on_routers({**controller.routers, second: (Generation(1, 1), "http://127.0.0.3:8000")})
    healed = engine(0, n=2)
    controller.on_engines([healed])
    controller.on_healthy(healed, 1)
    controller.on_router_list(ROUTER, Generation(1, 1), {healed.url})
    assert controller.serving() == 0
    controller.on_router_list(second, Generation(1, 1), {healed.url})
    assert controller.serving() == 1


def test_a_window_waits_for_the_wanted_number_and_says_what_is_missing():
    controller = pending(engine(0))
    controller.on_engines([engine(0), engine(1)])
    obstacle = controller.window_obstacle(2)
    assert "1 of 2" in obstacle and "engine-policy-0-00001 initializing" in obstacle
    with pytest.raises(ValueError, match="1 of 2"):
        controller.open_window("w1", 2, deadline=60.0)
    controller.on_healthy(engine(1), UNPUBLISHED)
    assert controller.window_obstacle(2) == ""


def test_a_second_window_waits_for_the_first():
    controller = pending(engine(0))
    controller.open_window("w1", 1, deadline=60.0)
    assert "w1 is open" in controller.window_obstacle(1)


def test_no_window_begins_while_an_engine_loads_by_itself():
    controller = serving(engine(0), engine(1))
    healed = engine(0, n=2)
    controller.on_engines([healed, engine(1)])
    controller.on_healthy(healed, UNPUBLISHED)
    assert "still change weights" in controller.window_obstacle(1)
    controller.on_loaded(healed, 1)
    assert controller.window_obstacle(2) == ""


def test_a_healed_engine_begins_no_load_of_its_own_while_a_window_is_waited_for():
    controller = serving(engine(0), engine(1))
    controller.window_wanted = True
    healed = engine(0, n=2)
    controller.on_engines([healed, engine(1)])
    assert controller.on_healthy(healed, UNPUBLISHED) == []
    controller.open_window("w1", 2, deadline=60.0)
    assert controller.on_window_end("w1", 2, "/weights/2", {}) == [SyncRouters()]
    assert controller.engines[healed.cell].version == 2


def test_an_engine_that_joins_during_a_window_loads_the_new_version_after_it():
    controller = serving(engine(0), engine(1))
    controller.open_window("w1", 2, deadline=60.0)
    healed = engine(0, n=2)
    controller.on_engines([healed, engine(1)])
    assert controller.on_healthy(healed, UNPUBLISHED) == []
    assert controller.on_window_end("w1", 2, "/weights/2", {}) == [LoadWeights(healed, 2, "/weights/2")]


def test_an_engine_that_failed_in_a_window_is_replaced_and_the_window_goes_on():
    controller = serving(engine(0), engine(1))
    controller.open_window("w1", 2, deadline=60.0)
    actions = controller.on_window_end("w1", 2, "/weights/2", {engine(1).cell: "refused"})
    assert actions == [SyncRouters(), Forget(engine(1)), Replace(engine(1), "weights 2: refused")]
    assert states(controller) == [EngineState.SERVING, EngineState.DISPOSED]
    assert controller.wanted_urls() == {engine(0).url}
    assert controller.on_engines([engine(0), engine(1)]) == [], "a disposed generation stays disposed"


def test_an_aborted_window_keeps_its_engines_from_traffic_until_they_loaded_the_published_weights():
    controller = serving(engine(0), version=3)
    controller.open_window("w1", 1, deadline=60.0)
    assert controller.on_window_abort("w1") == [Resume(engine(0)), SyncRouters()]
    assert controller.wanted_urls() == set()
    assert "still change weights" in controller.window_obstacle(1)
    assert controller.on_resumed(engine(0)) == [LoadWeights(engine(0), 3, "/weights/3")]
    assert controller.on_loaded(engine(0), 3) == [SyncRouters()]


def test_an_aborted_first_window_leaves_engines_waiting_for_weights():
    controller = pending(engine(0))
    controller.open_window("w1", 1, deadline=60.0)
    assert controller.on_window_abort("w1") == [Resume(engine(0))]
    assert controller.on_resumed(engine(0)) == []
    assert controller.window_obstacle(1) == ""


def test_a_window_past_its_deadline_is_aborted_and_its_end_is_refused():
    controller = serving(engine(0))
    controller.open_window("w1", 1, deadline=60.0)
    assert controller.on_tick(59.9) == ([], "")
    actions, aborted = controller.on_tick(60.0)
    assert (actions, aborted) == ([Resume(engine(0)), SyncRouters()], "w1")
    with pytest.raises(WindowLost, match="w1 is over"):
        controller.on_window_end("w1", 2, "/weights/2", {})
    assert controller.published is not None and controller.published.version == 1


def test_a_version_that_does_not_grow_is_refused_and_the_window_stays_open():
    controller = serving(engine(0), version=5)
    controller.open_window("w1", 1, deadline=60.0)
    for version, path in [(4, "/weights/4"), (5, "/elsewhere/5")]:
        with pytest.raises(ValueError, match=f"{version} is not above the published 5"):
            controller.on_window_end("w1", version, path, {})
    assert controller.window is not None


def test_weights_that_the_last_controller_published_before_it_was_lost_are_taken_again():
    controller = serving(engine(0), version=5)
    controller.open_window("w1", 1, deadline=60.0)
    controller.on_window_end("w1", 5, "/weights/5", {})
    assert controller.window is None and controller.published == Published(5, "/weights/5")


def test_a_load_that_fails_again_and_again_ends_in_a_replacement():
    controller = serving(engine(0), engine(1))
    healed = engine(0, n=2)
    controller.on_engines([healed, engine(1)])
    controller.on_healthy(healed, UNPUBLISHED)
    for _ in range(MAX_LOAD_FAILURES - 1):
        assert controller.on_load_failed(healed, "no") == [LoadWeights(healed, 1, "/weights/1")]
    last = controller.on_load_failed(healed, "no")
    assert last == [Forget(healed), Replace(healed, f"weights were not taken {MAX_LOAD_FAILURES} times: no")]


def test_a_new_controller_that_is_told_the_published_version_takes_running_engines_over():
    controller = pending(engine(0), engine(1))
    controller.engines[engine(0).cell].version = 9
    actions = controller.on_published(9, "/weights/9")
    assert actions == [SyncRouters(), LoadWeights(engine(1), 9, "/weights/9")]
    assert controller.wanted_urls() == {engine(0).url}
    assert controller.on_published(8, "/weights/8") == []


def test_news_of_a_newer_version_takes_engines_out_of_traffic_until_they_have_it():
    controller = serving(engine(0), version=1)
    assert controller.on_published(2, "/weights/2") == [SyncRouters(), LoadWeights(engine(0), 2, "/weights/2")]
    assert controller.wanted_urls() == set()


def test_status_names_every_engine_and_the_published_weights():
    controller = serving(engine(0), version=4)
    status = controller.status()
    assert (status.published, status.path, status.window) == (4, "/weights/4", "")
    assert [(row.cell, row.state, row.weight_version) for row in status.engines] == [(engine(0).cell, "serving", 4)]


# ------------------------------------------------------------------------------------- owners, leases, health
OWNER = Owner("driver-00000", Generation(1, 1))


def owned(**window) -> Controller:
    controller = serving(engine(0))
    controller.on_cells({"driver-00000": Generation(1, 1)})
    controller.open_window("w1", 1, deadline=600.0, owner=OWNER, **window)
    return controller


def test_a_window_whose_owner_leaves_the_address_book_is_aborted_at_once():
    controller = owned()
    assert controller.on_cells({"driver-00000": Generation(1, 1), "executor-00000": Generation(1, 1)}) == ([], "")
    actions, aborted = controller.on_cells({"driver-00000": Generation(1, 2)})
    assert (actions, aborted) == ([Resume(engine(0)), SyncRouters()], "w1")
    assert controller.window is None


def test_a_window_that_is_not_renewed_is_aborted_and_a_renewed_one_is_not():
    controller = owned(lease_until=30.0)
    controller.on_renewed("w1", 60.0)
    assert controller.on_tick(59.0) == ([], "")
    assert controller.on_tick(60.0)[1] == "w1"
    with pytest.raises(WindowLost):
        controller.on_renewed("w1", 90.0)


def test_health_is_looked_at_outside_windows_and_loads_only():
    controller = serving(engine(0))
    epoch = controller.watched(engine(0))
    assert epoch is not None
    controller.open_window("w1", 1, deadline=600.0)
    assert controller.watched(engine(0)) is None
    assert controller.on_stalled(engine(0), epoch, "stands still") == []
    controller.on_window_end("w1", 2, "/weights/2", {})
    assert controller.watched(engine(0)) not in (None, epoch)
    assert controller.on_stalled(engine(0), epoch, "stands still") == []
    now = controller.watched(engine(0))
    actions = controller.on_stalled(engine(0), now, "stands still")
    assert actions == [SyncRouters(), Forget(engine(0)), Replace(engine(0), "stands still")]


def test_weights_without_a_directory_are_waited_for_until_a_window_or_their_path():
    controller = serving(engine(0))
    controller.open_window("w1", 1, deadline=600.0)
    controller.on_window_end("w1", 2, "", {})
    controller.on_engines([engine(0), engine(1)])
    assert controller.on_healthy(engine(1), UNPUBLISHED) == []
    assert controller.engines["engine-policy-0-00001"].state is EngineState.PENDING_WEIGHTS
    assert controller.on_published(2, "/weights/2") == [LoadWeights(engine(1), 2, "/weights/2")]


def test_an_engine_that_a_dead_controller_left_paused_is_continued_before_anything_else():
    controller = with_router()
    controller.on_published(3, "/weights/3")
    controller.on_engines([engine(0)])
    assert controller.kept_urls() == {engine(0).url}
    assert controller.on_healthy(engine(0), 3, paused=True) == [Resume(engine(0)), SyncRouters()]
    assert controller.kept_urls() == set()
    assert controller.on_resumed(engine(0)) == [LoadWeights(engine(0), 3, "/weights/3")]


def test_an_engine_that_is_current_when_a_controller_comes_back_is_registered_without_a_load():
    controller = with_router()
    controller.on_published(3, "/weights/3")
    controller.on_engines([engine(0)])
    assert LoadWeights(engine(0), 3, "/weights/3") not in controller.on_healthy(engine(0), 3)
    assert controller.wanted_urls() == {engine(0).url}


def test_an_owner_that_is_in_no_address_book_is_known_by_its_lease_alone():
    controller = serving(engine(0))
    controller.open_window("w1", 1, deadline=600.0, owner=OWNER, lease_until=30.0)
    assert controller.on_cells({"executor-00000": Generation(1, 1)}) == ([], "")
    assert controller.on_tick(30.0)[1] == "w1"
