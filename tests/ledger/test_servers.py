"""What the ledger does when its server is hurt: flushed scripts, cut connections, kill -9, a freeze, a
full memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import pytest
from redis import Redis

from scheduler import admission, cards, inventory, jobs
from scheduler.gateways import gateway_beat
from scheduler.keys import Keys
from scheduler.records import LAYOUT
from scheduler.settings import Settings, load_settings
from scheduler.store import BadStore, Store
from scheduler.submissions import SubmitRequest
from tests.conftest import TestServer
from tests.invariants import check_pool
from tests.ledger.conftest import shift_clock
from tests.ledger.fake_agent import MIB, FakeAgent, ok, request, said
from tests.waiting import until
from vramgate import errors


@pytest.fixture
def own_settings(own_server: TestServer, pool: str) -> Settings:
    return load_settings(
        None,
        redis_url=own_server.url,
        pool=pool,
        clocks={"session_s": 1.5, "beat_s": 0.5, "abandon_grace_s": 2.0},
        redis={"command_timeout_s": 0.5, "connect_timeout_s": 0.5},
    )


@pytest.fixture
async def hurt(own_settings: Settings) -> AsyncIterator[Store]:
    """A store on a server that may be hurt; the invariants hold afterwards all the same."""
    opened = await Store.connect(own_settings)
    yield opened
    await check_pool(opened)
    await opened.close()


T = TypeVar("T")


async def _insist(call: Callable[[], Awaitable[T]]) -> T:
    """As gateways and agents do: the same call again until it is answered."""
    while True:
        try:
            return await call()
        except errors.StoreUnavailable:
            await asyncio.sleep(0.05)


async def _serve(agent: FakeAgent, stop: asyncio.Event) -> int:
    """Claim, answer, beat; every call repeated with its number until it is answered."""
    done = 0
    line: Any = {"card": agent.card, "session": agent.session}
    while True:
        agent.seq += 1
        claim = partial(cards.claim, agent.store, seq=agent.seq, want=16, sample=agent.sample(), **line)
        handout = await _insist(claim)
        agent.now_ms, agent.applied = handout.now_ms, agent.seq
        agent.held |= {job.lease_id: job for job in handout.jobs}
        if handout.jobs:
            agent.seq += 1
            reports = [ok(job) for job in handout.jobs]
            finish = partial(
                cards.finish,
                agent.store,
                seq=agent.seq,
                want=0,
                reports=reports,
                sample=agent.sample(),
                **line,
            )
            answer = await _insist(finish)
            assert set(answer.verdicts) == {"ok"}
            agent.applied = agent.seq
            done += len(reports)
            agent.held.clear()
        elif stop.is_set():
            return done
        else:
            await asyncio.sleep(0.01)
        await _insist(agent.beat)


async def _load(store: Store, number: int, hurt: Callable[[], Awaitable[None]]) -> list[SubmitRequest]:
    """Submits by ten clients and an agent that serves them, while `hurt` does its worst. Returns what was
    accepted.
    """
    agent = FakeAgent(store)
    await agent.register()
    stop = asyncio.Event()
    serving = asyncio.create_task(_serve(agent, stop))
    accepted: list[SubmitRequest] = []

    async def client(mine: list[SubmitRequest]) -> None:
        for each in mine:
            await _insist(partial(admission.submit, store, each))
            accepted.append(each)

    asked = [request(nbytes=MIB, inputs=i, key=f"k{i}" if i % 2 else None) for i in range(number)]
    clients = [asyncio.create_task(client(asked[i::10])) for i in range(10)]
    await hurt()
    await asyncio.gather(*clients)
    stop.set()
    assert await serving == number
    return accepted


async def _all_succeeded(store: Store, accepted: list[SubmitRequest]) -> None:
    states = {(await jobs.view(store, each.job_id)).state for each in accepted}
    assert states == {"succeeded"}
    totals = await inventory.totals(store)
    assert totals["settled.succeeded"] == len(accepted) == totals["submitted"]


async def test_script_flush_under_load(hurt: Store) -> None:
    """The scripts vanish again and again: no caller sees it, nothing is lost or done twice."""

    async def flush() -> None:
        for _ in range(15):
            await hurt.redis.script_flush()
            await asyncio.sleep(0.01)

    await _all_succeeded(hurt, await _load(hurt, 300, flush))


async def test_client_kill_under_load(hurt: Store, own_settings: Settings) -> None:
    """All connections are cut again and again: every accepted job is answered once."""
    other = Store(own_settings)

    async def cut() -> None:
        client: Any = other.redis
        for _ in range(10):
            await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.03)

    await _all_succeeded(hurt, await _load(hurt, 300, cut))
    await other.close()


async def test_kill_9_of_the_server_loses_nothing_that_was_accepted(
    hurt: Store, own_server: TestServer
) -> None:
    """With an append-only file: killed under load and started again, everything accepted is answered once,
    and the new run of the server was recovered once.
    """
    before = int(await hurt.redis.hget(hurt.keys.meta, "inc") or 0)

    async def kill() -> None:
        await asyncio.sleep(0.1)
        own_server.kill()
        await asyncio.sleep(0.2)
        await asyncio.to_thread(own_server.start)

    await _all_succeeded(hurt, await _load(hurt, 300, kill))
    assert int(await hurt.redis.hget(hurt.keys.meta, "inc") or 0) == before + 1
    info = await hurt.redis.info("server")
    assert await hurt.redis.hget(hurt.keys.meta, "run") == info["run_id"].encode()


async def test_many_stores_recover_a_new_server_once(hurt: Store, own_settings: Settings) -> None:
    """Four workers meet a server whose run the pool does not know: one starts the incarnation, all work
    on.
    """
    await hurt.redis.hset(hurt.keys.meta, "run", "another")
    before = int(await hurt.redis.hget(hurt.keys.meta, "inc") or 0)
    opened = await asyncio.gather(*(Store.connect(own_settings) for _ in range(4)))
    assert int(await hurt.redis.hget(hurt.keys.meta, "inc") or 0) == before + 1
    for store in opened:
        await store.close()


async def test_a_frozen_server_that_wakes_up_reaps_nobody(hurt: Store, own_server: TestServer) -> None:
    """Stopped for longer than a session and continued: the first sweep gives grace; nobody who is alive is
    lost.
    """
    agents = [FakeAgent(hurt, f"GPU-{i}") for i in range(3)]
    for agent in agents:
        await agent.register()
    await gateway_beat(hurt, "w1")
    asked = await admission.submit(hurt, request(worker="w1", max_wait_ms=60_000))
    own_server.signal(signal.SIGSTOP)
    with contextlib.suppress(errors.StoreUnavailable):
        await agents[0].beat()
    await asyncio.sleep(1)
    own_server.signal(signal.SIGCONT)
    for _ in range(3):
        await _insist(lambda: gateway_beat(hurt, "other"))
    for agent in agents:
        await _insist(agent.beat)
    await gateway_beat(hurt, "w1")
    assert {card.state for card in await inventory.cards(hurt)} == {"ready"}
    totals = await inventory.totals(hurt)
    assert (totals.get("sessions_lost", 0), totals["graces"]) == (0, 1)
    assert (await jobs.view(hurt, asked.job_id)).state == "leased"


async def test_a_frozen_server_lets_nobody_take_a_card(hurt: Store, own_server: TestServer) -> None:
    """The first call after the freeze is another agent's register: the one that holds the card keeps it."""
    agent, other = FakeAgent(hurt), FakeAgent(hurt)
    await agent.register()
    own_server.signal(signal.SIGSTOP)
    await asyncio.sleep(1.8)
    own_server.signal(signal.SIGCONT)
    with pytest.raises(cards.CardTaken):
        await _insist(other.register)
    await agent.beat()


