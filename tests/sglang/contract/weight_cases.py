"""The contract of new weights, from disk and broadcast; see `cases`."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

from engine_contract import LONG, PROMPT, spans


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------------------ from disk
def test_new_weights_from_disk_give_their_tokens_label_and_path(engine):
    async def body(talk):
        answer = await talk.load(1, "v1")
        assert answer["success"] is True
        info = await talk.get("/model_info")
        assert (info["weight_version"], info["model_path"]) == ("v1", str(engine.models[1]))
        answer = await talk.generate(PROMPT, 24)
        assert answer["output_ids"] == engine.expected[1] != engine.expected[0]
        assert spans(answer) == [("v1", 0, 24)]

    engine.run(body)


def test_an_update_that_names_no_version_leaves_the_old_label(engine):
    async def body(talk):
        await talk.load(1, None)
        assert await talk.version() == "v0"
        assert (await talk.generate(PROMPT, 24))["output_ids"] == engine.expected[1]

    engine.run(body)


def test_a_path_without_weights_is_a_400_and_the_old_ones_keep_serving(engine):
    async def body(talk):
        bad = {"model_path": "/nowhere/at/all", "weight_version": "v9"}
        answer = await talk.post("/update_weights_from_disk", bad, status=400)
        assert answer["success"] is False and answer["message"]
        assert await talk.version() == "v0"
        assert (await talk.generate(PROMPT, 24))["output_ids"] == engine.expected[0]

    engine.run(body)


def misfit(model: Path, path: Path, fault: str) -> Path:
    """A copy of a model with one tensor of half the size, or under a name that nobody knows."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, path)
    tensors = load_file(str(path / "model.safetensors"))
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = tensors.pop(name)
    tensors[name if fault == "shape" else f"{name}.nobody"] = tensor[: len(tensor) // 2].clone()
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def test_retract_update_continue_shows_both_versions_and_a_new_request_only_the_new(engine):
    async def body(talk):
        one = talk.begin()
        await talk.running()
        await talk.post("/pause_generation", {"mode": "retract"})
        await talk.load(1, "v1")
        await talk.post("/continue_generation")
        new = await talk.generate(PROMPT, 24)
        assert (new["output_ids"], spans(new)) == (engine.expected[1], [("v1", 0, 24)])
        answer = await one
        (old_version, start, swap), (new_version, again, end) = spans(answer)
        assert (old_version, start, new_version, end) == ("v0", 0, "v1", LONG) and 0 < swap == again < LONG
        assert answer["meta_info"]["num_retractions"] == 1

    engine.run(body)


def test_in_place_without_flush_shows_both_versions(engine):
    async def body(talk):
        one = talk.begin()
        await talk.running()
        await talk.post("/pause_generation", {"mode": "in_place"})
        await talk.load(1, "v1", flush_cache=False)
        await talk.post("/continue_generation")
        answer = await one
        assert [version for version, _, _ in spans(answer)] == ["v0", "v1"]
        assert spans(answer)[-1][2] == LONG

    engine.run(body)


def test_in_place_with_a_flush_is_a_400(engine):
    async def body(talk):
        one = talk.begin()
        await talk.running()
        await talk.post("/pause_generation", {"mode": "in_place"})
        answer = await talk.load(1, "v1", status=400)
        assert answer["success"] is False
        assert await talk.version() == "v0"
        await talk.post("/abort_request", {"abort_all": True})
        await talk.post("/continue_generation")
        await one

    engine.run(body)


def test_the_cache_is_flushed_when_requests_are_retracted_and_refused_when_they_are_live(engine):
    async def body(talk):
        one = talk.begin()
        await talk.running()
        await talk.post("/flush_cache", status=400)
        await talk.post("/pause_generation", {"mode": "in_place"})
        await talk.post("/flush_cache", status=400)
        await talk.post("/continue_generation")
        await talk.post("/pause_generation", {"mode": "retract"})
        await talk.post("/flush_cache")
        await talk.post("/continue_generation")
        await talk.post("/abort_request", {"abort_all": True})
        await one

    engine.run(body)


def test_a_label_alone_changes_without_harm_only_when_abort_all_requests_is_false(engine):
    async def body(talk):
        one = talk.begin()
        await talk.running()
        await talk.post("/update_weight_version", {"new_version": "v5", "abort_all_requests": False})
        assert await talk.version() == "v5" and not one.done()
        await talk.post("/update_weight_version", {"new_version": "v6"})
        assert (await one)["meta_info"]["finish_reason"]["type"] == "abort"

    engine.run(body)


def test_checksums_tell_weights_apart_and_equal_ones_are_equal(engine):
    async def body(talk):
        async def sums():
            return (await talk.post("/weights_checker", {"action": "checksum"}))["ranks"][0]["checksums"]

        first = await sums()
        await talk.load(1, "v1")
        second = await sums()
        assert first.keys() == second.keys() and first != second
        await talk.load(0, "v0")
        assert await sums() == first

    engine.run(body)


# --------------------------------------------------------------------------------------- weights that are broadcast
def tensors_of(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(str(model / "model.safetensors"))


class Sender(threading.Thread):
    """Rank 0 of a group: joins, then broadcasts when told."""

    def __init__(self, port: int, tensors: dict[str, Any], name: str, ranks: int = 1) -> None:
        super().__init__(daemon=True)
        self._args = (port, tensors, name, ranks)
        self.go = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        from miles_hpc.engine.embedded.collective import UpdateGroup

        port, tensors, name, ranks = self._args
        try:
            group = UpdateGroup(f"127.0.0.1:{port}", rank=0, world_size=1 + ranks, name=name, timeout_s=60)
            assert self.go.wait(60)
            group.broadcast(tensors.values())
            group.close()
        except BaseException as error:
            self.error = error


def announced(tensors: dict[str, Any], name: str, version: str) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": name,
        "weight_version": version,
    }


def join(port: int, name: str) -> dict[str, Any]:
    return {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": name,
        "backend": "gloo",
    }


def test_broadcast_weights_give_their_tokens_and_label_with_requests_retracted(engine):
    async def body(talk):
        tensors, port, name = tensors_of(engine.models[1]), free_port(), f"g{time.monotonic_ns()}"
        one = talk.begin()
        await talk.running()
        await talk.post("/pause_generation", {"mode": "retract"})
        sender = Sender(port, tensors, name)
        await talk.post("/init_weights_update_group", join(port, name))
        await talk.post("/begin_weight_update")
        sender.go.set()
        answer = await talk.post("/update_weights_from_distributed", announced(tensors, name, "v1"))
        assert answer["success"] is True
        await talk.post("/end_weight_update")
        await talk.post("/destroy_weights_update_group", {"group_name": name})
        sender.join(30)
        assert sender.error is None
        assert await talk.version() == "v1"
        await talk.post("/continue_generation")
        assert [version for version, _, _ in spans(await one)] == ["v0", "v1"]
        assert (await talk.generate(PROMPT, 24))["output_ids"] == engine.expected[1]

    engine.run(body)


def test_tensors_are_taken_inside_a_session_only_and_sessions_do_not_nest(engine):
    async def body(talk):
        tensors = tensors_of(engine.models[1])
        await talk.post("/update_weights_from_distributed", announced(tensors, "none", "v1"), status=400)
        await talk.post("/end_weight_update", status=400)
        await talk.post("/begin_weight_update")
        await talk.post("/begin_weight_update", status=400)
        await talk.post("/update_weights_from_distributed", announced(tensors, "none", "v1"), status=400)
        await talk.post("/end_weight_update")
        assert await talk.version() == "v0"
        assert (await talk.generate(PROMPT, 24))["output_ids"] == engine.expected[0]

    engine.run(body)
