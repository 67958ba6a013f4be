"""Keys, clients that leave, tombstones: one key runs once."""

from __future__ import annotations

import asyncio

import pytest

from scheduler import admission, inventory, jobs
from scheduler.gateways import gateway_beat
from scheduler.settings import Settings
from scheduler.store import Store
from scheduler.submissions import SubmitRequest
from tests.ledger.fake_agent import GIB, FakeAgent, failed, ok, request, said
from tests.waiting import until
from vramgate import errors


async def _abandon(store: Store, asked: SubmitRequest, *, job_id: str | None) -> None:
    await admission.abandon(store, job_id=job_id, client=asked.job_id, tenant=asked.tenant, key=asked.key)


async def test_one_key_sent_fifty_times_at_once_is_one_job(store: Store, settings: Settings) -> None:
    """Fifty submits of one key through two gateways: one is stored, 49 join, one run answers all."""
    other = await Store.connect(settings)
    agent = FakeAgent(store)
    await agent.register()
    asked = [request(key="k", worker=f"w{i % 2}") for i in range(50)]
    answers = await asyncio.gather(
        *(admission.submit((store, other)[i % 2], each) for i, each in enumerate(asked))
    )
    assert len({answer.job_id for answer in answers}) == 1
    assert sorted(answer.how for answer in answers) == ["joined"] * 49 + ["stored"]
    assert (await jobs.view(store, answers[0].job_id)).clients == 50
    assert await agent.run_all() == 1
    assert (await inventory.totals(store))["runs"] == 1
    await other.close()


async def test_a_settled_key_replays_its_answer(store: Store) -> None:
    """Success and a pinned failure are replayed as they were; nothing runs again."""
    agent = FakeAgent(store)
    await agent.register()
    for key, report in (("good", ok), ("bad", failed)):
        first = await admission.submit(store, request(key=key))
        (job,) = await agent.claim()
        await agent.finish(report(job))
        told = await jobs.outcome(store, first.job_id)
        again = await admission.submit(store, request(key=key))
        assert (again.how, again.job_id, again.outcome) == ("replayed", first.job_id, told)
    assert await agent.claim() == []


@pytest.mark.parametrize("kind", ["cancelled", "internal", "wait_timeout"])
async def test_a_key_of_an_answer_that_is_not_pinned_is_free(store: Store, kind: str) -> None:
    """After a cancel, a fault of ours or a wait time-out the same key starts a new job."""
    agent = FakeAgent(store)
    await agent.register(state="ready" if kind != "wait_timeout" else "starting")
    first = await admission.submit(
        store, request(key="k", max_wait_ms=1 if kind == "wait_timeout" else 30_000)
    )
    if kind == "cancelled":
        await admission.cancel(store, first.job_id)
    elif kind == "internal":
        (job,) = await agent.claim()
        await agent.finish(failed(job, "internal"))
    else:
        await until("the wait clock passed", lambda: _is(store, first.job_id, "expired"))
    again = await admission.submit(store, request(key="k"))
    assert again.how == "stored" and again.job_id != first.job_id


async def _is(store: Store, job_id: str, state: str) -> bool:
    await gateway_beat(store, "sweeper")
    return (await jobs.view(store, job_id)).state == state


async def test_a_key_with_other_inputs_is_refused(store: Store) -> None:
    """key_reused while the job lives and after it settled; another tenant's key is another key."""
    agent = FakeAgent(store)
    await agent.register()
    first = await admission.submit(store, request(key="k", inputs=1))
    with pytest.raises(errors.KeyReused) as refusal:
        await admission.submit(store, request(key="k", inputs=2))
    assert refusal.value.job_id == first.job_id
    await agent.run_all()
    with pytest.raises(errors.KeyReused):
        await admission.submit(store, request(key="k", inputs=2))
    other = await admission.submit(store, request(key="k", inputs=2, tenant="another"))
    assert other.how == "stored"


async def test_the_encoding_and_the_options_are_not_part_of_the_fingerprint(store: Store) -> None:
    """The first call's options hold for a join that asks for others."""
    await FakeAgent(store).register()
    first = await admission.submit(store, request(key="k", priority=1))
    joined = await admission.submit(store, request(key="k", priority=9, max_wait_ms=1))
    assert joined.how == "joined"
    assert (await jobs.view(store, first.job_id)).priority == 1


