"""Calls that travel together stay apart."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio as aioredis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from scheduler import inventory, jobs
from scheduler.pipelining import LARGE_BYTES, MOST_FLIGHTS, ScriptLine
from scheduler.settings import load_settings
from scheduler.store import Store
from tests.conftest import TestServer
from vramgate.errors import StoreUnavailable

ECHO = "return ARGV[1]"
BROKEN = "return redis.call('HGET', KEYS[1])"


@pytest.fixture
async def line(store: Store) -> AsyncIterator[ScriptLine]:
    pool = aioredis.BlockingConnectionPool.from_url(store.settings.redis_url, max_connections=8, protocol=2)
    line = ScriptLine(aioredis.Redis(connection_pool=pool), timeout_s=20.0)
    yield line
    await line.close()


async def _load(store: Store, text: str) -> str:
    sha: Any = await store.redis.script_load(text)
    return sha.decode() if isinstance(sha, bytes) else str(sha)


async def test_each_call_has_its_own_answer_and_its_own_error(store: Store, line: ScriptLine) -> None:
    """Of 300 concurrent calls every third fails in its script and every seventh is unknown; the others are
    answered, each with its own words, over two connections at most."""
    echo, broken = await _load(store, ECHO), await _load(store, BROKEN)

    def call(number: int) -> Any:
        sha = "0" * 40 if number % 7 == 0 else broken if number % 3 == 0 else echo
        return line.evalsha(sha, 1, (store.keys.name("tomb", "x"), str(number)))

    answers = await asyncio.gather(*map(call, range(300)), return_exceptions=True)
    for number, answer in enumerate(answers):
        if number % 7 == 0:
            assert isinstance(answer, NoScriptError)
        elif number % 3 == 0:
            assert isinstance(answer, ResponseError)
        else:
            assert answer == str(number).encode()


async def test_a_caller_that_gives_up_takes_nobody_along(store: Store, line: ScriptLine) -> None:
    """Cancelling one of many waiting calls leaves the others answered."""
    echo = await _load(store, ECHO)
    tasks = [
        asyncio.create_task(line.evalsha(echo, 1, (store.keys.name("tomb", "x"), str(number))))
        for number in range(50)
    ]
    await asyncio.sleep(0)
    tasks[7].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[7], asyncio.CancelledError)
    assert [answer for index, answer in enumerate(answers) if index != 7] == [
        str(number).encode() for number in range(50) if number != 7
    ]


async def test_large_calls_do_not_hold_up_small_ones(store: Store, line: ScriptLine) -> None:
    """A call above the bound is answered on a connection of its own while both flights are busy."""
    echo = await _load(store, ECHO)
    large = "x" * (LARGE_BYTES + 1)
    small = [line.evalsha(echo, 1, (store.keys.name("tomb", "x"), "s")) for _ in range(MOST_FLIGHTS)]
    answers = await asyncio.gather(*small, line.evalsha(echo, 1, (store.keys.name("tomb", "x"), large)))
    assert answers[-1] == large.encode()


async def test_many_large_calls_leave_room_for_the_small_ones(store: Store, line: ScriptLine) -> None:
    """While the server is busy with the first of more large calls than there are connections, a small one has
    its answer before the last of them.
    """
    echo = await _load(store, ECHO)
    name, large = store.keys.name("tomb", "x"), "x" * (8 << 20)
    order: list[str] = []

    async def call(argument: str) -> None:
        await line.evalsha(echo, 1, (name, argument))
        order.append(argument[:1])

    await asyncio.gather(*(call(large) for _ in range(12)), call("small"))
    assert len(order) == 13
    assert order[-1] == "x", "the small call came last"
    assert order.index("s") <= 8


async def test_a_connection_that_breaks_fails_what_it_carried(store: Store, line: ScriptLine) -> None:
    """With every connection cut, each call either is answered or fails by itself; afterwards all work
    again.
    """
    echo = await _load(store, ECHO)
    calls = [
        asyncio.create_task(line.evalsha(echo, 1, (store.keys.name("tomb", "x"), str(n)))) for n in range(100)
    ]
    await asyncio.sleep(0)
    assert await store.redis.client_kill_filter(_type="normal")
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, bytes | RedisError) for answer in answers)
    assert await line.evalsha(echo, 1, (store.keys.name("tomb", "x"), "again")) == b"again"


async def test_closing_leaves_nobody_waiting(store: Store, line: ScriptLine) -> None:
    """Callers of a line that closes are told."""
    echo = await _load(store, ECHO)
    calls = [
        asyncio.create_task(line.evalsha(echo, 1, (store.keys.name("tomb", "x"), str(n)))) for n in range(500)
    ]
    await asyncio.sleep(0)
    await line.close()
    done, waiting = await asyncio.wait(calls, timeout=5)
    assert not waiting
    assert any(isinstance(task.exception(), RedisError) for task in done)
    with pytest.raises(RedisError):
        await line.evalsha(echo, 1, (store.keys.name("tomb", "x"), "late"))


async def test_a_loop_of_commands_ends_when_it_is_cancelled(store: Store) -> None:
    """Whatever a loop asks of the ledger, and wherever the cancel meets it, the cancel arrives."""
    large = [b"x" * (LARGE_BYTES + 1)]

    async def connect() -> None:
        other = await Store.connect(store.settings, max_connections=2)
        await other.close()

    commands: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: inventory.totals(store),
        lambda: jobs.payload(store, "0" * 32),
        lambda: store.run("audit", {"cards": []}, blobs=large),
        connect,
    )

    async def for_ever(command: Callable[[], Awaitable[Any]]) -> None:
        while True:
            await command()

    chance = random.Random(7)
    for turn in range(200):
        task = asyncio.create_task(for_ever(commands[turn % len(commands)]))
        await asyncio.sleep(chance.random() * 0.01)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=5)
        assert done and task.cancelled(), f"turn {turn}: the cancel was lost"


async def test_outages_use_up_no_connections(own_server: TestServer, pool: str) -> None:
    """However often the server goes away, each call fails by itself and the next server is reached: whoever
    has but two connections, as the heartbeat has, still has them.
    """
    settings = load_settings(None, redis_url=own_server.url, pool=pool, redis={"command_timeout_s": 1.0})
    store = await Store.connect(settings, max_connections=2)
    try:
        for _ in range(4):
            await store.run("audit", {"cards": []})
            own_server.kill()
            with pytest.raises(StoreUnavailable):
                await store.run("audit", {"cards": []})
            own_server.start()
        await store.run("audit", {"cards": []})
    finally:
        await store.close()
