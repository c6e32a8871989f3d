import asyncio
from types import SimpleNamespace

import pytest

from miles_hpc.inference.broadcast import BroadcastBroke
from miles_hpc.inference.weights import UpdateResult, WeightsNotTaken
from miles_hpc.inference.windows import EngineInfo, Window, WindowLost
from miles_hpc.train.publish import TRIES, WeightPublisher
from miles_hpc.train.ranks import RankClients
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.rpc import RpcRemoteError, RpcTimeout, RpcUnknownOutcome

pytestmark = pytest.mark.unit

ENGINES = [EngineInfo(cell=f"engine-{n}", generation=Generation(1, 1), url=f"http://e{n}") for n in range(2)]


class World:
    """Controller, engines and trainer of a publisher; what was asked of them is in `calls`."""

    def __init__(self, run_dir, serving=(1000, 1000)):
        self.run_dir = run_dir
        self.calls = []
        self.failed = {}
        self.fail_in = ""
        self.lost = []
        self.serving = serving

    def publisher(self, attempt=0):
        return WeightPublisher(self.run_dir, {"attempt": attempt}, self, self.export, self.load, 5.0)

    def said(self, *call):
        self.calls.append(call)
        if call[0] == self.fail_in:
            raise RuntimeError(f"{call[0]} failed")
        if self.lost and call[0] == self.lost[0][0]:
            raise self.lost.pop(0)[1]

    async def export(self, path):
        self.said("export", path.name)
        path.mkdir()
        (path / "model").write_text("weights")

    async def load(self, engines, path, version):
        assert (self.run_dir / "weights" / f"{version:05d}" / "model").is_file()
        self.said("load", [engine.cell for engine in engines], version)
        return UpdateResult(updated=ENGINES, failed=self.failed)

    async def start_update_weights(self, timeout_s):
        self.said("start")
        return Window(window_id="w1", engines=ENGINES)

    async def end_update_weights(self, window_id, version, path, failed=None):
        self.said("end", window_id, version, failed)
        return failed or {}

    async def abort_update_weights(self, window_id, reason):
        self.said("abort", window_id, reason)

    async def status(self):
        return SimpleNamespace(engines=[SimpleNamespace(weight_version=version) for version in self.serving])


def on_disk(run_dir):
    return sorted(path.name for path in (run_dir / "weights").iterdir() if path.is_dir())


def test_weights_are_whole_on_disk_before_a_window_begins(tmp_path):
    world = World(tmp_path)
    assert asyncio.run(world.publisher().publish(0)) == 1
    assert world.calls == [
        ("export", ".00001.draft"),
        ("start",),
        ("load", ["engine-0", "engine-1"], 1),
        ("end", "w1", 1, {}),
    ]
    assert on_disk(tmp_path) == ["00001"]


def test_a_version_is_never_given_twice_whoever_asks(tmp_path):
    world = World(tmp_path)
    one, other = world.publisher(), world.publisher(attempt=1)
    assert [one.claim(0), other.claim(0), one.claim(0), other.claim(5), one.claim(0)] == [1, 2, 3, 6, 4]


def test_engines_that_failed_are_named_at_the_end_of_the_window(tmp_path):
    world = World(tmp_path)
    world.failed = {"engine-1": "gone"}
    asyncio.run(world.publisher().publish(0))
    assert world.calls[-1] == ("end", "w1", 1, {"engine-1": "gone"})


@pytest.mark.parametrize("where", ["load", "end"])
def test_a_window_that_goes_wrong_is_aborted_and_the_number_stays_used(tmp_path, where):
    world = World(tmp_path)
    world.fail_in = where
    publisher = world.publisher()
    with pytest.raises(RuntimeError, match=f"{where} failed"):
        asyncio.run(publisher.publish(0))
    assert world.calls[-1][:2] == ("abort", "w1")
    world.fail_in = ""
    assert asyncio.run(publisher.publish(0)) == 2


LOST = [WindowLost("gone"), RpcUnknownOutcome("replaced"), RpcTimeout("silent")]


@pytest.mark.parametrize("where", ["start", "end"])
@pytest.mark.parametrize("how", LOST, ids=lambda how: type(how).__name__)
def test_a_window_that_is_lost_with_its_controller_is_followed_by_another(tmp_path, where, how):
    world = World(tmp_path)
    world.lost = [(where, how), (where, how)]
    assert asyncio.run(world.publisher().publish(0)) == 1
    assert world.calls[-1] == ("end", "w1", 1, {}) and [call[0] for call in world.calls].count("start") == 3


def test_a_broadcast_that_broke_is_followed_by_another_in_a_window_of_its_own(tmp_path):
    world = World(tmp_path)
    world.lost = [("load", BroadcastBroke("an engine died")), ("load", BroadcastBroke("another"))]
    assert asyncio.run(world.publisher().publish(0)) == 1
    calls = [call[0] for call in world.calls]
    assert calls == ["export", *("start", "load", "abort") * 2, "start", "load", "end"]


def test_weights_that_no_engine_takes_are_not_sent_again(tmp_path):
    world = World(tmp_path)
    world.lost = [("load", WeightsNotTaken("another shape"))]
    with pytest.raises(WeightsNotTaken):
        asyncio.run(world.publisher().publish(0))
    assert [call[0] for call in world.calls] == ["export", "start", "load", "abort"]


@pytest.mark.parametrize(
    ("over_there", "here"),
    [("BroadcastBroke", BroadcastBroke), ("WeightsNotTaken", WeightsNotTaken), ("GroupError", RpcRemoteError)],
)
def test_what_went_wrong_in_a_rank_s_broadcast_is_told_apart_by_the_driver(over_there, here):
    class Rank:
        async def call(self, method, params, timeout_s):
            raise RpcRemoteError(over_there, "the text", "the traceback")

    ranks = RankClients.__new__(RankClients)
    ranks._clients = [Rank()]
    with pytest.raises(here) as found:
        asyncio.run(ranks.send_weights(ENGINES, "/w/1", 1))
    assert type(found.value) is here and "the text" in str(found.value)


def test_windows_that_are_lost_again_and_again_end_the_publishing(tmp_path):
    world = World(tmp_path)
    world.lost = [("end", LOST[0])] * TRIES
    with pytest.raises(WindowLost):
        asyncio.run(world.publisher().publish(0))


def test_no_window_begins_when_the_export_fails(tmp_path):
    world = World(tmp_path)
    world.fail_in = "export"
    with pytest.raises(RuntimeError):
        asyncio.run(world.publisher().publish(0))
    assert world.calls == [("export", ".00001.draft")]
    assert on_disk(tmp_path) == []


def test_two_versions_are_kept(tmp_path):
    world = World(tmp_path)
    publisher = world.publisher()
    for above in range(4):
        asyncio.run(publisher.publish(above))
    assert on_disk(tmp_path) == ["00003", "00004"]


@pytest.mark.parametrize("serving", [(1, 4), (-1, 4)])
def test_a_version_that_an_engine_serves_or_may_be_loading_is_kept(tmp_path, serving):
    world = World(tmp_path, serving)
    publisher = world.publisher()
    for above in range(4):
        asyncio.run(publisher.publish(above))
    assert "00001" in on_disk(tmp_path)
