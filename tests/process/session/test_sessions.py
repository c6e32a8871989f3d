"""Session servers, real router, engines and controller as processes: a lost part costs an exchange, not a token."""

import asyncio

import pytest

from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.inference.answers import SamplingParams
from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.weights import update_from_disk
from miles_hpc.session.client import SessionClient
from miles_hpc.session.errors import SessionLost

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

POOL = "session-server"
FIRST = [{"role": "user", "content": "What is 12 + 30?"}]
AGAIN = {"role": "user", "content": "Are you sure? Answer again."}


def sampling(turn):
    return SamplingParams(max_new_tokens=8, seed=100 + turn)


def scenario(fleet, body):
    """Publish weights, wait until two engines serve, run `body(http, sessions)`."""

    async def main():
        async with open_http() as http, ControllerClient(fleet) as controller:
            window = await controller.start_update_weights(20)
            path = fleet.weights(1)
            await update_from_disk(window.engines, path, 1, http=http)
            await controller.end_update_weights(window.window_id, 1, path)
            await controller.wait_serving(2, 20)
            return await asyncio.wait_for(body(http, SessionClient(lambda: fleet.pools[POOL], http)), 60)

    return asyncio.run(main())


def with_fleet(make_fleet, token_ms=1.0):
    fleet = make_fleet(engines=2)
    fleet.controller()
    fleet.router()
    engines = [fleet.engine(i, token_ms=token_ms) for i in range(2)]
    servers = [fleet.session_server(i) for i in range(2)]
    return fleet, engines, servers


async def two_turns(sessions, session):
    first = await sessions.chat(session, FIRST, sampling(0), deadline_s=30)
    await sessions.chat(session, [*FIRST, first.message, AGAIN], sampling(1), deadline_s=30)
    return await sessions.samples(session)


def test_two_turns_through_either_instance_give_the_same_exact_tokens(make_fleet):
    fleet, _, servers = with_fleet(make_fleet)

    async def body(http, sessions):
        found = {}
        for _ in range(2):
            session = await sessions.create()
            found[session.cell] = await two_turns(sessions, session)
            assert await sessions.delete(session)
        return found

    found = scenario(fleet, body)
    assert sorted(found) == [server.cell for server in servers]
    one, two = found.values()
    assert (one.token_ids, one.loss_mask, one.logprobs) == (two.token_ids, two.loss_mask, two.logprobs)
    assert one.weight_versions == [(1, turn.start, turn.end) for turn in one.turns]
    tokenizer = ChatTokenizer(fleet.config.model.path)
    assert one.token_ids[: one.turns[0].start] == tokenizer.render(FIRST)
    text = tokenizer.render_text(one.messages, False)
    assert tokenizer.decode(one.token_ids, skip_special_tokens=False) == text, (
        "stored tokens read as the template writes"
    )


def test_a_session_server_killed_in_a_turn_loses_the_session_by_name_and_the_exchange_is_the_same_elsewhere(make_fleet):
    fleet, _, servers = with_fleet(make_fleet, token_ms=100)

    async def body(http, sessions):
        session = await sessions.create()
        reference = await two_turns(sessions, session)
        await sessions.delete(session)
        lost = await sessions.create()
        first = await sessions.chat(lost, FIRST, sampling(0), deadline_s=30)
        turn = asyncio.ensure_future(sessions.chat(lost, [*FIRST, first.message, AGAIN], sampling(1), deadline_s=30))
        await asyncio.sleep(0.1)
        async with http.get(lost.base_url) as answer:
            assert (await answer.json())["generating"] is True
        victim = next(server for server in servers if server.cell == lost.cell)
        fleet.kill(victim)
        with pytest.raises(SessionLost):
            await asyncio.wait_for(turn, 5)
        again = await two_turns(sessions, await sessions.create())
        assert (again.token_ids, again.logprobs) == (reference.token_ids, reference.logprobs)
        healed = await asyncio.to_thread(fleet.session_server, int(victim.cell[-5:]), ports=victim.ports, n=2)
        with pytest.raises(SessionLost):
            await sessions.samples(lost)
        cells = {(await sessions.create()).cell for _ in range(4)}
        assert healed.cell in cells

    scenario(fleet, body)


def test_an_engine_killed_in_a_turn_changes_nothing_about_the_sample(make_fleet):
    fleet, engines, _ = with_fleet(make_fleet, token_ms=100)

    async def body(http, sessions):
        reference = await two_turns(sessions, await sessions.create())
        turns = [asyncio.ensure_future(two_turns(sessions, await sessions.create())) for _ in range(6)]
        await asyncio.sleep(0.15)
        assert await asyncio.to_thread(fleet.running, engines[0]) > 0
        fleet.kill(engines[0])
        for sample in await asyncio.gather(*turns):
            assert (sample.token_ids, sample.logprobs) == (reference.token_ids, reference.logprobs)

    scenario(fleet, body)


def test_a_session_server_ends_promptly_on_sigterm_even_with_a_turn_in_flight(make_fleet):
    fleet, _, servers = with_fleet(make_fleet, token_ms=2000)

    async def body(http, sessions):
        session = await sessions.create()
        turn = asyncio.ensure_future(sessions.chat(session, FIRST, sampling(0), deadline_s=60))
        await asyncio.sleep(0.2)
        victim = next(server for server in servers if server.cell == session.cell)
        victim.process.terminate()
        assert await asyncio.to_thread(victim.process.wait, 5) == 0
        with pytest.raises(SessionLost):
            await turn

    scenario(fleet, body)
