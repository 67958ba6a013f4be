"""Wait, run and total clocks, by Redis time, swept by whoever calls."""

from __future__ import annotations

import asyncio

import pytest

from scheduler import admission, inventory, jobs
from scheduler.gateways import gateway_beat
from scheduler.store import Store
from tests.ledger.fake_agent import GIB, FakeAgent, ok, request, said
from tests.waiting import until


async def _settled(store: Store, job_id: str) -> bool:
    await gateway_beat(store, "sweeper")
    return (await jobs.view(store, job_id)).settled_ms is not None


async def test_a_wait_over_the_limit_expires_with_a_promise(store: Store) -> None:
    """wait_timeout not before its limit and within a sweep after it, with Retry-After; the next one is
    unharmed.
    """
    agent = FakeAgent(store, total=GIB)
    await agent.register()
    await admission.submit(store, request())
    short = await admission.submit(store, request(max_wait_ms=300))
    patient = await admission.submit(store, request())
    await until("the wait clock passed", lambda: _settled(store, short.job_id))
    view = await jobs.view(store, short.job_id)
    assert (view.state, view.code) == ("expired", "wait_timeout")
    assert view.settled_ms is not None and 300 <= view.settled_ms - view.created_ms < 800
    outcome = await jobs.outcome(store, short.job_id)
    assert outcome is not None and outcome.data["retry_ms"] > 0
    await agent.beat()
    (job,) = await agent.claim()
    assert [each.job_id for each in (await agent.finish(ok(job), want=1)).jobs] == [patient.job_id]


@pytest.mark.parametrize("sweeper", ["gateway", "beat", "finish"])
async def test_gateways_beats_and_finishes_sweep(store: Store, sweeper: str) -> None:
    """No deadline depends on one process: each of the three alone enforces it."""
    agent = FakeAgent(store, total=GIB)
    await agent.register()
    await admission.submit(store, request())
    (job,) = await agent.claim()
    short = await admission.submit(store, request(max_wait_ms=50))
    await asyncio.sleep(0.1)
    if sweeper == "gateway":
        await gateway_beat(store, "w1")
    elif sweeper == "beat":
        await agent.beat()
    else:
        await agent.finish(ok(job))
    assert (await jobs.view(store, short.job_id)).code == "wait_timeout"


async def test_a_model_without_a_ready_card_says_so(store: Store) -> None:
    """A known model queues within the limits while no card is ready, and its wait ends as no_ready_card."""
    agent = FakeAgent(store)
    await agent.register(state="starting")
    asked = await admission.submit(store, request(max_wait_ms=50))
    assert asked.state == "queued"
    assert (await jobs.view(store, asked.job_id)).why == "no_ready_card"
    await until("the wait clock passed", lambda: _settled(store, asked.job_id))
    assert (await jobs.view(store, asked.job_id)).code == "no_ready_card"


async def test_the_wait_clock_goes_on_while_a_job_is_leased_and_not_started(store: Store) -> None:
    """Prefetching burns no run clock; the caller is answered at the wait limit, the agent told to drop the
    job.
    """
    agent = FakeAgent(store)
    await agent.register()
    asked = await admission.submit(store, request(max_wait_ms=200, run_timeout_ms=50))
    (job,) = await agent.claim()
    await asyncio.sleep(0.1)
    await agent.beat()
    assert (await jobs.view(store, asked.job_id)).state == "leased", "the run clock has not begun"
    await until("the wait clock passed", lambda: _settled(store, asked.job_id))
    view = await jobs.view(store, asked.job_id)
    assert view.code == "wait_timeout"
    answer = await agent.beat()
    assert [(each.lease_id, each.force) for each in answer.cancels] == [(job.lease_id, False)]
    await agent.finish(said(job, "ended"))


