"""Tiny real models: random Qwen2 weights under a byte-level tokenizer."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest


def make_model_dir(path: Path, seed: int, **changes: Any) -> Path:
    """Write a model directory: 2 layers, hidden 64, 512 ids, random fp32 weights from `seed`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the answer is 12 + 34 = 46", "user assistant system question"] * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "initializer_range": 0.2,  # wide logits: a step's log-probs differ, and so do tokens of different weights
    }
    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**{**settings, **changes})).float().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape with different weights."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        pytest.skip("torch and transformers are not installed (extra `train`)")
    base = tmp_path_factory.mktemp("models")
    return [make_model_dir(base / f"model-{seed}", seed) for seed in (0, 1)]


class Server:
    """An engine program on a free port of 127.0.0.1."""

    def __init__(self, module: str, *args: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", module, "--port", str(self.port), *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def wait_until_up(self, timeout_s: float = 150.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.get("/health") != 200:
            if self.process.poll() is not None:
                raise AssertionError(f"the engine ended with {self.process.returncode}: {self.process.stderr.read()}")
            assert time.monotonic() < deadline, f"the engine is not up after {timeout_s} s"
            time.sleep(0.02)

    def get(self, path: str, timeout_s: float = 5.0) -> int:
        """Status of a GET, 0 when nothing listens."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return int(error.code)
        except OSError:
            return 0

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stderr.close()


class Client:
    """JSON calls to one engine."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http = http
        self.url = url

    async def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        async with self.http.post(self.url + path, json={} if body is None else body) as answer:
            text = await answer.text()
            assert answer.status == status, f"{path}: {answer.status} {text}"
            return json.loads(text) if answer.content_type == "application/json" else text

    async def get(self, path: str) -> Any:
        async with self.http.get(self.url + path) as answer:
            assert answer.status == 200
            return await answer.json()

    async def generate(self, ids: list[int], rid: str | None = None, **sampling: Any) -> Any:
        body = {"input_ids": ids, "sampling_params": {"ignore_eos": True, **sampling}, "return_logprob": True}
        return await self.post("/generate", body if rid is None else {**body, "rid": rid})

    async def running(self, count: int, tokens: int = 0) -> None:
        """Wait until that many requests run and hold that many tokens, prompts included."""
        while True:
            load = (await self.get("/v1/loads"))["loads"][0]
            if load["num_running_reqs"] >= count and load["num_used_tokens"] >= tokens:
                return
            await asyncio.sleep(0.005)


def _talk(url: str, do: Callable[[Client], Awaitable[None]], timeout_s: float = 60.0) -> None:
    """Run `do` with a client of the engine at `url`."""

    async def main() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            await asyncio.wait_for(do(Client(http, url)), timeout_s)

    asyncio.run(main())


@pytest.fixture(scope="session")
def engine(models: list[Path]) -> Iterator[Server]:
    """An embedded engine that serves the first model; tests leave it continued and with that model."""
    server = Server("miles_hpc.engine.serve", "--model-path", str(models[0]), "--threads", "1")
    try:
        server.wait_until_up()
        yield server
    finally:
        server.stop()


@pytest.fixture
def fresh(engine: Server, models: list[Path]) -> Iterator[Server]:
    """The engine with the first model and the label `v0`, whatever the test before did."""

    async def reset(client: Client) -> None:
        await client.post("/abort_request", {"abort_all": True})
        await client.post("/continue_generation")
        await client.post("/update_weights_from_disk", {"model_path": str(models[0]), "weight_version": "v0"})

    _talk(engine.url, reset)
    yield engine


def _recomputed(model_dir: Path, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of all tokens but the first, by one full fp32 forward pass of the model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()


@pytest.fixture(scope="session")
def talk() -> Callable[..., None]:
    """`talk(url, do)` runs the coroutine function `do` with a Client."""
    return _talk


@pytest.fixture(scope="session")
def recomputed() -> Callable[..., list[float]]:
    """`recomputed(model_dir, ids, temperature)`: log-probs of one full forward pass."""
    return _recomputed


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """`start(module, *args)` starts an engine program; it is ended with the test."""
    servers: list[Server] = []

    def one(module: str, *args: str) -> Server:
        servers.append(Server(module, *args))
        return servers[-1]

    yield one
    for server in servers:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    """`make_model(path, seed, **config changes)` writes a tiny model directory."""
    return make_model_dir


@pytest.fixture(scope="session")
def server_class() -> type[Server]:
    """The class of engine programs, for fixtures of their own."""
    return Server
