"""Weights that do not fit are seen in the headers of their files, and no engine meets them."""

import asyncio
import json
import struct

import pytest

from miles_hpc.inference.broadcast import TensorHeader, update_from_sender
from miles_hpc.inference.engine_api import EngineApi, EngineRefused
from miles_hpc.inference.fit import damage, misfit, shapes_of
from miles_hpc.inference.weights import WeightsNotTaken, load_from_disk, update_from_disk
from miles_hpc.inference.windows import EngineInfo
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation

pytestmark = pytest.mark.unit

KNOWN = {"a": (4, 2), "b": (2,), "lm_head": (4, 2)}


def write(directory, shapes, file="model.safetensors"):
    directory.mkdir(exist_ok=True)
    header = {name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (directory / file).write_bytes(struct.pack("<Q", len(text)) + text)
    return str(directory)


def test_the_shapes_of_all_files_of_a_directory_are_read_and_what_is_unreadable_says_nothing(tmp_path):
    write(tmp_path / "m", {"a": (4, 2)}, "model-1.safetensors")
    write(tmp_path / "m", {"b": (2,)}, "model-2.safetensors")
    assert shapes_of(tmp_path / "m") == {"a": (4, 2), "b": (2,)}
    (tmp_path / "m" / "model-3.safetensors").write_bytes(b"short")
    assert shapes_of(tmp_path / "m") is None
    assert shapes_of(tmp_path / "nowhere") is None and shapes_of(tmp_path) is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (KNOWN, ""),
        ({"a": (4, 2), "b": (2,)}, ""),  # tied: left out
        ({**KNOWN, "b_scale": (1,)}, ""),  # quantized: more
        ({**KNOWN, "a": (2, 4)}, "a has shape [2, 4] and should have [4, 2]"),
        ({"x.a": (4, 2), "b": (2,), "lm_head": (4, 2)}, "x.a is unknown; a is missing"),
        ({"x": (1,), "y": (1,)}, "x is unknown; y is unknown; a is missing (and 2 more)"),
    ],
)
def test_other_shapes_and_other_names_do_not_fit(given, why):
    assert misfit(KNOWN, given) == why


def run(parts, scenario):
    async def main():
        async with parts() as p:
            engine = await p.engine()
            info = EngineInfo(cell="engine-policy-0-00000", generation=Generation(1, 1), url=engine.url)
            return await asyncio.wait_for(scenario(p, engine, info), 20)

    asyncio.run(main())


def test_an_engine_is_told_nothing_of_weights_that_do_not_fit(parts, tmp_path):
    bad = write(tmp_path / "bad", {**KNOWN, "a": (2, 2)})

    class Sender:
        backend = "gloo"
        buckets = ((TensorHeader("a", "float32", (2, 2)),),)

    async def scenario(p, engine, info):
        engine.path = write(tmp_path / "served", KNOWN)
        with pytest.raises(WeightsNotTaken, match=r"weights 2 from .*bad do not fit the model: a has shape \[2, 2\]"):
            await update_from_disk([info], bad, 2, http=p.http)
        with pytest.raises(EngineRefused, match="do not fit"):
            await load_from_disk(EngineApi(engine.url, p.http), bad, 2)
        with pytest.raises(WeightsNotTaken, match="were sent to no engine"):
            await update_from_sender([info], Sender(), 2, HostAndPort("127.0.0.1", 1), http=p.http)
        assert set(engine.calls) == {"/model_info"} and engine.paused is None

    run(parts, scenario)


def test_weights_that_fit_and_a_model_that_cannot_be_read_here_are_no_reason(parts, tmp_path):
    good = write(tmp_path / "good", KNOWN)

    async def scenario(p, engine, info):
        for served in (write(tmp_path / "served", KNOWN), "/on/another/machine"):
            engine.path = served
            assert (await update_from_disk([info], good, 2, http=p.http)).failed == {}

    run(parts, scenario)


def test_files_that_are_cut_off_missing_or_no_safetensors_are_named(tmp_path):
    from numpy import zeros
    from safetensors.numpy import save_file

    file, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"x": zeros((4, 2), "float32"), "y": zeros(3, "float32")}, file)
    save_file({}, other)
    assert damage(tmp_path) == "" == damage(tmp_path / "nowhere")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    size = f"a.safetensors has {len(whole) - 1} bytes where its header says {len(whole)}: it was cut off"
    assert damage(tmp_path).startswith(size)
    for piece in (whole[:40], whole[:3], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        file.write_bytes(piece)
        assert damage(tmp_path).startswith("a.safetensors has no header that can be read")
    file.write_bytes(whole)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": file.name, "z": "c.safetensors"}}))
    assert damage(tmp_path) == "c.safetensors of its index is missing: copy it there"
    index.write_text("[]")
    assert damage(tmp_path) == ""


def test_only_what_an_engine_would_load_is_looked_at(tmp_path):
    from numpy import zeros
    from safetensors.numpy import save_file

    index, old = tmp_path / "model.safetensors.index.json", tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    (tmp_path / "pytorch_model-1.bin").write_bytes(b"pickled")
    assert damage(tmp_path) == "", "weights of the old form, and an index that was left behind"
    old.write_text(json.dumps({"weight_map": {"x": "pytorch_model-1.bin", "y": "pytorch_model-2.bin"}}))
    assert damage(tmp_path) == "pytorch_model-2.bin of its index is missing: copy it there"
    save_file({"x": zeros(2, "float32")}, tmp_path / "a.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert damage(tmp_path) == "", "no engine loads a file that the index does not name"
    index.unlink()
    assert damage(tmp_path).startswith("consolidated.safetensors has no header that can be read")
