"""The fake engine: scripted tokens, and what pausing, aborting and updating do to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from miles_hpc.engine.fake import FakeBackend, right_answer
from miles_hpc.engine.requests import GroupMember, Request, Result, Sampling, TensorSpec, sample_seed

pytestmark = pytest.mark.unit


def run(model_dir: Path, do: Callable[[FakeBackend], Awaitable[None]], token_ms: float = 1.0) -> None:
    async def main() -> None:
        await do(FakeBackend(str(model_dir), token_ms=token_ms))

    asyncio.run(asyncio.wait_for(main(), 20))


def request(
    rid: str = "a", text: str = "12 + 34 =", *, tokens: int = 16, seed: int = 0, endless: bool = False
) -> Request:
    ids = [ord(char) % 300 for char in text]
    stop = frozenset() if endless else frozenset({2})
    return Request(rid, ids, Sampling(max_new_tokens=tokens, stop_token_ids=stop, seed=seed))


def long(rid: str, tokens: int = 50) -> Request:
    return request(rid, tokens=tokens, endless=True)


async def tokens_made(backend: FakeBackend, count: int) -> None:
    """Wait until running requests hold `count` tokens beyond their prompts."""
    while backend.load().tokens == 0 or sum(run.produced for run in backend._live.values()) < count:
        for one in backend._live.values():
            backend._settle(one)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("12 + 34?", "46"),
        ("3 - 10 =", "-7"),
        ("first 1+1, then 6 * 7", "42"),
        ("repeat 73 please", "73"),
        ("12 + 34?<|im_end|> 47 Are you sure?", "46"),
        ("no number", None),
    ],
)
def test_it_finds_the_question_in_a_prompt(prompt: str, answer: str | None) -> None:
    assert right_answer(prompt) == answer


def test_tokens_depend_on_ids_and_seed_and_nothing_else(model_dir: Path) -> None:
    async def do(backend: FakeBackend) -> None:
        first = await backend.submit(request(seed=1))
        await backend.update_weights_from_disk(str(model_dir), "2", flush_cache=True, abort_all=False)
        among_others = await asyncio.gather(*(backend.submit(request(str(i), seed=i)) for i in range(30)))
        assert among_others[1].output_ids == first.output_ids
        assert among_others[1].output_logprobs == first.output_logprobs
        assert len({tuple(result.output_ids) for result in among_others}) > 1
        assert first.output_ids[-1] == 2

    run(model_dir, do, token_ms=0.0)


@pytest.mark.parametrize("tokens", [1, 3, 5, 300])
def test_fillers_drawn_at_once_are_those_drawn_one_by_one(model_dir: Path, tokens: int) -> None:
    async def do(backend: FakeBackend) -> None:
        at_once = Sampling(max_new_tokens=tokens, seed=2**40)
        one_by_one = Sampling(max_new_tokens=tokens, seed=2**40, stop=("never said",))
        ids = [ord(char) % 300 for char in "12 + 34 ="]
        found = [await backend.submit(Request("a", ids, sampling)) for sampling in (at_once, one_by_one)]
        assert len(found[0].output_ids) == tokens
        assert found[0].output_ids == found[1].output_ids
        assert found[0].output_logprobs == found[1].output_logprobs

    run(model_dir, do, token_ms=0.01)


def test_about_half_of_all_samples_are_right(model_dir: Path) -> None:
    async def do(backend: FakeBackend) -> None:
        prompts = [backend.tokenizer.encode(f"{a} + {a * 7} =") for a in range(100)]
        right = 0
        for a, ids in enumerate(prompts):
            for seed in range(4):
                stop = frozenset(backend.tokenizer.stop_token_ids)
                result = await backend.submit(Request("r", ids, Sampling(stop_token_ids=stop, seed=seed)))
                right += backend.tokenizer.decode(result.output_ids) == str(a * 8)
        assert 160 <= right <= 240

    run(model_dir, do, token_ms=0.0)


def test_greedy_ignores_the_seed(model_dir: Path) -> None:
    async def do(backend: FakeBackend) -> None:
        results = [
            await backend.submit(Request("r", [20, 30], Sampling(8, temperature=0.0, seed=seed))) for seed in range(5)
        ]
        assert len({tuple(result.output_ids) for result in results}) == 1

    run(model_dir, do, token_ms=0.0)


def test_n_samples_of_one_seed_have_seeds_of_their_own() -> None:
    seeds = [sample_seed(5, index) for index in range(8)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 8
    assert sample_seed(None, 3) is None


def test_a_short_request_returns_before_a_long_one(model_dir: Path) -> None:
    async def do(backend: FakeBackend) -> None:
        order: list[str] = []

        async def one(item: Request) -> None:
            await backend.submit(item)
            order.append(item.rid)

        await asyncio.gather(one(long("long", 100)), one(request("short", tokens=5)))
        assert order == ["short", "long"]

    run(model_dir, do)


def test_an_abort_returns_the_tokens_so_far(model_dir: Path) -> None:
    async def do(backend: FakeBackend) -> None:
        task = asyncio.ensure_future(backend.submit(long("a", 400)))
        other = asyncio.ensure_future(backend.submit(long("b", 30)))
        await tokens_made(backend, 6)
        await backend.abort("a")
        result = await task
        assert result.finish["type"] == "abort"
        assert 0 < len(result.output_ids) == len(result.output_logprobs) < 400
        assert result.versions == [("default", 0, len(result.output_ids))]
        assert len((await other).output_ids) == 30

    run(model_dir, do)


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
def test_versions_are_spans_when_weights_change_under_a_pause(model_dir: Path, mode: str, retractions: int) -> None:
    async def do(backend: FakeBackend) -> None:
        task = asyncio.ensure_future(backend.submit(long("a", 1000)))
        await tokens_made(backend, 3)
        await backend.pause(mode)  # type: ignore[arg-type]
        held = asyncio.ensure_future(backend.submit(request("new", tokens=1)))
        outcome = await backend.update_weights_from_disk(str(model_dir), "7", flush_cache=False, abort_all=False)
        assert outcome.success
        await asyncio.sleep(0.02)
        assert not held.done()
        assert (backend.load().running, backend.load().waiting) == (0, 2)
        await backend.resume()
        result: Result = await task
        cut = result.versions[0][2]
        assert result.versions == [("default", 0, cut), ("7", cut, 1000)]
        assert 3 <= cut < 1000
        assert result.num_retractions == retractions
        assert (await held).versions == [("7", 0, 1)]

    run(model_dir, do)


def test_pause_abort_ends_what_runs_and_holds_what_comes(model_dir: Path) -> None:
    async def do(backend: FakeBackend) -> None:
        task = asyncio.ensure_future(backend.submit(long("a", 400)))
        await tokens_made(backend, 1)
        await backend.pause("abort")
        assert (await task).finish["type"] == "abort"
        held = asyncio.ensure_future(backend.submit(request("b")))
        await asyncio.sleep(0.02)
        assert not held.done()
        await backend.resume()
        assert (await held).finish["type"] == "stop"

    run(model_dir, do)


def test_an_update_without_a_pause_waits_for_what_runs_and_holds_what_comes(model_dir: Path) -> None:
    async def do(backend: FakeBackend) -> None:
        # Long enough to be there still when a busy machine comes to look.
        task = asyncio.ensure_future(backend.submit(long("a", 2000)))
        await tokens_made(backend, 1)
        update = asyncio.ensure_future(
            backend.update_weights_from_disk(str(model_dir), "3", flush_cache=True, abort_all=False)
        )
        await asyncio.sleep(0)
        late = asyncio.ensure_future(backend.submit(request("b")))
        assert (await update).success
        assert (await task).versions == [("default", 0, 2000)]
        assert (await late).versions[0][0] == "3"

    run(model_dir, do)


def test_the_cache_is_flushed_only_when_nothing_runs(model_dir: Path) -> None:
    async def do(backend: FakeBackend) -> None:
        assert await backend.flush_cache()
        task = asyncio.ensure_future(backend.submit(long("a", 400)))
        await tokens_made(backend, 1)
        assert not await backend.flush_cache()
        await backend.pause("retract")
        assert await backend.flush_cache()
        task.cancel()

    run(model_dir, do)


def test_a_caller_that_leaves_takes_its_request_with_it(model_dir: Path) -> None:
    async def do(backend: FakeBackend) -> None:
        task = asyncio.ensure_future(backend.submit(long("a", 4000)))
        await tokens_made(backend, 1)
        task.cancel()
        await asyncio.wait([task])
        assert backend.load().running == 0
        assert not backend._live

    run(model_dir, do)


def test_a_thousand_requests_take_no_longer_than_their_tokens(model_dir: Path) -> None:
    async def do(backend: FakeBackend) -> None:
        results = await asyncio.gather(*(backend.submit(request(str(i), seed=i)) for i in range(1000)))
        assert all(result.finish["type"] == "stop" for result in results)

    run(model_dir, do)


def test_a_broadcast_is_taken_inside_a_session_of_a_joined_group_only(model_dir: Path) -> None:
    async def do(backend: FakeBackend) -> None:
        member = GroupMember("g", "127.0.0.1:1", 1, 2, "gloo")
        tensors = [TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", (4,))]

        async def update(group: str = "g", version: str | None = "7") -> str:
            outcome = await backend.update_weights_from_group(
                group, tensors, version, flush_cache=True, abort_all=False
            )
            assert outcome.success == outcome.message.startswith("Succeeded")
            return outcome.message

        assert (await backend.init_group(member)).success
        assert "exists already" in (await backend.init_group(member)).message
        assert "must run between" in await update()
        assert (await backend.begin_update()).success and not (await backend.begin_update()).success
        assert "['g']" in await update("other")
        assert (await update()).endswith("Weight version updated to 7.") and backend.weight_version == "7"
        assert await update(version=None) == "Succeeded to update parameter online."
        assert await backend.checksums() == {"script": "7", "a": "float32[2, 3]", "b": "bfloat16[4]"}
        assert (await backend.end_update()).success and not (await backend.end_update()).success
        assert (await backend.destroy_group("g")).success and not (await backend.destroy_group("g")).success

    run(model_dir, do)
