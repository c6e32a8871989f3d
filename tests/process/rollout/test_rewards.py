import asyncio
import sys
from pathlib import Path

import pytest
from aiohttp import web

from miles_hpc.rollout.functions import FunctionPathError
from miles_hpc.rollout.rewards import RewardError, RewardTimeout, Scorer
from miles_hpc.rollout.sample import Sample

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def functions_on_the_path(monkeypatch):
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", here)
    yield
    sys.modules.pop("reward_functions", None)


def sample(response="ab", label="ab"):
    return Sample(group="g", index=0, prompt_index=0, epoch=0, prompt="p", seed=1, response=response, label=label)


def score(path, *samples, timeout_s=30.0, **options):
    async def run():
        scorer = Scorer(path, timeout_s=timeout_s, **options)
        try:
            return await asyncio.gather(*(scorer.score(item) for item in samples), return_exceptions=True)
        finally:
            await scorer.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_a_plain_function_runs_in_a_process_of_its_own_and_may_print():
    assert score("reward_functions:length", *[sample("x" * n) for n in range(6)]) == [0, 1, 2, 3, 4, 5]


def test_a_plain_function_may_take_the_samples_of_all_groups_at_once():
    texts = ["a", "bb", "", "x"]
    good, second, nan, word = score("reward_functions:lengths", *map(sample, texts), batch_size=4, processes=1)
    assert (good, second) == (1.0, 2.0) and good.category == "of 4"
    assert isinstance(nan, RewardError) and "expected a finite number" in str(nan)
    assert isinstance(word, RewardError) and "'no number'" in str(word)


def test_signals_work_in_a_reward():
    assert score("reward_functions:uses_alarm", sample()) == [2.0]


def test_a_reward_that_hangs_fails_its_sample_and_the_next_ones_are_scored():
    results = score("reward_functions:hangs_on_h", sample("h"), sample("h"), sample(), sample(), timeout_s=1.5)
    assert [type(result) for result in results[:2]] == [RewardTimeout] * 2 and results[2:] == [1.0, 1.0]
    assert "reward.timeout_s = 1.5" in str(results[0])


@pytest.mark.parametrize("function", ["raises", "async_raises"])
def test_a_reward_that_raises_fails_its_sample_with_its_traceback(function):
    (error, second) = score(f"reward_functions:{function}", sample(), sample())
    assert isinstance(error, RewardError) and isinstance(second, RewardError)
    assert "no rule for ab" in str(error) and "reward_functions.py" in str(error)


def test_a_reward_that_is_not_finite_fails_its_sample():
    (error,) = score("reward_functions:not_a_number", sample())
    assert isinstance(error, RewardError) and "finite" in str(error)


def test_a_reward_process_that_dies_is_replaced():
    results = score("reward_functions:dies", sample(), sample(), sample())
    assert all(isinstance(result, RewardError) and "ended with code -9" in str(result) for result in results)


def test_a_coroutine_function_that_hangs_is_cancelled():
    results = score("reward_functions:slow_on_h", sample("h"), sample(), timeout_s=0.2)
    assert isinstance(results[0], RewardTimeout) and results[1] == 3.0


def test_math_verify_compares_values_not_texts():
    pytest.importorskip("math_verify")
    answers = [
        sample("so it is $\\frac{2}{4}$", "0.5"),
        sample("\\boxed{42}", "42"),
        sample("41", "42"),
        sample("nothing", "42"),
        sample("1", ""),
    ]
    *results, error = score("math_verify", *answers)
    assert results == [1.0, 1.0, 0.0, 0.0]
    assert isinstance(error, RewardError) and "no mathematical expression" in str(error)


def test_a_path_that_does_not_import_is_refused_at_once():
    async def make(path):
        Scorer(path, timeout_s=1)

    for path, text in [
        ("no_such_module:f", "importing no_such_module failed"),
        ("reward_functions:nothing", "has no 'nothing'"),
        ("reward_functions", "is not module:function"),
        ("reward_functions:__doc__", "expected a function"),
    ]:
        with pytest.raises(FunctionPathError, match=text):
            asyncio.run(make(path))


def test_a_remote_reward_is_asked_over_http_and_its_failures_are_named():
    async def run():
        async def answer(request):
            body = await request.json()
            found = {"good": {"reward": 0.5}, "plain": 2, "odd": {"score": 1}}
            if body["response"] == "broken":
                return web.Response(status=500, text="no model")
            return web.json_response(found[body["response"]])

        app = web.Application()
        app.router.add_post("/score", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        scorer = Scorer("remote_http", timeout_s=20, url=f"http://127.0.0.1:{port}/score")
        try:
            return await asyncio.gather(
                *(scorer.score(sample(text)) for text in ("good", "plain", "odd", "broken")), return_exceptions=True
            )
        finally:
            await scorer.close()
            await runner.cleanup()

    good, plain, odd, broken = asyncio.run(asyncio.wait_for(run(), 60))
    assert (good, plain) == (0.5, 2.0)
    assert "expected a number as reward" in str(odd) and "answered 500: no model" in str(broken)


def test_a_reasoning_gym_answer_is_judged_by_the_tasks_own_verifier():
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("leg_counting", size=1, seed=1)[0]
    right = Sample(
        group="g",
        index=0,
        prompt_index=0,
        epoch=0,
        prompt=entry["question"],
        seed=1,
        metadata={"entry": entry},
        response=f"I count. <answer>{entry['answer']}</answer>",
    )
    wrong = Sample(**{**{name: getattr(right, name) for name in right.__struct_fields__}, "response": "one"})
    found = score("reasoning_gym", right, wrong, timeout_s=120)
    assert found[0] == 1.0 and found[1] < 0.5
