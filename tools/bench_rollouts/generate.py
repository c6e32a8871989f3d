"""1,000 generations at once from one rollout worker: how much of a bare client's throughput is left, at which CPU?

The bare client does what any client must for a sample that can be trained on: it posts the ids, reads the answer and
turns its token ids and log-probs into arrays; over the same HTTP library, with connections that are warm. It does so
in two forms: with the answer in one piece, and with a stream of partial answers, of which it takes the last. A rollout
worker streams, since only a stream tells a slow engine from a lost one.
"""

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time

import aiohttp
import msgspec
import numpy as np
import psutil
from groups import ANY, prepare, workers

from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.rollout.dispatch import Dispatcher
from miles_hpc.rollout.executor import Executor
from miles_hpc.rollout.published import PublishedVersions
from miles_hpc.train.make_model import make_model
from miles_hpc.transport.carriers import Outbox

COUNT = 1000
KINDS = {"64": (64, 5.0, 5), "512": (512, 2.0, 5), "8192": (8192, 0.25, 2), "512_paced": (512, 25.0, 2)}
"""Name -> tokens of an answer, milliseconds that one takes, and rounds.

Most come faster than any real engine gives them to 1,000 requests at once, so that client and engine are the limit;
the last has the pace of an engine with hundreds of requests.
"""


def endless_model(directory):
    """A model without a token that ends an answer: each is as long as the request allows."""
    model = make_model(MakeModelConfig(hidden_size=16, layers=1, heads=2), 0, directory)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        path = model / name
        if path.is_file():
            settings = json.loads(path.read_text())
            settings = {key: value for key, value in settings.items() if not key.startswith("eos_token")}
            path.write_text(json.dumps(settings))
    return model


@contextlib.contextmanager
def fake_engine(model, token_ms):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "miles_hpc.engine.fake", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--model-path", str(model), "--token-ms", str(token_ms), "--context-length", "65536"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MILES_HPC_PARENT": str(os.getpid())},
    )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(20)


async def bare_session(port):
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    for _ in range(600):
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(f"http://127.0.0.1:{port}/health") as answer:
                if answer.status == 200:
                    break
        await asyncio.sleep(0.1)
    url = f"http://127.0.0.1:{port}/update_weight_version"
    async with http.post(url, json={"new_version": "1", "abort_all_requests": False}) as answer:
        assert answer.status == 200, await answer.text()
    return http


async def bare_round(http, port, prompts, tokens, stream):
    """Seconds of each request, and of all."""
    times = []

    async def one(seed, prompt):
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": tokens, "sampling_seed": seed, "temperature": 1.0},
            "return_logprob": True,
            "stream": stream,
        }
        begun = time.monotonic()
        async with http.post(f"http://127.0.0.1:{port}/generate", json=body) as answer:
            found = await answer.read()
            assert answer.status == 200
        if stream:
            found = found[found.rindex(b'data: {"') + 6 : found.rindex(b"\n\ndata: [DONE]")]
        found = msgspec.json.decode(found)
        ids = np.array(found["output_ids"], np.int32)
        logprobs = np.array([row[0] for row in found["meta_info"]["output_token_logprobs"]], np.float32)
        assert len(ids) == len(logprobs) == tokens
        times.append(time.monotonic() - begun)

    begun = time.monotonic()
    await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts)))
    return times, time.monotonic() - begun


def p99_ms(times):
    return sorted(times)[int(len(times) * 0.99)] * 1e3


async def measure(run_dir, kind):
    """Medians of rounds that alternate, the first of each left out."""
    tokens, token_ms, rounds = KINDS[kind]
    model = endless_model(run_dir / "model")
    config = prepare(
        run_dir,
        COUNT,
        {
            "rollout": {
                "batch_size": COUNT,
                "samples_per_prompt": 1,
                "concurrency": COUNT,
                "max_response_tokens": tokens,
                "generate": "tiny:timed",
            },
            "reward": {"function": "tiny:reward"},
            "model": {"path": str(model)},
        },
    )
    tokenizer = ChatTokenizer(model)
    prompts = [tokenizer.render([{"role": "user", "content": f"p{index}"}]) for index in range(COUNT)]
    os.environ["BENCH_TIMES"] = str(run_dir / "times.json")
    found = {"bare": [], "streamed": [], "worker": []}
    with fake_engine(model, token_ms) as port:
        http = await bare_session(port)
        dispatcher = Dispatcher(ANY, run_dir, 0, lease_s=config.timing.dead)
        outbox = Outbox(ANY)
        running = asyncio.ensure_future(dispatcher.run())
        try:
            executor = Executor(config, 0, run_dir, dispatcher, outbox, PublishedVersions(run_dir))
            with workers(run_dir, 1, dispatcher.address, str(port)) as started:
                await executor.open({"incarnation": 1, "state": None}, [])
                watched = psutil.Process(started[0].pid)
                for rollout in range(1 + rounds):
                    for name in ("bare", "streamed"):
                        cpu = time.process_time()
                        times, seconds = await bare_round(http, port, prompts, tokens, name == "streamed")
                        found[name].append((seconds, time.process_time() - cpu, p99_ms(times)))
                    cpu, begun = sum(watched.cpu_times()[:2]), time.monotonic()
                    await executor.generate({"incarnation": 1, "rollout_id": rollout, "weight_version": 1}, [])
                    seconds, cpu = time.monotonic() - begun, sum(watched.cpu_times()[:2]) - cpu
                    times = json.loads((run_dir / "times.json").read_text())
                    found["worker"].append((seconds, cpu, p99_ms(times)))
                    await executor.prepare_commit({"incarnation": 1, "rollout_id": rollout}, [])
                    await executor.committed({"incarnation": 1, "rollout_id": rollout}, [])
        finally:
            await http.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            dispatcher.close()
            outbox.close()
    told = {}
    for name, all_rounds in found.items():
        seconds, cpu, p99 = map(statistics.median, zip(*all_rounds[1:], strict=True))
        told |= {f"{name}_per_s": COUNT / seconds, f"{name}_cpu_us": cpu / COUNT * 1e6, f"{name}_p99_ms": p99}
    for name in ("bare", "streamed"):
        pairs = list(zip(found[name], found["worker"], strict=True))[1:]
        told[f"ratio_{name}"] = statistics.median(theirs[0] / ours[0] for theirs, ours in pairs)
    return told
