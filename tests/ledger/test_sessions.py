"""Sessions of agents and gateways: who holds a card, who is lost, what becomes of their jobs."""

from __future__ import annotations

import asyncio

import pytest

from scheduler import admission, cards, inventory, jobs
from scheduler.gateways import gateway_beat, gateway_leave
from scheduler.store import Store
from tests.ledger.conftest import Tuned
from tests.ledger.fake_agent import GIB, FakeAgent, ok, request, said
from tests.waiting import until


async def _card_state(store: Store, expected: str) -> bool:
    await gateway_beat(store, "w1")
    return (await inventory.card(store, "GPU-a")).state == expected


async def test_a_card_has_one_live_agent(store: Store) -> None:
    """A second agent is told CardTaken and changes nothing; the first one works on."""
    first, second = FakeAgent(store), FakeAgent(store)
    await first.register()
    asked = await admission.submit(store, request())
    with pytest.raises(cards.CardTaken, match="stop that agent first"):
        await second.register()
    assert [job.job_id for job in await first.claim()] == [asked.job_id]
    with pytest.raises(cards.SessionLost):
        await second.beat()


async def test_a_repeated_register_of_one_session_changes_nothing(store: Store) -> None:
    """The reply was lost: the same session registers again and keeps its leases and its numbers."""
    agent = FakeAgent(store)
    await agent.register()
    await admission.submit(store, request())
    (job,) = await agent.claim()
    await agent.register()
    assert (await agent.finish(ok(job))).verdicts == ("ok",)


async def test_a_silent_agent_is_lost_and_its_job_runs_elsewhere(tuned: Tuned) -> None:
    """Its running job is requeued with a loss, its prefetched one without; its bytes stay until it
    registers anew.
    """
    store = await tuned()
    silent, other = FakeAgent(store, "GPU-a"), FakeAgent(store, "GPU-b", total=2 * GIB)
    await silent.register()
    running = await admission.submit(store, request())
    prefetched = await admission.submit(store, request())
    held = await silent.claim()
    silent.start(held[0])
    await silent.beat()
    await other.register()
    heard_ms = silent.now_ms

    async def is_lost() -> bool:
        await other.beat()
        return (await inventory.card(store, "GPU-a")).state == "lost"

    await until("the silent card is lost", is_lost)
    assert silent.now_ms - heard_ms >= 990, "not before its session ended"
    views = [await jobs.view(store, each.job_id) for each in (running, prefetched)]
    assert [(view.card, view.losses, view.crashes) for view in views] == [("GPU-b", 1, 0), ("GPU-b", 0, 0)]
    assert (await inventory.card(store, "GPU-a")).ledger.jobs == 2 * GIB
    assert await other.run_all() == 2
    silent.renew()
    await silent.register()
    assert (await inventory.card(store, "GPU-a")).ledger.jobs == 0


async def test_an_agent_that_wakes_up_past_its_session_settles_nothing(tuned: Tuned) -> None:
    """Stopped, reaped, continued: claim, finish, beat, emit and card_down all answer SessionLost or False."""
    store = await tuned()
    agent = FakeAgent(store)
    await agent.register()
    asked = await admission.submit(store, request())
    (job,) = await agent.claim()
    await until("the agent's session ended", lambda: _card_state(store, "lost"))
    for call in (agent.claim(), agent.finish(ok(job)), agent.beat(), agent.down(said(job, "killed"))):
        with pytest.raises(cards.SessionLost):
            await call
    told = await cards.emit(
        store,
        card=agent.card,
        session=agent.session,
        job_id=job.job_id,
        lease_id=job.lease_id,
        attempt=1,
        events=[("progress", {"done": 1})],
    )
    assert told is False
    assert (await jobs.view(store, asked.job_id)).state == "queued"


async def test_a_late_beat_does_not_open_a_card_that_went_down(store: Store) -> None:
    """card_down, then a beat that was on its way and says ready, then one of after the kill: only that one
    opens.
    """
    agent = FakeAgent(store)
    await agent.register()
    await admission.submit(store, request())
    (job,) = await agent.claim()
    before = agent.applied
    await agent.down(said(job, "killed"))
    assert (await inventory.card(store, agent.card)).state == "down"
    await agent.beat("ready", applied=before)
    card = await inventory.card(store, agent.card)
    assert (card.state, card.jobs) == ("down", 0)
    assert await agent.claim() == []
    await agent.beat("ready")
    assert (await inventory.card(store, agent.card)).state == "ready"
    assert [again.job_id for again in await agent.claim()] == [job.job_id]


async def test_nothing_is_granted_between_card_down_and_a_fresh_sample(store: Store) -> None:
    """The bytes of the killed jobs are released at once, and still nobody gets them."""
    agent = FakeAgent(store, total=GIB)
    await agent.register()
    for _ in range(3):
        await admission.submit(store, request())
    (job,) = await agent.claim()
    await agent.down(said(job, "killed"))
    card = await inventory.card(store, agent.card)
    assert (card.ledger.jobs, card.jobs) == (0, 0)
    await agent.beat("down")
    assert (await admission.submit(store, request())).state == "queued"
    assert (await inventory.card(store, agent.card)).jobs == 0


