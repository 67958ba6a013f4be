"""What submit refuses, places at once and queues; the limits and what a refused caller is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scheduler import admission, inventory, jobs
from scheduler.states import OperatorState
from scheduler.store import Store
from tests import packed
from tests.ledger.conftest import Tuned
from tests.ledger.fake_agent import GIB, FakeAgent, hosted, request
from vramgate import errors


async def test_an_unknown_model_is_refused_at_once(store: Store) -> None:
    """404, also for an unknown version of a known model; nothing is left behind."""
    await FakeAgent(store).register()
    for model in ("nobody", "echo@v9"):
        asked = request(model)
        with pytest.raises(errors.UnknownModel):
            await admission.submit(store, asked)
        assert not await store.redis.exists(
            store.keys.job(asked.job_id), store.keys.name("pay", asked.job_id)
        )


async def test_a_job_of_one_version_runs_where_that_version_is(store: Store) -> None:
    """`name@version` is a class of its own."""
    old = FakeAgent(store, "GPU-old", models=(hosted(version="v1"),))
    new = FakeAgent(store, "GPU-new", models=(hosted(version="v2"),))
    await old.register()
    await new.register()
    for version, agent in (("v1", old), ("v2", new)):
        for _ in range(2):
            await admission.submit(store, request(f"echo@{version}"))
        held = await agent.claim()
        assert [job.version for job in held] == [version] * 2


async def test_what_no_card_can_ever_hold_is_refused(store: Store) -> None:
    """Judged by what the cards nominally have, lost ones included, not by today's strangers."""
    agent = FakeAgent(store, total=10 * GIB)
    agent.foreign = 9 * GIB
    await agent.register()
    with pytest.raises(errors.ExceedsEveryCard) as refusal:
        await admission.submit(store, request(nbytes=10 * GIB + 1))
    assert refusal.value.data == {"needed_bytes": 10 * GIB + 1, "largest_bytes": 10 * GIB}
    assert (await admission.submit(store, request(nbytes=10 * GIB))).state == "queued"


async def test_strangers_headroom_and_residents_are_never_granted(store: Store) -> None:
    """grantable = total - headroom - foreign - resident - leased; not a byte above it."""
    agent = FakeAgent(store, total=10 * GIB, models=(hosted(resident=2 * GIB, slots=16),))
    agent.foreign = 3 * GIB
    await agent.register()
    assert (await inventory.card(store, agent.card)).ledger.grantable == 5 * GIB
    states = [(await admission.submit(store, request(nbytes=GIB))).state for _ in range(7)]
    assert states == ["leased"] * 5 + ["queued"] * 2
    ledger = (await inventory.card(store, agent.card)).ledger
    assert (ledger.jobs, ledger.grantable, ledger.foreign) == (5 * GIB, 0, 3 * GIB)


async def test_grants_are_bounded_by_number_too(store: Store) -> None:
    """However small the jobs are, a card takes its slots and a model its own."""
    agent = FakeAgent(store, models=(hosted("a", slots=2), hosted("b", slots=8)), slots=5)
    await agent.register()
    states = [(await admission.submit(store, request("a", nbytes=1))).state for _ in range(3)]
    assert states == ["leased", "leased", "queued"]
    states = [(await admission.submit(store, request("b", nbytes=1))).state for _ in range(4)]
    assert states == ["leased"] * 3 + ["queued"]


async def test_unknown_or_old_memory_admits_nothing(store: Store) -> None:
    """Without a sample, or with one older than two beats, jobs wait; a fresh one lets them start."""
    agent = FakeAgent(store)
    await agent.register()
    sampled = agent.now_ms
    await asyncio.sleep(1.1)
    assert (await admission.submit(store, request())).state == "queued"
    card = await inventory.card(store, agent.card)
    assert card.sample is not None and card.sample.read_ms <= sampled
    assert (card.state, card.ledger.jobs) == ("down", 0)
    await agent.beat()
    assert (await inventory.card(store, agent.card)).jobs == 1


