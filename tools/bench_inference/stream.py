"""What does a streamed answer cost its client when each event holds all of it so far, and when it holds what is new?

One answer at a time, from a fake engine of either form straight to the generate client, in turns, in about as many
events as the engines of a run would send for its longest answers; the timer of a busy machine makes them fewer. What
engine and router spend on it is not here.
"""

import statistics
import sys
import time
from unittest import mock

import parts

from miles_hpc.inference import streams
from miles_hpc.inference.generate import GenerateClient, SamplingParams
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.merging import Events
from miles_hpc.specs.sglang import stream_interval

LENGTHS = (2000, 8000)
EVENT_S = 0.025
PROMPT = list(range(32, 96))
FORMS = {"whole": [], "new": ["--incremental-streaming-output"]}
# A fake engine's events come by time; at its own four a second, as many as by tokens would take half a minute.
ENGINE = (
    "import sys; from miles_hpc.engine import fake, streaming; "
    f"streaming.INTERVAL_S = {EVENT_S}; sys.exit(fake.main(sys.argv[1:]))"
)
ROWS = tuple(
    (f"stream_{tokens}_{name}", f"{text}, {tokens:,} tokens", unit, "", None)
    for tokens in LENGTHS
    for name, text, unit in (
        ("whole_mb", "bytes of an answer, all of it in each event", "MB"),
        ("new_mb", "bytes of an answer, what is new in each event", "MB"),
        ("bytes_ratio", "ratio of the bytes", ""),
        ("whole_cpu_ms", "CPU of the client, all of it in each event", "ms"),
        ("new_cpu_ms", "CPU of the client, what is new in each event", "ms"),
        ("cpu_ratio", "ratio of the CPU", ""),
    )
)
sizes = []  # of the events of the answer under way


class Counted(Events):
    def take(self, event):
        sizes.append(len(event))
        super().take(event)


class Whole(SamplingParams, frozen=True, kw_only=True):
    def payload(self):
        return {**super().payload(), "ignore_eos": True}


async def measure(run_dir, rounds=6):
    model, found = parts.tiny_model(run_dir), {}
    with mock.patch.object(streams, "Events", Counted):
        for tokens in LENGTHS:
            command = [sys.executable, "-c", ENGINE, "--model-path", str(model), "--context-length", str(2 * tokens)]
            command += ["--token-ms", str(EVENT_S / stream_interval(tokens) * 1e3)]
            ports = {form: parts.free_port() for form in FORMS}
            with parts.running([[*command, *FORMS[form], "--port", str(port)] for form, port in ports.items()]):
                found |= await in_turns(tokens, {form: f"http://{parts.HOST}:{ports[form]}" for form in FORMS}, rounds)
    return found


async def in_turns(tokens, urls, rounds):
    found, took = {}, {form: [] for form in urls}
    async with open_http() as http:
        for url in urls.values():
            parts.wait_http(f"{url}/health")
        for seed in range(rounds + 1):
            for form, url in urls.items():
                client = GenerateClient(lambda url=url: url, http, 384)
                sizes.clear()
                cpu = time.process_time()
                said = await client.generate(PROMPT, Whole(max_new_tokens=tokens, seed=seed), deadline_s=120)
                cpu = time.process_time() - cpu
                assert (len(said.token_ids), client.retries) == (tokens, 0)
                if seed:  # the first one opens the connection
                    took[form].append({"mb": sum(sizes) / 1e6, "cpu_ms": cpu * 1e3, "events": len(sizes)})
    for form, ones in took.items():
        for name in ones[0]:
            found[f"{form}_{name}"] = statistics.median(one[name] for one in ones)
        found[f"{form}_cpu_worst_ms"] = max(one["cpu_ms"] for one in ones)
    found["bytes_ratio"] = found["whole_mb"] / found["new_mb"]
    found["cpu_ratio"] = found["whole_cpu_ms"] / found["new_cpu_ms"]
    return {f"stream_{tokens}_{name}": value for name, value in found.items()}
