"""Commands that wait in the server, on a connection of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as aioredis
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from scheduler.blocking import BlockingLine
from scheduler.store import Store
from tests.waiting import until


@pytest.fixture
async def line(store: Store) -> AsyncIterator[BlockingLine]:
    opened = store.blocking_line(1.0)
    yield opened
    await opened.close()


async def test_one_connection_carries_all_commands(store: Store, line: BlockingLine) -> None:
    """One that ended with an error, and one that nothing came of, included."""
    name = store.keys.name("wake", "test")
    first = await line.ask("CLIENT", "ID")
    with pytest.raises(ResponseError, match="unknown command"):
        await line.ask("NO-SUCH-COMMAND")
    assert await line.ask("BLPOP", name, 0.01) is None
    await store.redis.rpush(name, "hint")
    assert await line.ask("BLPOP", name, 1) == [name.encode(), b"hint"]
    assert await line.ask("CLIENT", "ID") == first


async def test_a_connection_that_breaks_is_made_anew(store: Store, line: BlockingLine) -> None:
    """The command that it carried fails, and the next one is answered."""
    identity = await line.ask("CLIENT", "ID")
    waiting = asyncio.create_task(line.ask("BLPOP", store.keys.name("wake", "test"), 30))

    async def waits() -> bool:
        return any(int(each["id"]) == identity and "b" in each["flags"] for each in await clients())

    async def clients() -> list[dict[str, str]]:
        found: list[dict[str, str]] = await store.redis.client_list()
        return found

    await until("the command waits in the server", waits)
    await store.redis.client_kill_filter(_id=str(identity))
    with pytest.raises(ConnectionError):
        await waiting
    assert await line.ask("PING") == b"PONG"


async def test_a_reply_that_is_late_is_nobodys(store: Store) -> None:
    """Its command has ended with its own time-out; the next one gets its own reply."""
    impatient = BlockingLine(aioredis.from_url(store.settings.redis_url, protocol=2), timeout_s=0.05)
    name = store.keys.name("wake", "test")
    with pytest.raises(TimeoutError, match=r"no answer within 0.05 s"):
        await impatient.ask("BLPOP", name, 30)
    assert await impatient.ask("ECHO", "mine") == b"mine"
    await impatient.close()