async def test_a_submit_that_is_repeated_with_its_id_is_the_same_job(store: Store) -> None:
    """The retry of a submit whose reply was lost stores nothing twice and counts no second client."""
    await FakeAgent(store).register()
    keyed = request(key="k")
    for asked in (request(), keyed):
        first, second = await admission.submit(store, asked), await admission.submit(store, asked)
        assert first == second
        assert (await jobs.view(store, asked.job_id)).clients == 1
    joining = request(key="k")
    for _ in range(2):
        assert (await admission.submit(store, joining)).how == "joined"
    assert (await jobs.view(store, keyed.job_id)).clients == 2
    assert (await inventory.totals(store))["submitted"] == 2


@pytest.mark.parametrize("key", [None, "k"])
async def test_an_abandon_that_overtakes_its_submit_wins(store: Store, key: str | None) -> None:
    """The gateway gave up before its submit arrived: the submit is refused and leaves nothing."""
    await FakeAgent(store).register()
    asked = request(key=key)
    await _abandon(store, asked, job_id=None)
    with pytest.raises(errors.Cancelled):
        await admission.submit(store, asked)
    with pytest.raises(errors.UnknownJob):
        await jobs.view(store, asked.job_id)


async def test_the_repetition_of_a_join_that_was_given_up_does_not_join(store: Store) -> None:
    """A join whose outcome was unknown was abandoned; its late copy adds no client that nobody would take
    away.
    """
    await FakeAgent(store).register()
    first = await admission.submit(store, request(key="k"))
    joining = request(key="k")
    await admission.submit(store, joining)
    await _abandon(store, joining, job_id=None)
    with pytest.raises(errors.Cancelled):
        await admission.submit(store, joining)
    assert (await jobs.view(store, first.job_id)).clients == 1


async def test_an_abandoned_job_with_a_key_keeps_its_place_and_a_join_clears_it(store: Store) -> None:
    """The impatient client's retry finds its job at the head of the queue; its grace is over then."""
    agent = FakeAgent(store, total=GIB)
    await agent.register()
    await admission.submit(store, request())
    asked = request(key="k")
    first = await admission.submit(store, asked)
    for _ in range(3):
        await admission.submit(store, request())
    await _abandon(store, asked, job_id=first.job_id)
    view = await jobs.view(store, first.job_id)
    assert (view.position, view.clients, view.state) == (1, 0, "queued")
    assert view.deadline_ms is not None and view.deadline_ms <= view.now_ms + 2000
    again = await admission.submit(store, request(key="k"))
    assert (again.how, again.job_id, again.position) == ("joined", first.job_id, 1)
    view = await jobs.view(store, first.job_id)
    assert view.clients == 1
    assert view.deadline_ms == view.wait_started_ms + 30_000


async def test_abandonment_past_the_grace_cancels(store: Store) -> None:
    """Nobody came back within the grace: the job is cancelled, at the grace and not before."""
    await FakeAgent(store, total=GIB).register()
    await admission.submit(store, request())
    asked = request(key="k")
    first = await admission.submit(store, asked)
    await _abandon(store, asked, job_id=first.job_id)
    deadline = (await jobs.view(store, first.job_id)).deadline_ms
    await until("the grace passed", lambda: _is(store, first.job_id, "cancelled"))
    view = await jobs.view(store, first.job_id)
    assert view.settled_ms is not None and deadline is not None
    assert deadline <= view.settled_ms < deadline + 1000


async def test_of_two_clients_one_may_leave(store: Store) -> None:
    """A job ends with its last client only, and a client that leaves twice counts once."""
    await FakeAgent(store).register()
    one, two = request(key="k"), request(key="k")
    first = await admission.submit(store, one)
    await admission.submit(store, two)
    for _ in range(2):
        await _abandon(store, two, job_id=first.job_id)
    view = await jobs.view(store, first.job_id)
    assert (view.clients, view.state) == (1, "leased")
    assert view.deadline_ms == view.wait_started_ms + 30_000


