"""Both engines as programs: start, stop, memory and bad model directories."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

EMBEDDED, FAKE = "miles_hpc.engine.serve", "miles_hpc.engine.fake"
START_S = 120
"""The import of torch on a busy machine."""


def test_the_embedded_engine_exits_promptly_on_sigterm_paused_and_under_load(
    start: Callable[..., Any], talk: Callable[..., None], models: list[Path]
) -> None:
    server = start(EMBEDDED, "--model-path", str(models[0]))
    server.wait_until_up()

    async def do(client: Any) -> None:
        tasks = [asyncio.ensure_future(client.generate([5, 6], max_new_tokens=900)) for _ in range(4)]
        await client.running(4)
        await client.post("/pause_generation", {"mode": "in_place"})
        begun = time.monotonic()
        assert await asyncio.to_thread(server.stop) == 0
        assert time.monotonic() - begun < 10.0
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for answer in answers:
            assert isinstance(answer, Exception) or answer["meta_info"]["finish_reason"]["type"] == "abort"

    talk(server.url, do)


@pytest.mark.parametrize("module", [EMBEDDED, FAKE])
def test_a_model_directory_without_tokenizer_is_one_line_and_status_2(
    start: Callable[..., Any], models: list[Path], tmp_path: Path, module: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models[0], broken)
    (broken / "tokenizer.json").unlink()
    process = start(module, "--model-path", str(broken)).process
    assert process.wait(START_S) == 2
    lines = process.stderr.read().splitlines()
    assert len(lines) == 1
    assert "tokenizer.json: missing" in lines[0]


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
def test_a_directory_that_is_no_model_is_named(
    start: Callable[..., Any], models: list[Path], tmp_path: Path, damage: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models[0], broken)
    (broken / damage).unlink()
    process = start(EMBEDDED, "--model-path", str(broken)).process
    assert process.wait(START_S) == 2
    assert f"error: {broken}: not a causal LM" in process.stderr.read()


def test_a_busy_port_ends_the_start(start: Callable[..., Any], models: list[Path]) -> None:
    server = start(FAKE, "--model-path", str(models[0]))
    server.wait_until_up()
    second = start(FAKE, "--model-path", str(models[0]), "--port", str(server.port))
    assert second.process.wait(START_S) == 1
    lines = second.process.stderr.read().splitlines()
    assert len(lines) == 1
    assert f"cannot listen on 127.0.0.1:{server.port}" in lines[0]


def test_the_fake_engine_is_small_and_serves_many_at_once(
    start: Callable[..., Any], talk: Callable[..., None], models: list[Path]
) -> None:
    server = start(FAKE, "--model-path", str(models[0]), "--token-ms", "2")
    server.wait_until_up()

    async def do(client: Any) -> None:
        begun = time.monotonic()
        answers = await asyncio.gather(*(client.generate([i % 500 + 3, 7], max_new_tokens=100) for i in range(300)))
        assert all(len(answer["output_ids"]) == 100 for answer in answers)
        assert time.monotonic() - begun < 5.0

    talk(server.url, do)
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    kilobytes = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert kilobytes < 60 * 1024
    begun = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begun < 10.0


def test_the_fake_engine_imports_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, miles_hpc.engine.fake, miles_hpc.engine.api, miles_hpc.engine.serve;"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=START_S, check=True)
    assert found.stdout.strip() == "[]"