async def test_the_dead_are_reaped_after_the_grace(hurt: Store, own_server: TestServer) -> None:
    """Grace is one session long: an agent that is really gone is lost after it."""
    agent = FakeAgent(hurt)
    await agent.register()
    own_server.signal(signal.SIGSTOP)
    await asyncio.sleep(1.8)
    own_server.signal(signal.SIGCONT)
    began = (await _insist(lambda: gateway_beat(hurt, "w1"))).now_ms
    ended = began

    async def is_lost() -> bool:
        nonlocal ended
        ended = (await gateway_beat(hurt, "w1")).now_ms
        return (await inventory.card(hurt, agent.card)).state == "lost"

    await until("the dead agent is lost", is_lost, pause_s=0.1)
    assert 1000 <= ended - began <= 3500


async def test_time_never_goes_back(store: Store) -> None:
    """The server's clock is behind the last value: ledger time neither jumps back nor stands still."""
    first = (await gateway_beat(store, "w1")).now_ms
    await shift_clock(store, ms=5000)
    stamps = []
    for _ in range(5):
        stamps.append((await gateway_beat(store, "w1")).now_ms)
        await asyncio.sleep(0.01)
    assert stamps == sorted(stamps)
    assert stamps[0] >= first + 5000
    assert stamps[-1] >= stamps[0] + 30, "it goes on at the usual pace"
    assert (await inventory.cards(store)) == ()


