"""A session over HTTP: exact tokens, typed errors, and no turn that waits for another session."""

import asyncio
import contextlib

import pytest
from aiohttp.test_utils import TestServer

from miles_hpc.inference.generate import GenerateRejected, NoWorker, SamplingParams
from miles_hpc.inference.http_session import open_http
from miles_hpc.session.client import NoSessionServer, SessionClient, SessionHandle
from miles_hpc.session.errors import (
    HistoryDiverged,
    InvalidRequest,
    NoTurns,
    SessionLost,
    TurnInFlight,
    Unauthorized,
    UpstreamUnavailable,
)
from miles_hpc.session.server import SessionServer
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellAddrs

pytestmark = pytest.mark.unit

SAMPLING = SamplingParams(max_new_tokens=16, seed=11, stop_token_ids=[0])
FIRST = [{"role": "user", "content": "hello"}]
AGAIN = {"role": "user", "content": "Are you sure?"}


class Room:
    """Session servers behind a client, each an instance of its own."""

    def __init__(self, http, tokenizer, scripted, defaults):
        self.http, self.tokenizer, self.scripted, self.defaults = http, tokenizer, scripted, defaults
        self.cells, self.servers, self.states, self.generators = [], [], [], []
        self.client = SessionClient(lambda: self.cells, http)

    async def add(self, n=1, key=""):
        generate = self.scripted(self.tokenizer)
        state = SessionServer(
            f"session-server-{len(self.cells)}", self.tokenizer, generate, self.defaults, idle_s=100, key=key
        )
        server = TestServer(state.app(), host="127.0.0.1")
        await server.start_server()
        cell = CellAddrs(
            cell=f"session-server-{len(self.cells):05d}",
            generation=Generation(1, n),
            node="node-00000",
            ready=True,
            workers=[{"http": HostAndPort("127.0.0.1", server.port)}],
        )
        self.cells.append(cell)
        self.servers.append(server)
        self.states.append(state)
        self.generators.append(generate)
        return state, generate

    async def two_turns(self, session):
        first = await self.client.chat(session, FIRST, SAMPLING, deadline_s=5)
        second = await self.client.chat(session, [*FIRST, first.message, AGAIN], SAMPLING, deadline_s=5)
        return first, second


@pytest.fixture
def room(make_tokenizer, scripted, defaults):
    """`run(scenario)`: scenario(room) with one instance."""

    def run(scenario, template="chatml"):
        async def main():
            async with open_http() as http:
                made = Room(http, make_tokenizer(template), scripted, defaults)
                await made.add()
                try:
                    return await asyncio.wait_for(scenario(made), 20)
                finally:
                    for server in made.servers:
                        await server.close()

        return asyncio.run(main())

    return run


def test_the_second_prompt_begins_with_every_token_of_the_first_turn_as_it_was_drawn(room):
    async def scenario(r):
        session = await r.client.create()
        first, second = await r.two_turns(session)
        sample = await r.client.samples(session)
        return r.generators[0], first, second, sample, r.tokenizer

    generate, first, second, sample, tokenizer = room(scenario)
    one, two = generate.prompts
    assert one == tokenizer.render(FIRST)
    assert two[: len(one) + len(first.token_ids)] == one + first.token_ids
    assert first.token_ids != [*tokenizer.encode(first.text), 0], "the drawn tokens are not what the text tokenises to"
    assert sample.token_ids == two + second.token_ids


def test_a_sample_marks_exactly_the_generated_tokens_with_logprobs_and_versions(room):
    async def scenario(r):
        session = await r.client.create()
        first = await r.client.chat(session, FIRST, SAMPLING, deadline_s=5)
        r.generators[0].version = 4
        second = await r.client.chat(session, [*FIRST, first.message, AGAIN], SAMPLING, deadline_s=5)
        return first, second, await r.client.samples(session)

    first, second, sample = room(scenario)
    assert len(sample.token_ids) == len(sample.loss_mask) == len(sample.logprobs)
    drawn = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert drawn == first.token_ids + second.token_ids
    logprobs = [value for value, mask in zip(sample.logprobs, sample.loss_mask, strict=True) if mask]
    assert logprobs == first.logprobs + second.logprobs
    assert all(value == 0.0 for value, mask in zip(sample.logprobs, sample.loss_mask, strict=True) if not mask)
    one, two = sample.turns
    assert sample.weight_versions == [(3, one.start, one.end), (4, two.start, two.end)]
    assert (sample.prompt_tokens, sample.finish_reason) == (one.start, "stop")
    assert [m["role"] for m in sample.messages] == ["user", "assistant", "user", "assistant"]


def test_a_session_redone_on_another_instance_gives_the_same_sample(room):
    async def scenario(r):
        await r.add()
        samples = []
        for _ in range(2):
            session = await r.client.create()
            await r.two_turns(session)
            samples.append((session.cell, await r.client.samples(session)))
        return samples

    (cell_a, a), (cell_b, b) = room(scenario)
    assert cell_a != cell_b
    assert (a.token_ids, a.logprobs, a.messages) == (b.token_ids, b.logprobs, b.messages)


