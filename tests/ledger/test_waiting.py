"""The queue: order, ageing, passing, reservations, and how long a refused caller is told to stay away."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import statistics
import struct
import time
from typing import Any

import pytest

from scheduler import admission, inventory, jobs, scripts
from scheduler.gateways import gateway_beat
from scheduler.store import Reply, Store
from scheduler.submissions import SubmitRequest
from tests.ledger.conftest import Tuned, shift_clock
from tests.ledger.fake_agent import GIB, MIB, FakeAgent, hosted, ok, request
from tests.packed import unpack_job
from vramgate import errors


async def _order(agent: FakeAgent) -> list[str]:
    """Claim and answer one by one: the order in which jobs start."""
    started = []
    while handed := await agent.claim(want=1):
        started.append(handed[0].job_id)
        await agent.finish(ok(handed[0]))
    return started


async def test_jobs_of_one_millisecond_start_in_the_order_of_their_arrival(store: Store) -> None:
    """FIFO, exactly, for submits that come faster than the clock ticks."""
    agent = FakeAgent(store, total=GIB)
    await agent.register()
    asked = [request(nbytes=GIB) for _ in range(300)]
    for at in range(0, len(asked), 20):
        # Through one connection's pipeline, so that each batch arrives within a millisecond or two.
        await _pipelined(store, asked[at : at + 20])
    stamps = [(await jobs.view(store, each.job_id)).created_ms for each in asked]
    assert len(set(stamps)) < len(stamps), "some share their millisecond"
    assert await _order(agent) == [each.job_id for each in asked]


async def _pipelined(store: Store, asked: list[SubmitRequest]) -> None:
    """The calls of `submit`, sent in one write on one connection."""
    commands: list[tuple[Any, ...]] = []

    async def record(name: str, args: bytes, keys: Any, blobs: Any) -> Reply:
        argv = (args, store.script_settings(name), secrets.token_hex(256), *blobs)
        commands.append((scripts.load(name).sha, 1 + len(keys), store.keys.meta, *keys, *argv))
        return Reply("ok", {"job": "", "how": "stored", "state": "", "position": 0, "card": ""}, ())

    real, store._call = store._call, record  # type: ignore[method-assign, assignment]
    try:
        for each in asked:
            await admission.submit(store, each)
    finally:
        store._call = real  # type: ignore[method-assign]
    async with store.redis.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.evalsha(*command)
        await pipe.execute()


async def test_priority_is_a_head_start_and_not_a_right(tuned: Tuned) -> None:
    """Effective time = enqueue time - boost x priority: a late urgent job passes, a later one does not."""
    store = await tuned(placement={"boost_s": 0.2}, clocks={"session_s": 10.0, "beat_s": 3.0})
    agent = FakeAgent(store, total=GIB)
    await agent.register()
    first = await admission.submit(store, request(priority=0))
    waiting = await admission.submit(store, request(priority=0))
    urgent = await admission.submit(store, request(priority=9))
    await asyncio.sleep(0.3)
    late = await admission.submit(store, request(priority=1))
    assert await _order(agent) == [each.job_id for each in (first, urgent, waiting, late)]


async def test_classes_are_merged_by_effective_time(store: Store) -> None:
    """A release serves the oldest waiter of all models of its card."""
    agent = FakeAgent(store, total=GIB, models=(hosted("a"), hosted("b")))
    await agent.register()
    asked = [(await admission.submit(store, request(name))).job_id for name in "aabbab"]
    assert await _order(agent) == asked


async def test_passing_is_counted_exactly_and_ends_in_a_reservation(tuned: Tuned) -> None:
    """A big head is passed max_passed times, then bytes accumulate for it and it starts next."""
    store = await tuned(placement={"max_passed": 5, "max_passing_s": 3600})
    agent = FakeAgent(store, total=4 * GIB, models=(hosted(slots=64),), slots=64)
    await agent.register()
    for _ in range(4):
        await admission.submit(store, request(nbytes=GIB))
    big = await admission.submit(store, request(nbytes=4 * GIB))
    small = [(await admission.submit(store, request(nbytes=GIB))).job_id for _ in range(20)]
    held = await agent.claim()
    passes: list[int] = []
    while len(held) or not passes:
        handout = await agent.finish(ok(held.pop(0)), want=16)
        held += handout.jobs
        record: Any = await store.redis.get(store.keys.job(big.job_id))
        passes.append(unpack_job(record).get("np", 0))
        if any(job.job_id == big.job_id for job in held):
            break
    assert max(passes) == 5
    assert [job.job_id for job in held] == [big.job_id], "it has the whole card"
    states = [(await jobs.view(store, job_id)).state for job_id in small]
    assert states == ["succeeded"] * 5 + ["queued"] * 15
    await agent.finish(ok(held[0]))
    assert await agent.run_all() == 15


async def test_a_head_that_waited_long_enough_is_passed_no_more(tuned: Tuned) -> None:
    """After max_passing the head gets a named reservation, shown on its card, and starts within the bound."""
    store = await tuned(placement={"max_passed": 10_000, "max_passing_s": 0.4})
    agent = FakeAgent(store, total=4 * GIB, models=(hosted(slots=64),), slots=64)
    await agent.register()
    for _ in range(4):
        await admission.submit(store, request(nbytes=GIB, worker="stream"))
    big = await admission.submit(store, request(nbytes=3 * GIB))
    held = list(await agent.claim())
    deadline = time.monotonic() + 10
    seen_reserved = False
    while not any(job.job_id == big.job_id for job in held):
        assert time.monotonic() < deadline
        await admission.submit(store, request(nbytes=GIB, worker="stream"))
        handout = await agent.finish(ok(held.pop(0)), want=16)
        held += handout.jobs
        card = await inventory.card(store, agent.card)
        if card.head == big.job_id:
            seen_reserved = True
            assert card.ledger.reserved_for_head > 0 or card.ledger.jobs > GIB
            assert (await jobs.view(store, big.job_id)).why == "reserved"
        await asyncio.sleep(0.02)
    assert seen_reserved
    view = await jobs.view(store, big.job_id)
    assert view.granted_ms is not None
    longest_run_ms = 4 * 100
    assert view.granted_ms - view.created_ms < 400 + longest_run_ms + 600
    await agent.finish(*(ok(job) for job in held))
    await agent.run_all()


async def test_nine_thousand_waiters_keep_nothing_from_another_models_idle_card(tuned: Tuned) -> None:
    """Their card is busy; a job of the other model starts at once, and its submit looks at none of them."""
    store = await tuned(clocks={"session_s": 60.0, "beat_s": 20.0})
    busy = FakeAgent(store, "GPU-a", models=(hosted("a", slots=1),))
    idle = FakeAgent(store, "GPU-b", models=(hosted("b", slots=1),))
    await busy.register()
    await idle.register()
    for _ in range(90):
        await _pipelined(store, [request("a", nbytes=MIB, total_timeout_ms=600_000) for _ in range(100)])
    (view,) = await inventory.queue(store)
    assert view.waiting == 8999
    await idle.beat()
    for _ in range(3):
        assert (await admission.submit(store, request("b", nbytes=MIB))).state == "leased"
        assert await idle.run_all() == 1
    await busy.beat()
    handed = await busy.claim()
    assert len(handed) == 1


@pytest.mark.parametrize(
    ("refusal", "run_s", "callers", "in_seconds"),
    [("queue_full", 0.07, 20, False), ("wait_timeout", 0.07, 20, False), ("queue_full", 0.3, 14, True)],
)
async def test_retry_after_is_true_within_a_factor_of_two(
    tuned: Tuned, refusal: str, run_s: float, callers: int, in_seconds: bool
) -> None:
    """Steady load, several refused callers: the n-th was promised the moment of the n-th further grant, in
    ms as the ledger says it and, where jobs are slow enough for it to matter, in the whole seconds of
    Retry-After.
    """
    store = await tuned(limits={"queue_jobs": 60}, clocks={"session_s": 10.0, "beat_s": 3.0})
    agent = FakeAgent(store, total=GIB, models=(hosted(slots=1),), slots=1)
    await agent.register()
    grants: list[int] = []
    stop = asyncio.Event()

    async def work() -> None:
        while not stop.is_set():
            held = await agent.claim(want=1)
            grants.extend([agent.now_ms] * len(held))
            await asyncio.sleep(run_s)
            await agent.finish(*(ok(job) for job in held))

    async def load() -> None:
        """Keeps the queue full."""
        while not stop.is_set():
            with contextlib.suppress(errors.QueueFull):
                for _ in range(60 - await store.redis.zcard(store.keys.name("q", "echo"))):
                    await admission.submit(store, request())
            await asyncio.sleep(0.01)

    patient = 35
    short = [request(max_wait_ms=1500) for _ in range(callers)]
    tasks = [asyncio.create_task(work())]
    for _ in range(patient):
        await admission.submit(store, request(priority=9))
    if refusal == "wait_timeout":
        for each in short:
            await admission.submit(store, each)
    while len(grants) < (12 if run_s < 0.1 else 5):
        await asyncio.sleep(0.02)
    tasks.append(asyncio.create_task(load()))
    if refusal == "queue_full":
        promises = [await _refused(store) for _ in range(callers)]
    else:
        promises = await _timed_out(store, [each.job_id for each in short])
    first = promises[0][0]
    while sum(at > first for at in grants) < len(promises):
        await asyncio.sleep(0.02)
    stop.set()
    await asyncio.gather(*tasks)
    await agent.run_all()
    came = [at for at in grants if at > first]
    if in_seconds:
        promises = [(at, 1000 * max(1, -(-promised // 1000))) for at, promised in promises]
    ratios = [promised / max(came[n] - at, 1) for n, (at, promised) in enumerate(promises)]
    assert 0.5 <= statistics.median(ratios) <= 2.0, [round(ratio, 2) for ratio in ratios]


async def _refused(store: Store) -> tuple[int, int]:
    """(Redis ms, promised ms) of one queue_full."""
    real = store.run
    told: list[Reply] = []

    async def run(*args: Any, **given: Any) -> Reply:
        told.append(await real(*args, **given))
        return told[-1]

    store.run = run  # type: ignore[method-assign]
    try:
        while True:
            try:
                await admission.submit(store, request())
            except errors.QueueFull as refusal:
                promised_ms = int(told[-1].fields["retry_ms"])
                assert refusal.retry_after_s == max(1, -(-promised_ms // 1000))
                return told[-1].now_ms, promised_ms
    finally:
        store.run = real  # type: ignore[method-assign]


async def _timed_out(store: Store, job_ids: list[str]) -> list[tuple[int, int]]:
    """The same of jobs whose wait passes its limit while others go before them."""
    promises: list[tuple[int, int]] = []
    while len(promises) < len(job_ids):
        await gateway_beat(store, "w1")
        outcomes = [await jobs.outcome(store, job_id) for job_id in job_ids]
        promises = [
            ((await jobs.view(store, outcome.job_id)).settled_ms or 0, int(outcome.data["retry_ms"]))
            for outcome in outcomes
            if outcome is not None
        ]
        await asyncio.sleep(0.02)
    return sorted(promises)


async def test_a_big_job_whose_limit_is_below_the_published_bound_is_told_so(tuned: Tuned) -> None:
    """Memory was being set aside for it, and its wait limit ended first: the refusal names the bound."""
    store = await tuned(placement={"max_passed": 0, "max_passing_s": 0.4}, clocks={"run_timeout_s": 7})
    agent = FakeAgent(store, total=4 * GIB, models=(hosted(slots=64),), slots=64)
    await agent.register()
    await admission.submit(store, request(nbytes=2 * GIB))
    big = await admission.submit(store, request(nbytes=4 * GIB, max_wait_ms=300))
    await until_settled(store, big.job_id, agent)
    detail = (await jobs.view(store, big.job_id)).detail or ""
    bound_ms = 9 * 2000 + 400 + 7000 + 2 * 300
    assert f"can take {bound_ms} ms" in detail
    await agent.run_all()


async def until_settled(store: Store, job_id: str, agent: FakeAgent) -> None:
    """Beat until the job is settled."""
    deadline = time.monotonic() + 10
    while (await jobs.view(store, job_id)).state in ("queued", "leased", "running"):
        assert time.monotonic() < deadline, f"job {job_id} is not settled"
        await agent.beat()
        await asyncio.sleep(0.02)


async def test_an_outage_does_not_count_into_retry_after(tuned: Tuned) -> None:
    """A minute in which the card was down, or the server frozen, leaves the measured interval as it was."""
    store = await tuned(placement={"max_passing_s": 3600})
    agent = FakeAgent(store, total=4 * GIB)
    await agent.register()
    for _ in range(6):
        await admission.submit(store, request(nbytes=3 * GIB))
    for _ in range(3):
        await agent.finish(*[ok(job) for job in await agent.claim()])
    (before,) = await inventory.queue(store)
    await agent.beat("down")
    await _age(store, "echo", ms=60_000)
    (during,) = await inventory.queue(store)
    assert during.interval_ms is not None and during.interval_ms > 5_000, "the clock of the test works"
    await agent.beat("ready")
    (after,) = await inventory.queue(store)
    assert before.interval_ms is not None and after.interval_ms is not None
    assert after.interval_ms <= 2 * before.interval_ms + 50
    await _age(store, "echo", ms=60_000)
    await shift_clock(store, ms=-60_000)
    await agent.beat("ready")
    assert (await inventory.totals(store))["graces"] == 1
    (thawed,) = await inventory.queue(store)
    assert thawed.interval_ms is not None and thawed.interval_ms <= 2 * before.interval_ms + 50
    await agent.run_all()


async def _age(store: Store, model: str, *, ms: int) -> None:
    """As if the last grant of a class were so much longer ago."""
    field: Any = await store.redis.hget(store.keys.name("rate"), model)
    assert field is not None
    last, *rest = struct.unpack("<4d", field)
    await store.redis.hset(store.keys.name("rate"), model, struct.pack("<4d", last - ms, *rest))