@pytest.mark.parametrize(("policy", "expected"), [("spread", "bbab"), ("pack", "aabb")])
async def test_placement_spreads_or_packs(tuned: Tuned, policy: str, expected: str) -> None:
    """spread: the most grantable bytes; pack: the least that fits."""
    store = await tuned(placement={"policy": policy}, clocks={"session_s": 10.0, "beat_s": 3.0})
    for name, total in (("GPU-a", 2 * GIB), ("GPU-b", 3 * GIB + 1)):
        await FakeAgent(store, name, total=total).register()
    placed = [(await admission.submit(store, request(nbytes=GIB))).card for _ in range(4)]
    assert "".join(card[-1] for card in placed if card) == expected


async def test_the_queue_is_bounded_by_number(tuned: Tuned) -> None:
    """queue_full with Retry-After and the length, by pool and by model; quota_exceeded by tenant."""
    store = await tuned(limits={"queue_jobs": 6, "model_jobs": 4, "tenant_jobs": 2})
    await FakeAgent(store, models=(hosted("a"), hosted("b")), slots=1).register(state="starting")
    for tenant in ("t1", "t1", "t2", "t2"):
        await admission.submit(store, request("a", tenant=tenant))
    for model, tenant, refusal, waiting in (
        ("b", "t1", errors.QuotaExceeded, 0),
        ("a", "t3", errors.QueueFull, 4),
    ):
        with pytest.raises(refusal) as caught:
            await admission.submit(store, request(model, tenant=tenant))
        assert caught.value.data["queue_length"] == waiting
        assert (caught.value.retry_after_s or 0) >= 1
    for _ in range(2):
        await admission.submit(store, request("b", tenant="t3"))
    with pytest.raises(errors.QueueFull):
        await admission.submit(store, request("b", tenant="t4"))


async def test_the_queue_is_bounded_by_payload_bytes(tuned: Tuned) -> None:
    """The inputs of live jobs count until they are settled, leased ones too."""
    store = await tuned(limits={"queue_bytes": 3000, "model_bytes": 2000, "tenant_bytes": 1500})
    agent = FakeAgent(store, models=(hosted("a"), hosted("b")))
    await agent.register()
    big = "x" * 900
    await admission.submit(store, request("a", inputs=big, tenant="t1"))
    with pytest.raises(errors.QuotaExceeded):
        await admission.submit(store, request("b", inputs=big, tenant="t1"))
    await admission.submit(store, request("a", inputs=big, tenant="t2"))
    with pytest.raises(errors.QueueFull):
        await admission.submit(store, request("a", inputs=big, tenant="t3"))
    await admission.submit(store, request("b", inputs=big, tenant="t3"))
    with pytest.raises(errors.QueueFull):
        await admission.submit(store, request("b", inputs=big, tenant="t4"))
    await agent.run_all()
    await admission.submit(store, request("b", inputs=big, tenant="t4"))


async def test_a_full_queue_of_one_model_keeps_nothing_from_the_idle_card_of_another(tuned: Tuned) -> None:
    """A job that a card takes at once does not wait, so that a full queue is no reason to refuse it."""
    store = await tuned(limits={"queue_jobs": 3})
    busy = FakeAgent(store, "GPU-a", models=(hosted("a", slots=1),))
    idle = FakeAgent(store, "GPU-b", models=(hosted("b", slots=1),))
    await busy.register()
    await idle.register()
    for _ in range(4):
        await admission.submit(store, request("a"))
    with pytest.raises(errors.QueueFull):
        await admission.submit(store, request("a"))
    assert (await admission.submit(store, request("b"))).state == "leased"
    with pytest.raises(errors.QueueFull):
        await admission.submit(store, request("b"))