async def test_a_full_server_takes_nothing_new_and_lets_go(hurt: Store) -> None:
    """maxmemory reached: submit is refused as store_unavailable and stores nothing; beats, finishes,
    abandons and cancels work and free memory, until submits work again.
    """
    agent = FakeAgent(hurt)
    await agent.register()
    asked = [request(nbytes=MIB, inputs="x" * 100_000) for _ in range(30)]
    for each in asked:
        await admission.submit(hurt, each)
    held = await agent.claim(want=3)
    used = int((await hurt.redis.info("memory"))["used_memory"])
    await hurt.redis.config_set("maxmemory", used - 200_000)
    refused = request(inputs="x" * 100_000)
    with pytest.raises(errors.StoreUnavailable, match="full"):
        await admission.submit(hurt, refused)
    assert not await hurt.redis.exists(hurt.keys.job(refused.job_id), hurt.keys.name("pay", refused.job_id))
    agent.start(held[0])
    await agent.beat()
    assert (await agent.finish(ok(held[0]), said(held[1], "crashed"))).verdicts == ("ok", "ok")
    await gateway_beat(hurt, "w1")
    await admission.cancel(hurt, asked[2].job_id)
    for each in asked[10:20]:
        await admission.abandon(hurt, job_id=each.job_id, client=each.job_id, tenant="-", key=None)
    assert int((await hurt.redis.info("memory"))["used_memory"]) < used - 500_000
    await admission.submit(hurt, refused)
    await hurt.redis.config_set("maxmemory", 0)


async def test_a_server_that_evicts_is_refused(own_server: TestServer, own_settings: Settings) -> None:
    """BadStore names the policy and the remedy in one line, and leaves no key behind."""
    plain = Store(own_settings)
    await plain.redis.config_set("maxmemory-policy", "volatile-lru")
    with pytest.raises(BadStore, match="set maxmemory-policy noeviction") as refusal:
        await Store.connect(own_settings)
    assert "volatile-lru" in refusal.value.detail and "\n" not in refusal.value.detail
    assert not await plain.redis.dbsize()
    await plain.close()


@pytest.mark.parametrize("field", ["clock", f"clock:{LAYOUT + 1}"])
async def test_a_pool_of_another_layout_is_refused(
    own_server: TestServer, own_settings: Settings, field: str
) -> None:
    """BadStore names both layouts and the remedies in one line, whether the pool was there at the start or
    came with another server behind the name; nothing is written to it. Other pools of it are served.
    """
    meta, plain = Keys(own_settings.pool).meta, Redis(port=own_server.port)
    plain.hset(meta, field, b"")
    with pytest.raises(BadStore, match=f"not {LAYOUT}.*VRAMGATE_POOL") as refusal:
        await Store.connect(own_settings)
    assert f"layout {field.partition(':')[2] or 0}," in refusal.value.detail
    assert "\n" not in refusal.value.detail
    assert plain.hgetall(meta) == {field.encode(): b""}
    other = await Store.connect(own_settings.model_copy(update={"pool": "another"}))
    await gateway_beat(other, "w")
    await other.close()

    plain.delete(meta)
    store = await Store.connect(own_settings)
    await gateway_beat(store, "w")
    plain.close()
    own_server.kill()
    own_server.start()
    plain.delete(meta)
    plain.hset(meta, field, b"")
    with pytest.raises(BadStore, match="another release"):
        await gateway_beat(store, "w")
    assert plain.hgetall(meta) == {field.encode(): b""}
    plain.close()
    await store.close()


async def test_no_server_is_said_in_one_line(own_server: TestServer, own_settings: Settings) -> None:
    """StoreUnavailable with the address, without the password, whatever call meets it."""
    own_server.kill()
    with pytest.raises(errors.StoreUnavailable, match="does not answer") as refusal:
        await Store.connect(own_settings)
    assert f":{own_server.port}" in refusal.value.detail and "\n" not in refusal.value.detail


async def test_a_failed_script_is_followed_by_an_audit(hurt: Store) -> None:
    """A key of a wrong type makes a script fail half-way: told as internal, the sums are recomputed."""
    agent = FakeAgent(hurt)
    await agent.register()
    await hurt.redis.hset(hurt.keys.meta, "audited", 0)
    await hurt.redis.set(hurt.keys.name("ready", agent.card), "not a list")
    with pytest.raises(errors.Internal, match="submit failed"):
        await admission.submit(hurt, request(nbytes=MIB))
    assert int(await hurt.redis.hget(hurt.keys.meta, "audited") or 0) > 0
    assert not any((await inventory.audit(hurt)).values())
    await hurt.redis.flushdb()
