"""Agents for tests: one that a whole module shares, and one for a test that hurts it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from scheduler.settings import load_settings
from scheduler.store import Store
from tests.agent.harness import Agent, Caller
from tests.conftest import TestServer
from tests.invariants import check_pool

ROUGH_MODELS = ("Sleeper", "Crasher", "Deaf", "Forking", "Echo")
SHARED_MODELS = ("Echo", "Sleeper", "Faulty", "WrongLength", "Hungry", "Streamer", "Buffered", "Laned")


@pytest.fixture(scope="session")
def shared_pool() -> str:
    return "a" + secrets.token_hex(6)


@pytest.fixture(scope="session")
def shared_agent(
    server: TestServer, shared_pool: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Agent]:
    """One agent with all the models that leave their process alive."""
    models = {name.lower(): f'entrypoint = "models_plain.py:{name}"' for name in SHARED_MODELS}
    agent = Agent(tmp_path_factory.mktemp("agent"), redis_url=server.url, pool=shared_pool, models=models)
    yield agent
    agent.close()
    agent.check_no_orphans()


@pytest.fixture
async def caller(server: TestServer, shared_pool: str, shared_agent: Agent) -> AsyncIterator[Caller]:
    """A caller of the shared agent, whose card is ready."""
    async for opened in _caller(server.url, shared_pool):
        await opened.ready(*(name.lower() for name in SHARED_MODELS))
        yield opened


@pytest.fixture(scope="session")
def rough_pool() -> str:
    return "r" + secrets.token_hex(6)


@pytest.fixture(scope="session")
def rough_agent(
    server: TestServer, rough_pool: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Agent]:
    """One agent whose child may be ended by any test; each test leaves it ready."""
    models = {name.lower(): f'entrypoint = "models_plain.py:{name}"' for name in ROUGH_MODELS}
    agent = Agent(tmp_path_factory.mktemp("rough"), redis_url=server.url, pool=rough_pool, models=models)
    yield agent
    agent.close()
    agent.check_no_orphans()


@pytest.fixture
async def rough(server: TestServer, rough_pool: str, rough_agent: Agent) -> AsyncIterator[Caller]:
    """A caller of the rough agent, whose card is ready before and after."""
    async for opened in _caller(server.url, rough_pool):
        await opened.ready(*(name.lower() for name in ROUGH_MODELS))
        yield opened
        await opened.ready(*(name.lower() for name in ROUGH_MODELS))


@pytest.fixture
async def own_caller(server: TestServer, pool: str) -> AsyncIterator[Caller]:
    """A caller on this test's own pool."""
    async for opened in _caller(server.url, pool):
        yield opened


async def _caller(url: str, pool: str) -> AsyncIterator[Caller]:
    store = await Store.connect(
        load_settings(
            redis_url=url, pool=pool, clocks={"session_s": 2.0, "beat_s": 0.4, "abandon_grace_s": 2.0}
        )
    )
    try:
        yield Caller(store)
        await check_pool(store)
    finally:
        await asyncio.shield(store.close())


Start = Callable[..., Agent]


@pytest.fixture
def start_agent(server: TestServer, pool: str, tmp_path: Path) -> Iterator[Start]:
    """Starts agents on this test's pool: start_agent("Echo", ...) hosts those models, under their names in
    lower case.
    """
    started: list[Agent] = []

    def start(*names: str, folder: Path | None = None, **options: object) -> Agent:
        models = {name.lower(): f'entrypoint = "models_plain.py:{name}"' for name in names}
        given = {"models": models, "redis_url": server.url, "pool": pool} | options
        agent = Agent(folder or tmp_path / "agent", **given)  # type: ignore[arg-type]
        started.append(agent)
        return agent

    yield start
    for agent in started:
        agent.close()
    for agent in started:
        agent.check_no_orphans()