async def test_cancel_ends_a_job_for_all_and_only_for_its_tenant(store: Store) -> None:
    """Another tenant's cancel finds no job; a finished job is returned as it is."""
    agent = FakeAgent(store)
    await agent.register()
    asked = await admission.submit(store, request(tenant="t1"))
    with pytest.raises(errors.UnknownJob):
        await admission.cancel(store, asked.job_id, tenant="t2")
    with pytest.raises(errors.UnknownJob):
        await jobs.view(store, asked.job_id, tenant="t2")
    await agent.run_all()
    assert (await admission.cancel(store, asked.job_id, tenant="t1")).state == "succeeded"


async def test_a_card_that_is_cordoned_or_drains_gets_nothing_new(store: Store) -> None:
    """What was not handed out goes elsewhere or waits; uncordoned, the card works on."""
    agent = FakeAgent(store)
    await agent.register()
    asked = [await admission.submit(store, request()) for _ in range(3)]
    (held,) = await agent.claim(want=1)
    states: tuple[OperatorState, ...] = ("cordoned", "draining")
    for state in states:
        card = await inventory.set_card_state(store, "GPU-a", state, reason="by hand")
        assert (card.state, card.reason, card.jobs) == (state, "by hand", 1)
        assert await agent.claim() == []
        assert (await agent.beat()).operator_state == state
    assert (await jobs.view(store, asked[1].job_id)).why == "no_ready_card"
    assert (await inventory.set_card_state(store, "GPU-a", "ready")).jobs == 3
    assert [job.job_id for job in await agent.claim()] == [each.job_id for each in asked[1:]]
    assert held.job_id == asked[0].job_id


async def test_pages_are_newest_first_and_complete(store: Store) -> None:
    """Cursors lead through every job once; filters by state, model and tenant hold on every page."""
    agent = FakeAgent(store, models=(hosted("a"), hosted("b")))
    await agent.register()
    asked = [
        (await admission.submit(store, request("ab"[i % 2], nbytes=1, tenant=f"t{i % 3}"))).job_id
        for i in range(11)
    ]
    seen: list[str] = []
    cursor = None
    while True:
        page = await jobs.list_jobs(store, cursor=cursor, limit=3)
        seen += [view.id for view in page.data]
        cursor = page.next
        if cursor is None:
            break
    assert sorted(seen) == sorted(asked)
    assert [view.created_ms for view in (await jobs.list_jobs(store)).data] == sorted(
        [(await jobs.view(store, job_id)).created_ms for job_id in asked], reverse=True
    )
    for filters in ({"state": "queued"}, {"model": "a"}, {"tenant": "t1"}):
        page = await jobs.list_jobs(store, **filters)  # type: ignore[arg-type]
        ((name, value),) = filters.items()
        assert page.data and all(getattr(view, name) == value for view in page.data)
    with pytest.raises(errors.InvalidInput):
        await jobs.list_jobs(store, cursor="nonsense")


async def test_an_audit_mends_what_it_finds(store: Store) -> None:
    """Sums, an exclusive mark without its lease and a reservation without its job are found once, and
    mended.
    """
    agent = FakeAgent(store)
    await agent.register()
    await admission.submit(store, request())
    honest = await inventory.card(store, agent.card)
    redis: Any = store.redis
    held, _ = packed.unpack("lease", "CARD", await redis.hget(store.keys.card(agent.card), "r"))
    wrong = held | {"jb": 5, "nj": 3, "xl": "0" * 32, "hj": "1" * 32, "hb": 9}
    damaged = {"r": packed.pack("lease", "CARD", wrong), "n:echo": 7}
    await redis.hset(store.keys.card(agent.card), mapping=damaged)
    drift = await inventory.audit(store)
    assert drift[agent.card] == (GIB - 5) + (3 - 1) + (7 - 1) + 1 + 1
    assert await inventory.audit(store) == {agent.card: 0}
    mended = await inventory.card(store, agent.card)
    assert (mended.ledger, mended.jobs, mended.head) == (honest.ledger, honest.jobs, None)
    assert (await inventory.totals(store))["drift"] == drift[agent.card]
    await store.redis.hdel(store.keys.name("stats"), "drift")
