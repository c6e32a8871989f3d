"""How much of a bare client's throughput is left of the generate client, and at which CPU a request?

Both send through the same router to the same fake engines, in turns, with the same number in flight; the best round of
each counts, since what disturbs a round is neither's doing.
The bare client does what any client must: it posts the ids, reads the whole answer and decodes it. Ours streams,
watches for silence, and checks what came.
"""

import asyncio
import contextlib
import time

import aiohttp
import parts

from miles_hpc.inference.engine_api import EngineApi
from miles_hpc.inference.generate import GenerateClient, SamplingParams
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.router_api import RouterApi
from miles_hpc.wire.ids import Generation

ENGINES, IN_FLIGHT, TOKENS, LATENCY_MS = 4, 64, 2, 50.0
PROMPT = list(range(32, 96))


async def bare(url, count):
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(seed):
            body = {
                "input_ids": PROMPT,
                "sampling_params": {"max_new_tokens": TOKENS, "sampling_seed": seed, "temperature": 1.0},
                "return_logprob": True,
            }
            async with http.post(f"{url}/generate", json=body) as answer:
                assert answer.status == 200
                assert len((await answer.json())["output_ids"]) <= TOKENS

        return await timed(one, count)


async def ours(url, engines, count):
    book = {(f"engine-policy-0-{i:05d}", Generation(1, 1)): engine for i, engine in enumerate(engines)}
    async with open_http() as http:
        client = GenerateClient(lambda: url, http, 384, published_only=True, engines=lambda: book)

        async def one(seed):
            await client.generate(PROMPT, SamplingParams(max_new_tokens=TOKENS, seed=seed), deadline_s=60)

        found = await timed(one, count)
        assert client.retries == 0
        return found


async def timed(one, count):
    """Requests a second with IN_FLIGHT at any time, and CPU microseconds of this process a request."""
    numbers = iter(range(count))

    async def lane():
        for number in numbers:
            await one(number)

    await asyncio.gather(*(one(seed) for seed in range(IN_FLIGHT)))
    begun, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
    return count / (time.monotonic() - begun), (time.process_time() - cpu) / count * 1e6


async def measure(run_dir, rounds=8, count=800):
    model = parts.tiny_model(run_dir)
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(parts.fake_engines(model, ENGINES, LATENCY_MS / TOKENS))
        url = stack.enter_context(parts.router(run_dir, model))
        async with open_http() as http:
            await parts.list_engines(RouterApi(url, http), engines)
            for engine in engines:
                await EngineApi(engine, http).update_weight_version(1)
        pairs = [(await bare(url, count), await ours(url, engines, count)) for _ in range(rounds)]
    bare_per_s, client_per_s = max(one[0] for one, _ in pairs), max(two[0] for _, two in pairs)
    return {
        "bare_per_s": bare_per_s,
        "client_per_s": client_per_s,
        "client_ratio": client_per_s / bare_per_s,
        "bare_cpu_us": min(one[1] for one, _ in pairs),
        "client_cpu_us": min(two[1] for _, two in pairs),
    }
