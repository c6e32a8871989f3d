"""However an answer is cut into events, in either form, the same tokens come out of it; or none at all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.inference.answers import parse_answer
from miles_hpc.inference.merging import AnswerInvalid, Events
from miles_hpc.inference.streams import read_answer

pytestmark = pytest.mark.unit

SAMPLES = Path(__file__).parent / "samples"
VOCABULARY = 384


class Drawn:
    """An answer as an engine has it: tokens, each with its log-prob and its text."""

    def __init__(self, ids, finish="length", versions=((0, "1"),)):
        self.ids, self.finish, self.versions = ids, finish, versions
        self.rows = [[-1.0 - i / 7, token, None] for i, token in enumerate(ids)]
        # A token of half a character has no text until the next one comes.
        self.texts = ["" if token % 5 == 0 else f"{token}é" for token in ids]

    def spans(self, end):
        starts = [(min(start, end), version) for start, version in self.versions]
        ends = [start for start, _ in starts[1:]] + [end]
        return [{"version": v, "start": a, "end": b} for (a, v), b in zip(starts, ends, strict=True) if b > a or not a]

    def event(self, ids, rows, text, end, finish=None):
        meta = {
            "id": "r",
            "finish_reason": finish and {"type": finish},
            "prompt_tokens": 3,
            "weight_version": "1",
            "output_token_logprobs": rows,
            "output_token_logprobs_length": end,
            "completion_tokens": end,
        }
        if finish:
            meta["weight_versions"] = self.spans(end)
        return json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode()

    def part(self, start, end, finish=None):
        text = "".join(self.texts[start:end])
        return self.event(self.ids[start:end], self.rows[start:end], text, end, finish)

    def cumulative(self, cuts):
        return [self.part(0, end) for end in cuts[:-1]] + [self.part(0, cuts[-1], self.finish)]

    def incremental(self, cuts):
        edges = [0, *cuts]
        pairs = list(zip(edges, cuts, strict=False))
        return [self.part(*pair) for pair in pairs[:-1]] + [self.part(*pairs[-1], self.finish)]

    def aborted_while_it_waited(self, cuts, unsent_in_the_same):
        """SGLang 0.5.23: all log-probs and text over again, of the ids the last one, behind what had been new."""
        end, edges = cuts[-1], [0, *cuts]
        first = edges[-2] if unsent_in_the_same else end
        parts = [self.part(*pair) for pair in zip(edges, cuts[:-1] if unsent_in_the_same else cuts, strict=False)]
        ids, rows = self.ids[first:end] + self.ids[:end][-1:], self.rows[first:end] + self.rows[:end]
        text = "".join(self.texts[first:end] + self.texts[:end])
        return [*parts, self.event(ids, rows, text, end, "abort")]


@st.composite
def answers(draw):
    """An answer and the places where its events end; some events bring nothing."""
    ids = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40))
    inner = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    swap = draw(st.integers(0, len(ids)))
    versions = ((0, "1"), (swap, "2")) if 0 < swap < len(ids) else ((0, "1"),)
    return Drawn(ids, draw(st.sampled_from(["stop", "length", "abort"])), versions), [*inner, len(ids)]


def taken(events):
    found = Events()
    for event in events:
        found.take(event)
    return found.needed


@given(answers())
def test_any_cuts_in_either_form_give_the_answer_that_comes_whole(case):
    answer, cuts = case
    whole = parse_answer([answer.part(0, len(answer.ids), answer.finish)], VOCABULARY)
    assert whole.token_ids == answer.ids and whole.text == "".join(answer.texts)
    for events in (answer.cumulative(cuts), answer.incremental(cuts)):
        assert parse_answer(taken(events), VOCABULARY) == whole


@given(answers(), st.booleans())
def test_what_was_drawn_before_an_abort_in_the_queue_is_kept_once(case, together):
    answer, cuts = case
    answer.finish = "abort"
    whole = parse_answer([answer.part(0, len(answer.ids), "abort")], VOCABULARY)
    found = parse_answer(taken(answer.aborted_while_it_waited(cuts, together)), VOCABULARY)
    assert found == whole and found.token_ids == answer.ids


@given(answers(), st.data())
def test_an_incremental_answer_that_lacks_an_event_is_none(case, data):
    answer, cuts = case
    events = answer.incremental(cuts)
    edges = [0, *cuts]
    full = [i for i in range(len(cuts) - 1) if edges[i + 1] > edges[i]]
    if full:
        del events[data.draw(st.sampled_from(full))]
        with pytest.raises(AnswerInvalid):
            parse_answer(taken(events), VOCABULARY)


@given(answers(), st.booleans(), st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_pieces_of_the_connection_may_end_anywhere(case, incremental, sizes):
    answer, cuts = case
    events = answer.incremental(cuts) if incremental else answer.cumulative(cuts)
    stream = b"".join(b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"])
    pieces, position = [], 0
    while position < len(stream):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream[position : position + size])
        position += size

    class Content:
        async def readany(self):
            return pieces.pop(0) if pieces else b""

    response = SimpleNamespace(content_type="text/event-stream", status=200, connection=None, content=Content())
    status, found = asyncio.run(read_answer(response, SimpleNamespace(beat=lambda: None)))
    assert status == 200 and found == taken(events)
    assert parse_answer(found, VOCABULARY).token_ids == answer.ids


@pytest.mark.parametrize("together", [False, True])
def test_an_abort_that_tells_other_tokens_than_those_that_came_is_no_answer(together):
    answer, other = Drawn([7, 8, 9, 10]), Drawn([7, 3, 9, 10])
    events = [*answer.incremental([1, 3, 4])[:2], other.aborted_while_it_waited([1, 3, 4], together)[-1]]
    with pytest.raises(AnswerInvalid, match="counts 4 in all"):
        parse_answer(taken(events), VOCABULARY)


def test_of_a_cumulative_stream_only_the_last_event_is_kept():
    answer = Drawn(list(range(100)))
    assert taken(answer.cumulative([1, 20, 40, 100])) == [answer.part(0, 100, "length")]
    assert len(taken(answer.incremental([1, 20, 40, 100]))) == 4


def test_a_stream_without_events_is_no_answer():
    with pytest.raises(AnswerInvalid, match="without any event"):
        parse_answer([], VOCABULARY)


def recorded(name):
    return [line for line in (SAMPLES / f"stream-{name}.jsonl").read_bytes().splitlines() if line != b"[DONE]"]


@pytest.mark.parametrize(
    ("name", "tokens", "spans"),
    [
        ("incremental-aborted", 66, [(1, 0, 66)]),
        ("cumulative-aborted", 64, [(1, 0, 64)]),
        ("incremental-aborted-while-retracted", 65, [(1, 0, 65)]),
        ("cumulative-aborted-while-retracted", 49, [(1, 0, 49)]),
        ("incremental-two-versions", 600, [(1, 0, 66), (7, 66, 600)]),
    ],
)
def test_what_the_real_sglang_was_seen_to_send_is_read_as_it_was_meant(name, tokens, spans):
    """Greedy answers to one prompt, recorded from 0.5.23; the first weights are called 1 here."""
    events = [event.replace(b'"default"', b'"1"') for event in recorded(name)]
    found = parse_answer(taken(events), VOCABULARY)
    assert (len(found.token_ids), found.weight_versions) == (tokens, spans)
    assert found.finish_reason == ("length" if tokens == 600 else "abort")
    longest = parse_answer(taken([e.replace(b'"default"', b'"1"') for e in recorded("incremental-two-versions")]), 384)
    same = min(tokens, 49)
    assert found.token_ids[:same] == longest.token_ids[:same] and longest.text.startswith(found.text[:40])
    assert len(found.logprobs) == tokens and max(found.logprobs) < 0
