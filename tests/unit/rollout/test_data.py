import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.config.schema import DataConfig, ReasoningGymConfig
from miles_hpc.rollout.data import DataError, DataSource, DataState, Keys, epoch_order, open_prompts, open_source
from miles_hpc.rollout.sample import PartialSample, sample_seed

pytestmark = pytest.mark.unit


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(count):
    return [{"prompt": f"p{i}", "label": i, "metadata": {"level": i}} for i in range(count)]


def test_json_lines_are_read_by_row_and_blank_lines_do_not_count(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "label": 1}\n\n{"prompt": [{"role": "user", "content": "b"}], "label": "x"}')
    prompts = open_prompts(str(path), Keys())
    assert [prompts[i].prompt for i in range(len(prompts))] == ["a", [{"role": "user", "content": "b"}]]
    assert prompts[1].label == "x" and prompts[0].metadata == {}


@pytest.mark.parametrize("text, expected", [("[2:4]", [2, 3]), ("[:2]", [0, 1]), ("[-1:]", [4]), ("[3:99]", [3, 4])])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_slice_selects_rows(tmp_path, text, expected, kind):
    path = tmp_path / f"p.{kind}"
    if kind == "jsonl":
        write(path, rows(5))
    else:
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows(5)), path)
    prompts = open_prompts(f"{path}@{text}", Keys())
    assert [prompts[i].label for i in range(len(prompts))] == expected
    assert [prompts[i].metadata for i in range(len(prompts))] == [{"level": i} for i in expected]