def test_the_seed_and_the_session_id_reach_the_engine(room):
    async def scenario(r):
        session = await r.client.create()
        await r.client.chat(session, FIRST, SAMPLING, deadline_s=5)
        return r.generators[0], session

    generate, session = room(scenario)
    assert generate.samplings == [SAMPLING]
    assert generate.keys == [session.id]


def test_a_diverging_history_is_refused_with_the_message_that_differs(room):
    async def scenario(r):
        session = await r.client.create()
        first = await r.client.chat(session, FIRST, SAMPLING, deadline_s=5)
        forged = {"role": "assistant", "content": "something else"}
        with pytest.raises(HistoryDiverged, match=r"messages\[1\]"):
            await r.client.chat(session, [*FIRST, forged, AGAIN], SAMPLING, deadline_s=5)
        with pytest.raises(HistoryDiverged, match="append at least one"):
            await r.client.chat(session, [*FIRST, first.message], SAMPLING, deadline_s=5)
        with pytest.raises(InvalidRequest, match="answers are generated here"):
            await r.client.chat(session, [*FIRST, first.message, forged], SAMPLING, deadline_s=5)
        assert (await r.client.chat(session, [*FIRST, first.message, AGAIN], SAMPLING, deadline_s=5)).text

    room(scenario)


def test_a_repeated_request_gets_the_answer_of_the_first_and_draws_nothing(room):
    async def scenario(r):
        session = await r.client.create()
        generate = r.generators[0]
        generate.hold = asyncio.Event()
        calls = [asyncio.ensure_future(r.client.chat(session, FIRST, SAMPLING, deadline_s=5)) for _ in range(2)]
        await asyncio.sleep(0.1)
        generate.hold.set()
        while_running = [(await call).token_ids for call in calls]
        after = (await r.client.chat(session, FIRST, SAMPLING, deadline_s=5)).token_ids
        assert while_running == [after, after]
        return len(generate.prompts)

    assert room(scenario) == 1


def test_another_turn_of_the_same_session_is_refused_while_one_is_generated_and_other_sessions_go_on(room):
    async def scenario(r):
        one, two = await r.client.create(), await r.client.create()
        generate = r.generators[0]
        generate.hold = asyncio.Event()
        held = asyncio.ensure_future(r.client.chat(one, FIRST, SAMPLING, deadline_s=5))
        await asyncio.sleep(0.05)
        generate.hold = None
        assert (await r.client.chat(two, FIRST, SAMPLING, deadline_s=5)).text
        with pytest.raises(TurnInFlight):
            await r.client.chat(one, [{"role": "user", "content": "other"}], SAMPLING, deadline_s=5)
        held.cancel()

    room(scenario)


def test_delete_does_not_wait_for_a_turn_and_ends_it(room):
    async def scenario(r):
        session = await r.client.create()
        r.generators[0].hold = asyncio.Event()
        held = asyncio.ensure_future(r.client.chat(session, FIRST, SAMPLING, deadline_s=5))
        await asyncio.sleep(0.05)
        assert await r.client.delete(session) is True
        with pytest.raises(SessionLost, match="deleted"):
            await held
        assert r.states[0].sessions == {}
        assert await r.client.delete(session) is False

    room(scenario)


def test_a_session_of_a_restarted_instance_is_lost_by_name(room):
    async def scenario(r):
        session = await r.client.create()
        r.states[0].sessions.clear()
        with pytest.raises(SessionLost, match="begin another"):
            await r.client.chat(session, FIRST, SAMPLING, deadline_s=5)
        with pytest.raises(SessionLost):
            await r.client.samples(session)

    room(scenario)


def test_a_call_in_flight_to_an_instance_that_dies_or_leaves_the_address_book_is_lost_at_once(room):
    async def scenario(r):
        await r.add()
        for leaves in (True, False):
            session = await r.client.create()
            index = int(session.cell[-5:])
            r.generators[index].hold = asyncio.Event()
            call = asyncio.ensure_future(r.client.chat(session, FIRST, SAMPLING, deadline_s=60))
            await asyncio.sleep(0.1)
            if leaves:
                r.cells[:] = [cell for cell in r.cells if cell.cell != session.cell]
            else:
                for connection in list(r.servers[index].runner.server.connections):
                    connection.transport.abort()
            with pytest.raises(SessionLost):
                await asyncio.wait_for(call, 3)
            r.generators[index].hold.set()

    room(scenario)


def test_a_session_is_created_on_whoever_answers_and_nobody_has_a_name_of_its_own(room):
    async def scenario(r):
        dead = CellAddrs(
            cell="session-server-00009",
            generation=Generation(1, 1),
            node="n",
            ready=True,
            workers=[{"http": HostAndPort("127.0.0.1", 1)}],
        )
        r.cells.insert(0, dead)
        assert {(await r.client.create()).cell for _ in range(3)} == {"session-server-00000"}
        r.cells.clear()
        with pytest.raises(NoSessionServer, match="none is ready"):
            await r.client.create(deadline_s=0.3)

    room(scenario)


