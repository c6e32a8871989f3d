import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.transport.batch import LengthMismatch, RolloutBatch, SampleArrays
from miles_hpc.transport.columns import SchemaError, text_parts, unpack_text
from miles_hpc.transport.parcel import Packing, read_parcel

pytestmark = pytest.mark.unit


def sample(tokens=3, reward=1.0, index=0, **changes):
    values = {
        "token_ids": list(range(tokens)),
        "loss_mask": [i % 2 for i in range(tokens)],
        "logprobs": [-0.5 * i for i in range(tokens)],
        "reward": reward,
        "versions": [(7, 0, tokens)] if tokens else [],
        "sample_index": index,
        "prompt_index": index * 10,
        "texts": {"response": f"text {index}"},
    }
    return SampleArrays(**{**values, **changes})


def through_a_parcel(batch):
    return RolloutBatch.from_parcel(batch.packing().to_bytes())


def assert_same(left, right):
    left_columns, right_columns = left.columns(), right.columns()
    assert left_columns.keys() == right_columns.keys()
    for name, column in left_columns.items():
        assert column.dtype == right_columns[name].dtype, name
        np.testing.assert_array_equal(column, right_columns[name], err_msg=name)


samples = st.lists(
    st.builds(
        lambda tokens, reward, index, text, routed: sample(
            tokens,
            reward,
            index,
            texts={"response": text},
            extra={"routed_experts": np.full((tokens, 2), routed, np.int32)},
        ),
        st.integers(0, 20),
        st.floats(width=32, allow_nan=True),
        st.integers(0, 2**40),
        st.text(st.characters(), max_size=8),
        st.integers(-(2**31), 2**31 - 1),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(samples)
def test_a_parcel_gives_back_the_same_batch(items):
    batch = RolloutBatch.pack(items)
    again = through_a_parcel(batch)
    assert_same(again, batch)
    assert [again.text("response", i) for i in range(len(items))] == [item.texts["response"] for item in items]


@settings(deadline=None)
@given(samples, st.data())
def test_slicing_and_joining_again_changes_nothing(items, data):
    batch = RolloutBatch.pack(items)
    cut = data.draw(st.integers(0, len(items)))
    assert_same(RolloutBatch.concat([batch.slice(0, cut), batch.slice(cut, len(items))]), batch)


@settings(deadline=None)
@given(samples, st.integers(1, 5))
def test_ranks_get_every_sample_once_in_stride_order(items, size):
    batch = RolloutBatch.pack(items)
    for rank in range(size):
        assert_same(
            batch.split(rank, size), RolloutBatch.pack([*items[rank::size]]) if items[rank::size] else batch.take([])
        )


def test_decoded_arrays_view_the_parcel_and_are_read_only():
    memory = RolloutBatch.pack([sample(1000)]).packing().to_bytes()
    batch = RolloutBatch.from_parcel(memory)
    assert np.shares_memory(np.frombuffer(memory, np.uint8), batch.token_ids)
    with pytest.raises(ValueError, match="read-only"):
        batch.token_ids[0] = 1


def test_nan_and_infinity_pass():
    batch = through_a_parcel(RolloutBatch.pack([sample(3, math.nan, logprobs=[math.nan, math.inf, -math.inf])]))
    assert math.isnan(batch.rewards[0])
    assert math.isnan(batch.logprobs[0]) and list(batch.logprobs[1:]) == [math.inf, -math.inf]


def test_an_empty_batch_and_an_empty_response_pass():
    assert len(through_a_parcel(RolloutBatch.pack([]))) == 0
    assert through_a_parcel(RolloutBatch.pack([sample(0)])).lengths.tolist() == [0]


def test_a_long_response_passes():
    assert through_a_parcel(RolloutBatch.pack([sample(128 * 1024)])).lengths.tolist() == [128 * 1024]


@pytest.mark.parametrize("name", ["loss_mask", "logprobs"])
def test_a_sample_of_mixed_lengths_is_named_by_its_index(name):
    with pytest.raises(LengthMismatch, match=f"sample 1 has 3 tokens but {name} has 2"):
        RolloutBatch.pack([sample(), sample(**{name: [0, 0]})])


def test_a_version_span_outside_the_sample_is_named():
    with pytest.raises(LengthMismatch, match=r"sample 0: version 4 spans 0:9 of 3"):
        RolloutBatch.pack([sample(versions=[(4, 0, 9)])])


def test_mixed_column_types_are_refused():
    with pytest.raises(SchemaError, match=r"sample 0 of int32 .*one type and width"):
        RolloutBatch.pack([sample(extra={"x": np.zeros(3, np.int32)}), sample(extra={"x": np.zeros(3, np.float32)})])
    left = RolloutBatch.pack([sample(extra={"x": np.zeros(3, np.int32)})])
    right = RolloutBatch.pack([sample(extra={"x": np.zeros(3, np.int64)})])
    with pytest.raises(SchemaError, match="'x' has types int32 and int64"):
        RolloutBatch.concat([left, right])
    with pytest.raises(SchemaError, match="differ in columns"):
        RolloutBatch.concat([left, RolloutBatch.pack([sample()])])


def test_a_status_without_a_code_is_refused():
    with pytest.raises(SchemaError, match="'odd'"):
        RolloutBatch.pack([sample(status="odd")])


def test_bytes_that_are_no_unicode_become_replacement_characters():
    assert unpack_text(np.array([0, 2]), np.array([0xFF, 0x41], np.uint8), 0) == "\ufffdA"
    offsets, parts = text_parts(["a", "\ud800x", b"\xff"])
    assert [unpack_text(offsets, np.concatenate(parts), i) for i in range(3)] == ["a", "\ud800x", "\ufffd"]


def test_parcels_of_another_kind_version_or_size_are_refused():
    memory = bytes(RolloutBatch.pack([sample()]).packing().to_bytes())
    with pytest.raises(SchemaError, match="expected a 'other'"):
        read_parcel("other", memory)
    with pytest.raises(SchemaError, match="ends beyond the"):
        RolloutBatch.from_parcel(memory[:-64])
    with pytest.raises(SchemaError, match="are no parcel"):
        RolloutBatch.from_parcel(b"")
    with pytest.raises(SchemaError, match="does not decode"):
        RolloutBatch.from_parcel(b"\x04\0\0\0\xc1\xc1\xc1\xc1")
    with pytest.raises(SchemaError, match=r"version 2\.0"):
        RolloutBatch.from_parcel(with_header(memory, major=2))
    with pytest.raises(SchemaError, match="lacks the columns"):
        RolloutBatch.from_parcel(Packing("rollout_batch", {"offsets": np.zeros(1, np.int64)}).to_bytes())
    with pytest.raises(SchemaError, match="int64; expected int32"):
        columns = {**RolloutBatch.pack([sample()]).columns(), "token_ids": np.zeros(3, np.int64)}
        RolloutBatch.from_parcel(Packing("rollout_batch", columns).to_bytes())


def with_header(memory, **changes):
    size = int.from_bytes(memory[:4], "little")
    header = msgspec.msgpack.encode({**msgspec.msgpack.decode(memory[4 : 4 + size]), **changes})
    base, old = -(-(4 + len(header)) // 64) * 64, -(-(4 + size) // 64) * 64
    return (len(header).to_bytes(4, "little") + header).ljust(base, b"\0") + memory[old:]


def test_columns_and_fields_of_a_newer_minor_version_are_left_out():
    batch = RolloutBatch.pack([sample()])
    memory = bytes(Packing("rollout_batch", {**batch.columns(), "later": np.zeros(4)}).to_bytes())
    assert_same(RolloutBatch.from_parcel(with_header(memory, minor=9, unheard_of=1)), batch)


def test_a_parcel_keeps_its_bytes():
    memory = Packing("rollout_batch", {"rewards": np.array([1.5], np.float32)}, {"a": 1}).to_bytes()
    assert memory.hex() == GOLDEN_PARCEL
    assert read_parcel("rollout_batch", memory)[1] == {"a": 1}


def test_a_text_array_is_no_column():
    with pytest.raises(SchemaError, match="expected numbers"):
        Packing("x", {"name": np.array(["a"])})


def test_parts_of_a_column_are_laid_one_behind_the_other():
    parts = [np.arange(3, dtype=np.int32), np.zeros(0, np.int32), np.arange(2, dtype=np.int32)]
    columns, _ = read_parcel("x", Packing("x", {"a": parts, "b": parts[:1]}).to_bytes())
    assert columns["a"].tolist() == [0, 1, 2, 0, 1] and columns["b"].tolist() == [0, 1, 2]
    with pytest.raises(SchemaError, match="parts of int32"):
        Packing("x", {"a": [parts[0], np.zeros(1, np.int64)]})
    with pytest.raises(SchemaError, match="no parts"):
        Packing("x", {"a": []})


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(1, 900))
def test_a_parcel_that_is_written_step_by_step_is_final_up_to_where_it_says(sizes, step):
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 100, size, dtype=np.int32) for size in sizes]
    wide = rng.integers(0, 100, (sum(sizes), 3)).astype(np.uint8)
    made = Packing("x", {"parts": parts, "wide": wide, "one": np.float32([1.5])})
    whole = bytearray(made.nbytes)
    made.write(memoryview(whole))
    again, ends = bytearray(made.nbytes), [0]
    for end in made.writing(memoryview(again), step):
        assert again[:end] == whole[:end] and ends[-1] <= end
        # A step is at most its size and one part more, or a row, and the room between columns.
        assert end - ends[-1] <= 2 * step + 4 * 300 + 2 * 64
        ends.append(end)
    assert ends[-1] == made.nbytes and again == whole
    assert read_parcel("x", again)[0]["wide"].tolist() == wide.tolist()


def test_a_slice_outside_the_batch_is_refused():
    with pytest.raises(IndexError, match="slice 0:2 of a batch of 1"):
        RolloutBatch.pack([sample()]).slice(0, 2)


GOLDEN_PARCEL = (
    "4400000085a46b696e64ad726f6c6c6f75745f6261746368a56d616a6f7201a56d696e6f7200a7636f6c756d6e739194a772"
    "657761726473a33c6634910100a46d65746181a1610100000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000c03f000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
)