def test_rows_outside_the_slice_are_not_judged(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "label": 1}\n{broken\n')
    assert len(open_prompts(f"{path}@[:1]", Keys())) == 1


@pytest.mark.parametrize(
    "line, text",
    [
        ('{"prompt": "a"', "line 2: broken JSON"),
        ('{"question": "a", "label": 1}', r"line 2: no key 'prompt', found \['label', 'question'\].*data.prompt_key"),
        ('{"prompt": "a"}', "line 2: no key 'label'.*data.label_key"),
        ('{"prompt": 3, "label": 1}', "line 2: 'prompt' is 3; expected a text"),
        ('{"prompt": "", "label": 1}', "line 2: 'prompt' is ''"),
        ('{"prompt": [{"text": "a"}], "label": 1}', "line 2: 'prompt' is a list, but not of chat messages"),
        ('{"prompt": "a", "label": 1, "metadata": 3}', "line 2: 'metadata' is int"),
        ("[1]", "line 2: expected an object"),
        ('{"prompt": "\\ud800", "label": 1}', "line 2: broken JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, text):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "label": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=text) as caught:
        open_prompts(str(path), Keys())
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_or_empty_file_and_a_parquet_without_the_key_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such prompt file"):
        open_prompts(str(tmp_path / "none.jsonl"), Keys())
    with pytest.raises(DataError, match="no rows"):
        open_prompts(write(tmp_path / "empty.jsonl", []), Keys())
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist([{"question": "a"}]), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"no column 'prompt', found \['question'\]"):
        open_prompts(str(tmp_path / "p.parquet"), Keys())
    (tmp_path / "broken.parquet").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="not a parquet file"):
        open_prompts(str(tmp_path / "broken.parquet"), Keys())


def test_without_a_label_key_no_label_is_needed(tmp_path):
    prompts = open_prompts(write(tmp_path / "p.jsonl", [{"prompt": "a"}]), Keys(label=""))
    assert prompts[0].label is None


@given(st.integers(1, 40), st.integers(-5, 2**63), st.integers(0, 3))
def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch_only(count, seed, epoch):
    order = epoch_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == epoch_order(count, seed, epoch).tolist()


def test_the_order_never_changes_between_versions():
    assert epoch_order(8, 42, 0).tolist() == ORDER_0
    assert epoch_order(8, 42, 1).tolist() == ORDER_1


def test_epochs_wrap_and_ids_follow_the_data_order():
    source = DataSource(3, seed=1, shuffle=True)
    groups = source.next(7)
    assert [group.id for group in groups] == [
        f"e{epoch:05d}-i{index:09d}" for epoch in (0, 1, 2) for index in range(3)
    ][:7]
    assert sorted(group.prompt_index for group in groups[:3]) == [0, 1, 2]
    assert sorted(group.id for group in groups) == [group.id for group in groups]


def test_without_shuffling_each_epoch_has_the_files_order():
    assert [g.prompt_index for g in DataSource(2, seed=1, shuffle=False).next(4)] == [0, 1, 0, 1]


@given(st.integers(1, 9), st.integers(0, 30), st.integers(1, 30), st.booleans())
def test_a_saved_place_goes_on_as_if_nothing_had_happened(count, before, after, shuffle):
    source = DataSource(count, seed=3, shuffle=shuffle)
    source.next(before)
    resumed = DataSource(count, seed=3, shuffle=shuffle)
    resumed.restore(source.state())
    assert resumed.next(after) == source.next(after)


def test_groups_that_came_back_are_handed_out_first_and_are_part_of_the_state():
    source = DataSource(10, seed=3, shuffle=True)
    first = source.next(4)
    source.give_back([first[2], first[0]])
    resumed = DataSource(10, seed=3, shuffle=True)
    resumed.restore(source.state())
    assert [g.id for g in resumed.next(3)] == [first[0].id, first[2].id, "e00000-i000000004"]


def test_a_place_outside_the_data_set_is_refused():
    with pytest.raises(DataError, match="shorter than when the run was started"):
        DataSource(3, seed=1, shuffle=True).restore(DataState(epoch=0, offset=4))
    with pytest.raises(DataError, match="empty"):
        DataSource(0, seed=1, shuffle=True)


def test_sampling_seeds_are_stable_and_differ():
    assert sample_seed(1, 0, 5, 2) == SEED
    assert len({sample_seed(1, 0, prompt, sample) for prompt in range(50) for sample in range(4)}) == 200


ORDER_0 = [4, 0, 3, 5, 1, 6, 2, 7]
ORDER_1 = [1, 0, 3, 5, 4, 6, 2, 7]
SEED = 792703796


def test_parquet_rows_are_read_by_row_group_and_only_the_slice_is_kept(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "p.parquet"
    table = pa.Table.from_pylist([{"prompt": f"p{i}", "label": str(i), "other": "x" * 100} for i in range(1000)])
    pq.write_table(table, path, row_group_size=100)
    prompts = open_prompts(f"{path}@[250:260]", Keys())
    assert [prompts[row].prompt for row in range(len(prompts))] == [f"p{i}" for i in range(250, 260)]
    assert prompts[9].label == "259" and prompts[0].prompt == "p250"


def test_tools_and_keys_that_are_passed_through_are_kept(tmp_path):
    keys = Keys(tools="tools", passed=("image",))
    row = {"prompt": "a", "label": 1, "tools": [{"type": "function"}], "image": "pixels", "metadata": {"k": 1}}
    prompt = open_prompts(write(tmp_path / "p.jsonl", [row]), keys)[0]
    assert prompt.tools == [{"type": "function"}] and prompt.metadata == {"k": 1, "image": "pixels"}
    with pytest.raises(DataError, match="expected a list of tools"):
        open_prompts(write(tmp_path / "q.jsonl", [{**row, "tools": "add"}]), keys)


def test_problems_are_made_by_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    data = DataConfig(reasoning_gym=ReasoningGymConfig(task="leg_counting", size=3, seed=1))
    prompts = open_source(data)
    assert len(prompts) == 3 and prompts[1].metadata["entry"]["answer"] == prompts[1].label
    with pytest.raises(DataError, match="no_such_task"):
        open_source(DataConfig(reasoning_gym=ReasoningGymConfig(task="no_such_task")))


def test_a_group_is_found_again_by_its_id():
    source = DataSource(5, seed=3, shuffle=True)
    groups = source.next(12)
    assert [source.spec(group.id) for group in groups] == groups


def test_a_text_that_does_not_decode_is_named_with_its_row(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a", "label": 1}\n{"prompt": "b\xff", "label": 1}\n')
    with pytest.raises(DataError, match=r"p.jsonl, line 2: broken JSON"):
        open_prompts(str(path), Keys())
    path.write_text('{"prompt": "half \\ud800", "label": 1}\n')
    with pytest.raises(DataError, match=r"p.jsonl, line 1"):
        open_prompts(str(path), Keys())
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    buffers = pa.array([b"good", b"b\xff"], pa.binary()).buffers()
    texts = pa.StringArray.from_buffers(2, buffers[1], buffers[2])
    pq.write_table(pa.table({"prompt": texts, "label": ["1", "2"]}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p.parquet, rows 0 to 1: a text is not UTF-8"):
        open_prompts(str(tmp_path / "p.parquet"), Keys())


def test_bytes_pass_through_and_what_cannot_be_sent_is_refused(monkeypatch):
    rows = [{"prompt": "a", "label": 1, "image": b"\x89PNG"}, {"prompt": "b", "label": 1, "image": object()}]
    monkeypatch.setattr("miles_hpc.rollout.data.load_function", lambda path, key: lambda: rows[:count])
    data = DataConfig(source="m:rows", multimodal_keys=["image"])
    count = 1
    assert open_source(data)[0].metadata == {"image": b"\x89PNG"}
    count = 2
    with pytest.raises(DataError, match=r"prompt 1 cannot be sent to a worker.*object"):
        open_source(data)


def test_the_state_is_readable_and_holds_what_partial_samples_have():
    source = DataSource(10, seed=3, shuffle=True)
    first, second = source.next(2)
    partial = PartialSample(
        index=1, status="aborted", token_ids=[1, 2], loss_mask=[0, 1], logprobs=[0.0, -0.5], versions=[(3, 1, 2)]
    )
    source.give_back([msgspec.structs.replace(second, partial=[partial]), first])
    text = msgspec.json.encode(source.state()).decode()
    shown = json.loads(text)
    assert (shown["epoch"], shown["offset"]) == (0, 2)
    assert [group["id"] for group in shown["buffer"]] == [first.id, second.id]
    assert shown["buffer"][1]["partial"][0]["logprobs"] == [0.0, -0.5]
    resumed = DataSource(10, seed=3, shuffle=True)
    resumed.restore(msgspec.json.decode(text, type=DataState))
    assert resumed.next(2)[1].partial == [partial]