def test_upstream_errors_keep_their_kind_and_leave_the_session_as_it_was(room):
    async def scenario(r):
        session = await r.client.create()
        r.generators[0].error = NoWorker("router lists no engine")
        with pytest.raises(UpstreamUnavailable, match="NoWorker"):
            await r.client.chat(session, FIRST, SAMPLING, deadline_s=5)
        r.generators[0].error = GenerateRejected("too long")
        with pytest.raises(InvalidRequest, match="too long"):
            await r.client.chat(session, FIRST, SAMPLING, deadline_s=5)
        with pytest.raises(NoTurns):
            await r.client.samples(session)
        r.generators[0].error = None
        assert (await r.client.chat(session, FIRST, SAMPLING, deadline_s=5)).text

    room(scenario)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "messages"),
        ({"messages": []}, "empty"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": FIRST, "n": 2}, "n is 2"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text parts"),
        ({"messages": "hello"}, "messages"),
    ],
)
def test_a_request_that_is_none_says_what_was_expected(room, body, part):
    async def scenario(r):
        session = await r.client.create()
        async with r.http.post(f"{session.base_url}/v1/chat/completions", json=body) as answer:
            return answer.status, (await answer.json())["error"]

    status, error = room(scenario)
    assert (status, error["type"]) == (400, "invalid_request")
    assert part in error["message"]


def test_an_instance_with_a_key_serves_nobody_else(room):
    async def scenario(r):
        r.cells.clear()
        state, _ = await r.add(key="the run's key")
        url = r.cells[0].workers[0]["http"].addr
        with pytest.raises(Unauthorized):
            await r.client._call(
                SessionHandle(id="", url=url, cell=r.cells[0].cell, generation=r.cells[0].generation),
                "POST", "/sessions", timeout_s=5,
            )  # fmt: skip
        statuses = []
        for header in (None, "Bearer ", "Bearer the run's kex", "Basic the run's key", "Bearer kéy"):
            async with r.http.post(f"{url}/sessions", headers={"Authorization": header} if header else {}) as answer:
                statuses.append((answer.status, (await answer.json())["error"]["type"]))
        async with r.http.get(f"{url}/health") as answer:
            assert answer.status == 200
        assert statuses == [(401, "unauthorized")] * 5 and not state.sessions
        async with open_http("the run's key") as http:
            client = SessionClient(lambda: r.cells, http)
            turn = await client.chat(await client.create(), FIRST, SAMPLING, deadline_s=5)
        return turn.finish_reason

    assert room(scenario) == "stop"


def test_an_openai_client_gets_its_shape_plain_and_streamed(room):
    async def scenario(r):
        session = await r.client.create()
        url = f"{session.base_url}/v1/chat/completions"
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        body = {"model": "any", "messages": [{"role": "user", "content": parts}], "seed": 1, "unknown": True}
        async with r.http.post(url, json=body) as answer:
            plain = await answer.json()
        async with r.http.post(url, json=body | {"stream": True}) as answer:
            stream = await answer.text()
        async with r.http.get(session.base_url) as answer:
            seen = await answer.json()
        async with r.http.get(f"{session.url}/health") as answer:
            health = await answer.json()
        async with r.http.get(f"{session.url}/nowhere") as answer:
            assert answer.status == 404 and (await answer.json())["error"]["type"] == "invalid_request"
        return plain, stream, seen, health

    plain, stream, seen, health = room(scenario)
    choice = plain["choices"][0]
    assert plain["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "stop"
    assert plain["usage"]["completion_tokens"] == len(choice["response_token_ids"])
    assert stream.startswith("data: ") and stream.endswith("data: [DONE]\n\n")
    assert choice["message"]["content"] in stream, "the same request is not drawn twice"
    assert seen["turns"][0]["finish_reason"] == "stop" and seen["generating"] is False
    assert (health["status"], health["sessions"]) == ("ok", 1)


def test_sessions_that_nobody_uses_expire_but_not_while_they_generate(room):
    async def scenario(r):
        idle, busy = await r.client.create(), await r.client.create()
        state, generate = r.states[0], r.generators[0]
        generate.hold = asyncio.Event()
        call = asyncio.ensure_future(r.client.chat(busy, FIRST, SAMPLING, deadline_s=5))
        await asyncio.sleep(0.1)
        now = state.sessions[busy.id].last_used
        assert state.forget_idle(now + 50) == []
        assert state.forget_idle(now + 200) == [idle.id]
        generate.hold.set()
        assert (await call).text

    room(scenario)


def test_a_cancelled_client_call_ends_quietly(room):
    async def scenario(r):
        session = await r.client.create()
        r.generators[0].hold = asyncio.Event()
        call = asyncio.ensure_future(r.client.chat(session, FIRST, SAMPLING, deadline_s=5))
        await asyncio.sleep(0.1)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        r.generators[0].hold.set()
        await asyncio.sleep(0.1)
        assert len((await r.client.samples(session)).turns) == 1, "the turn was generated and is kept"

    room(scenario)