async def test_a_sample_from_the_future_counts_as_of_now(store: Store) -> None:
    """An agent whose clock runs ahead does not keep its card open for longer, nor shut out its next
    reading.
    """
    agent = FakeAgent(store)
    await agent.register()
    agent.now_ms = agent.now_ms + 3_600_000
    await agent.beat()
    card = await inventory.card(store, agent.card)
    assert card.sample is not None and card.sample_age_ms is not None and card.sample_age_ms >= 0
    agent.foreign = 5 * GIB
    await agent.beat()
    assert (await inventory.card(store, agent.card)).ledger.foreign == 5 * GIB


async def test_foreign_and_overrun_are_computed_against_the_leases_of_that_instant(store: Store) -> None:
    """What is allocated beyond the leases is overrun; a finish brings a fresh reading, so that it is not
    one.
    """
    from scheduler.registration import Sample

    class Honest(FakeAgent):
        def sample(self) -> Sample:
            used = sum(job.lease_bytes for job in self.held.values())
            return Sample(self.now_ms, self.total, 0, used + self.foreign, used, used, used, 0)

    agent = Honest(store)
    await agent.register()
    await admission.submit(store, request(nbytes=2 * GIB))
    (job,) = await agent.claim()
    await agent.beat()
    ledger = (await inventory.card(store, agent.card)).ledger
    assert (ledger.overrun, ledger.foreign, ledger.jobs) == (0, 0, 2 * GIB)
    agent.held.clear()
    await agent.finish(ok(job))
    ledger = (await inventory.card(store, agent.card)).ledger
    assert (ledger.overrun, ledger.jobs, ledger.grantable) == (0, 0, 10 * GIB)


async def test_a_gateway_that_dies_takes_its_keyless_callers_along(tuned: Tuned) -> None:
    """When its session ends: synchronous jobs without a key are cancelled, keyed and asynchronous ones go
    on.
    """
    store = await tuned()
    await gateway_beat(store, "dead")
    await FakeAgent(store, "GPU-x").register(state="starting")
    lost = [await admission.submit(store, request(worker="dead")) for _ in range(20)]
    kept = [
        await admission.submit(store, request(worker="dead", key="k")),
        await admission.submit(store, request(worker="dead", is_async=True)),
        await admission.submit(store, request(worker="w1")),
    ]

    async def are_cancelled() -> bool:
        await gateway_beat(store, "w1")
        return all([(await jobs.view(store, each.job_id)).state == "cancelled" for each in lost])

    await until("the dead gateway's jobs are cancelled", are_cancelled)
    assert [(await jobs.view(store, each.job_id)).state for each in kept] == ["queued"] * 3


async def test_a_gateway_that_leaves_in_order_cancels_nothing(tuned: Tuned) -> None:
    """gateway_leave is not its clients leaving."""
    store = await tuned()
    await gateway_beat(store, "leaver")
    agent = FakeAgent(store)
    await agent.register()
    asked = await admission.submit(store, request(worker="leaver"))
    await gateway_leave(store, "leaver")
    for _ in range(6):
        await asyncio.sleep(0.2)
        await agent.beat()
        await gateway_beat(store, "w1")
    assert (await jobs.view(store, asked.job_id)).state == "leased"
    assert await agent.run_all() == 1


async def test_a_retry_does_not_wait_for_a_run_whose_agent_is_lost(tuned: Tuned) -> None:
    """Cancelled, its retry waits for the old run; the agent is lost: nobody will report that end, the
    retry starts.
    """
    store = await tuned()
    silent, other = FakeAgent(store, "GPU-a"), FakeAgent(store, "GPU-b")
    await silent.register()
    first = await admission.submit(store, request(key="k"))
    await silent.claim()
    await admission.cancel(store, first.job_id)
    retry = await admission.submit(store, request(key="k"))
    await other.register()
    assert (await jobs.view(store, retry.job_id)).why == "previous_run"

    async def is_leased() -> bool:
        await other.beat()
        return (await jobs.view(store, retry.job_id)).state == "leased"

    await until("the retry is leased", is_leased)
    assert await other.run_all() == 1


async def test_a_card_and_its_models_are_forgotten_after_a_while(tuned: Tuned) -> None:
    """Unknown past known_ttl after the last session; until then the model queues."""
    store = await tuned()
    agent = FakeAgent(store)
    await agent.register()
    await cards.leave(store, card=agent.card, session=agent.session)
    assert (await admission.submit(store, request(max_wait_ms=1))).state == "queued"
    past = 604_800_000 + 1000
    for name, member in (("cards", agent.card), ("models", "echo")):
        await store.redis.zincrby(store.keys.name(name), -past, member)
    await gateway_beat(store, "w1")
    assert await inventory.cards(store) == ()
    assert await inventory.models(store) == ()
    await gateway_beat(store, "w1")
    assert not await store.redis.exists(
        *(store.keys.name(kind, agent.card) for kind in ("card", "leases", "host"))
    )