async def test_an_async_submit_never_leaves(store: Store) -> None:
    """A synchronous client that joined an async job may leave; the job goes on."""
    await FakeAgent(store).register()
    first = await admission.submit(store, request(key="k", is_async=True))
    joining = request(key="k")
    await admission.submit(store, joining)
    await _abandon(store, joining, job_id=first.job_id)
    view = await jobs.view(store, first.job_id)
    assert (view.clients, view.deadline_ms) == (1, view.wait_started_ms + 30_000)


async def test_a_client_without_a_key_frees_its_bytes_at_once(store: Store) -> None:
    """Queued or leased and not handed out: the job is gone and the next one has its bytes in the same
    call.
    """
    agent = FakeAgent(store, total=GIB)
    await agent.register()
    leased, queued, behind = request(), request(), request()
    for asked in (leased, queued, behind):
        await admission.submit(store, asked)
    await _abandon(store, queued, job_id=queued.job_id)
    assert (await jobs.view(store, queued.job_id)).state == "cancelled"
    await _abandon(store, leased, job_id=leased.job_id)
    assert (await jobs.view(store, leased.job_id)).state == "cancelled"
    assert (await jobs.view(store, behind.job_id)).state == "leased"


async def test_a_retry_waits_for_the_end_of_the_old_run_and_then_runs(store: Store) -> None:
    """Cancelled while it ran: the retry under the key waits for that lease's end, although the card has
    room.
    """
    agent = FakeAgent(store)
    await agent.register()
    first = await admission.submit(store, request(key="k"))
    (job,) = await agent.claim()
    await admission.cancel(store, first.job_id)
    retry = await admission.submit(store, request(key="k"))
    assert (retry.how, retry.state) == ("stored", "queued")
    assert (await jobs.view(store, retry.job_id)).why == "previous_run"
    await agent.beat()
    assert await agent.claim() == [], "still the old run"
    handout = await agent.finish(said(job, "ended"), want=1)
    assert [again.job_id for again in handout.jobs] == [retry.job_id]


async def test_a_retry_that_ends_while_it_waits_leaves_the_key_to_the_old_run(store: Store) -> None:
    """Two runs of one key never share the cards, also when the retry in between was cancelled."""
    agent = FakeAgent(store)
    await agent.register()
    first = await admission.submit(store, request(key="k"))
    (job,) = await agent.claim()
    await admission.cancel(store, first.job_id)
    second = await admission.submit(store, request(key="k"))
    await admission.cancel(store, second.job_id)
    third = await admission.submit(store, request(key="k"))
    assert third.state == "queued"
    assert await agent.claim() == []
    handout = await agent.finish(ok(job), want=4)
    assert [again.job_id for again in handout.jobs] == [third.job_id]


async def test_the_key_is_free_when_the_old_run_ended(store: Store) -> None:
    """Without a retry in between the key is forgotten with the end of the cancelled run."""
    agent = FakeAgent(store)
    await agent.register()
    first = await admission.submit(store, request(key="k"))
    (job,) = await agent.claim()
    await admission.cancel(store, first.job_id)
    await agent.finish(said(job, "ended"))
    assert not await store.redis.exists(store.keys.idempotency("-", "k"))


async def test_a_key_outlives_a_job_with_a_long_total_clock(store: Store) -> None:
    """The record of the key lasts longer than its job may live, and a day from the settle on."""
    await FakeAgent(store).register()
    await admission.submit(store, request(key="k", total_timeout_ms=7 * 86_400_000))
    ttl = await store.redis.pttl(store.keys.idempotency("-", "k"))
    assert ttl > 7 * 86_400_000


async def test_a_key_whose_result_is_gone_never_runs_again(store: Store) -> None:
    """result_expired once the stored result is gone, for as long as the key is known."""
    agent = FakeAgent(store)
    await agent.register()
    first = await admission.submit(store, request(key="k"))
    await agent.run_all()
    await store.redis.delete(store.keys.name("res", first.job_id))
    with pytest.raises(errors.ResultExpired) as refusal:
        await admission.submit(store, request(key="k"))
    assert refusal.value.job_id == first.job_id
    assert await agent.claim() == []