async def test_the_run_clock_starts_with_the_reported_start(store: Store) -> None:
    """The start is an age: its Redis time lies before the report. Past the limit: run_timeout, ended by
    force.
    """
    agent = FakeAgent(store)
    await agent.register()
    asked = await admission.submit(store, request(run_timeout_ms=300))
    (job,) = await agent.claim()
    await asyncio.sleep(0.15)
    agent.start(job, age_ms=100)
    answer = await agent.beat()
    view = await jobs.view(store, asked.job_id)
    assert (view.state, view.started_ms) == ("running", answer.now_ms - 100)
    await until("the run clock passed", lambda: _settled(store, asked.job_id))
    view = await jobs.view(store, asked.job_id)
    assert (view.state, view.code) == ("failed", "run_timeout")
    assert view.settled_ms is not None and view.started_ms is not None
    assert 300 <= view.settled_ms - view.started_ms < 800
    answer = await agent.beat()
    assert [(each.lease_id, each.force) for each in answer.cancels] == [(job.lease_id, True)]
    assert (await inventory.card(store, agent.card)).ledger.jobs == GIB, "expiry alone frees nothing"
    await agent.finish(said(job, "ended"))
    assert (await inventory.card(store, agent.card)).ledger.jobs == 0


async def test_a_start_is_never_before_its_grant(store: Store) -> None:
    """An absurd age does not burn the run clock of a job that was just granted."""
    agent = FakeAgent(store)
    await agent.register()
    asked = await admission.submit(store, request())
    (job,) = await agent.claim()
    agent.start(job, age_ms=10_000_000)
    await agent.beat()
    view = await jobs.view(store, asked.job_id)
    assert view.started_ms == view.granted_ms


async def test_a_run_that_was_cut_off_resets_the_wait_clock_and_never_the_total_one(store: Store) -> None:
    """Started and given back again and again, the job waits anew each time, until its total limit ends it."""
    agent = FakeAgent(store)
    await agent.register()
    asked = await admission.submit(store, request(max_wait_ms=300, total_timeout_ms=900))
    first = await jobs.view(store, asked.job_id)
    last_wait = 0

    async def cut_off() -> bool:
        nonlocal last_wait
        for job in await agent.claim():
            agent.start(job)
            await agent.finish(said(job, "killed"))
        view = await jobs.view(store, asked.job_id)
        last_wait = max(last_wait, view.wait_started_ms)
        return await _settled(store, asked.job_id)

    await until("the total clock passed", cut_off, pause_s=0.1)
    view = await jobs.view(store, asked.job_id)
    assert (view.state, view.code) == ("expired", "total_timeout")
    assert last_wait > first.wait_started_ms + 300, "waited longer than one limit in all"
    assert view.settled_ms is not None and 900 <= view.settled_ms - view.created_ms < 1500
    await agent.beat()


async def test_a_move_does_not_reset_the_wait_clock(store: Store) -> None:
    """Handed out and given back again and again without a start, the job is ended by its wait limit."""
    agent = FakeAgent(store)
    await agent.register()
    asked = await admission.submit(store, request(max_wait_ms=300, total_timeout_ms=5000))

    async def give_back() -> bool:
        for job in await agent.claim():
            await agent.finish(said(job, "give_back"))
        return await _settled(store, asked.job_id)

    await until("a clock passed", give_back, pause_s=0.05)
    view = await jobs.view(store, asked.job_id)
    assert (view.state, view.code) == ("expired", "wait_timeout")
    assert view.attempt > 1 and view.wait_started_ms == view.created_ms
    assert view.settled_ms is not None and 300 <= view.settled_ms - view.created_ms
    await agent.beat()


async def test_a_running_job_past_its_total_limit_is_ended_by_force(store: Store) -> None:
    """total_timeout settles the caller; the run is killed on its card."""
    agent = FakeAgent(store)
    await agent.register()
    asked = await admission.submit(store, request(total_timeout_ms=200))
    (job,) = await agent.claim()
    agent.start(job)
    await agent.beat()
    await until("the total clock passed", lambda: _settled(store, asked.job_id))
    assert (await jobs.view(store, asked.job_id)).code == "total_timeout"
    assert [each.force for each in (await agent.beat()).cancels] == [True]
    await agent.finish(said(job, "ended"))


async def test_at_most_sixteen_deadlines_in_a_call(store: Store) -> None:
    """Many that are due at once are swept sixteen at a time, and the caller is told that there are more."""
    agent = FakeAgent(store)
    await agent.register(state="starting")
    for _ in range(40):
        await admission.submit(store, request(max_wait_ms=1))
    await asyncio.sleep(0.01)
    more: list[bool] = []
    while not more or more[-1]:
        more.append((await gateway_beat(store, "w1")).more)
    assert more == [True, True, False]
    assert (await inventory.totals(store))["settled.expired"] == 40
