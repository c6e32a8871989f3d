"""A session server's process: `python -m miles_hpc.session.serve`, started by an agent."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from aiohttp import web

from miles_hpc.config.load import read_resolved
from miles_hpc.config.schema import Config
from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.inference.book import engine_urls_in, router_url_in
from miles_hpc.inference.generate import GenerateClient
from miles_hpc.inference.http_session import http_keys, open_http
from miles_hpc.session.requests import ChatDefaults
from miles_hpc.session.server import SessionServer
from miles_hpc.specs.router import asks_for_key
from miles_hpc.wire.client import HubClient
from miles_hpc.wire.program import setup_logging
from miles_hpc.wire.serving import stop_event
from miles_hpc.wire.worker_env import WorkerEnv

log = logging.getLogger(__name__)


def defaults_of(config: Config, tokenizer: ChatTokenizer) -> ChatDefaults:
    """What a chat request that says nothing gets in this run."""
    rollout = config.rollout
    return ChatDefaults(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        timeout_s=config.inference.request_timeout_s,
        stop=rollout.stop,
        stop_token_ids=tokenizer.stop_token_ids,
    )


async def serve(env: WorkerEnv, config: Config, hub: HubClient) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = stop_event()
    tokenizer = ChatTokenizer(Path(config.model.path), config.model.chat_template)
    keys = http_keys(config, env.run_dir, env.attempt)
    async with open_http(keys) as http:
        server = SessionServer(
            f"{env.worker}-g{env.generation}",
            tokenizer,
            GenerateClient(
                lambda: router_url_in(hub.pools, config.model.name),
                http,
                tokenizer.vocab_size,
                published_only=True,
                engines=lambda: engine_urls_in(hub.pools, config.model.name, config.inference.external),
            ),
            defaults_of(config, tokenizer),
            # Longer than any sample may take, so that only sessions whose user is gone expire.
            idle_s=2 * config.rollout.sample_timeout_s + 60,
            key=keys.run if asks_for_key(config) else "",
        )
        await run_app(server, env.listen["http"].host, env.listen["http"].port, stop)


async def run_app(server: SessionServer, host: str, port: int, stop: asyncio.Event) -> None:
    """Serve `server` on an address until `stop` is set; turns in flight are cancelled then."""
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    expiry = asyncio.ensure_future(server.expire())
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
        log.info("%s serves sessions on %s:%d", server.instance, host, port)
        await stop.wait()
    finally:
        expiry.cancel()
        await asyncio.gather(expiry, return_exceptions=True)
        await runner.cleanup()


def main() -> None:
    """Entry of the process."""
    setup_logging()
    env = WorkerEnv.from_environ()
    config = read_resolved(env.run_dir)
    with HubClient(env) as hub:
        asyncio.run(serve(env, config, hub))


if __name__ == "__main__":
    main()
