"""The queue: order, ageing, passing, reservations, and how long a refused caller is told to stay away."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import pytest

from scheduler import admission, inventory, jobs
from scheduler.store import Store
from tests.ledger.conftest import Tuned
from tests.ledger.fake_agent import GIB, MIB, FakeAgent, hosted, ok, request
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


async def _pipelined(store: Store, asked: list[Any]) -> None:
    """The commands of `submit`, sent in one write."""
    commands: list[tuple[Any, ...]] = []

    class Recorder:
        async def evalsha(self, *command: Any) -> list[Any]:
            commands.append(command)
            fields = {"job": "", "how": "stored", "state": "", "position": 0, "card": "", "now": 0}
            from scheduler.store import pack

            return [b"ok", pack(fields)]

    real, store.redis = store.redis, Recorder()  # type: ignore[assignment]
    try:
        for each in asked:
            await admission.submit(store, each)
    finally:
        store.redis = real
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
        view = await store.redis.hget(store.keys.job(big.job_id), "np")
        passes.append(int(view or 0))
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


async def test_nine_thousand_waiters_keep_nothing_from_another_models_idle_card(store: Store) -> None:
    """Their card is busy; a job of the other model starts at once, and its submit looks at none of them."""
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


@pytest.mark.parametrize("refusal", ["queue_full", "wait_timeout"])
async def test_retry_after_is_true_within_a_factor_of_two(tuned: Tuned, refusal: str) -> None:
    """Steady load, 20 refused callers: the n-th of them is promised the n-th further grant."""
    store = await tuned(limits={"queue_jobs": 8}, clocks={"session_s": 10.0, "beat_s": 3.0})
    agent = FakeAgent(store, total=GIB, models=(hosted(slots=1),), slots=1)
    await agent.register()
    grants: list[int] = []
    stop = asyncio.Event()

    async def work() -> None:
        held = await agent.claim(want=1)
        while not stop.is_set():
            await asyncio.sleep(0.05)
            handout = await agent.finish(*(ok(job) for job in held), want=1)
            held = list(handout.jobs)
            if held:
                grants.append(handout.now_ms)
        await agent.finish(*(ok(job) for job in held))

    async def load() -> None:
        while not stop.is_set():
            try:
                await admission.submit(store, request())
            except errors.QueueFull:
                await asyncio.sleep(0.02)

    promises: list[tuple[int, int]] = []
    await asyncio.gather(*(admission.submit(store, request()) for _ in range(6)))
    tasks = [asyncio.create_task(work())]
    if refusal == "queue_full":
        while len(grants) < 15:
            if (await store.redis.hlen(store.keys.name("limits"))) and len(grants) < 15:
                with_room = (await inventory.queue(store))[0].waiting if await inventory.queue(store) else 0
                for _ in range(8 - with_room):
                    await admission.submit(store, request())
            await asyncio.sleep(0.02)
        for _ in range(20):
            promises.append(await _refused_at(store))
    else:
        for _ in range(40):
            await asyncio.sleep(0.05)
            if await store.redis.zcard(store.keys.name("q", "echo")) < 6:
                await admission.submit(store, request())
        promises = await _timed_out(store)
    tasks.append(asyncio.create_task(load()))
    first = min(at for at, _ in promises)
    while len([at for at in grants if at > first]) < len(promises):
        await asyncio.sleep(0.05)
    stop.set()
    await asyncio.gather(*tasks)
    await agent.run_all()
    ratios = []
    for number, (at, promised_ms) in enumerate(sorted(promises)):
        came = [grant for grant in grants if grant > first][number]
        ratios.append(promised_ms / max(came - at, 1))
    assert len(ratios) == len(promises) >= 20
    assert 0.5 <= statistics.median(ratios) <= 2.0, ratios


async def _refused_at(store: Store) -> tuple[int, int]:
    """(Redis ms, promised ms) of one queue_full."""
    while True:
        reply = await _raw_submit(store)
        if reply.status == "refused":
            return reply.now_ms, int(reply.fields["retry_ms"])


async def _raw_submit(store: Store) -> Any:
    asked = request()
    return await store.run(
        "submit",
        {
            "id": asked.job_id,
            "model": asked.model,
            "bytes": asked.lease_bytes,
            "units": asked.units,
            "worker": asked.worker,
            "priority": 4,
            "wait_ms": 30_000,
            "run_ms": 60_000,
            "total_ms": 100_000,
            "tenant": "-",
        },
        keys=(
            store.keys.job(asked.job_id),
            store.keys.tombstone(asked.job_id),
            store.keys.tombstone(asked.job_id),
        ),
        blobs=(asked.inputs,),
    )


async def _timed_out(store: Store) -> list[tuple[int, int]]:
    raise NotImplementedError
