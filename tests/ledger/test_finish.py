"""Claim and finish: sequence numbers, fences, the held set, what is handed out and taken back."""

from __future__ import annotations

import dataclasses

import pytest

from scheduler import admission, cards, inventory, jobs, results
from scheduler.cards import WakeListener
from scheduler.handover import HandedJob, Handout, Report
from scheduler.store import Store
from tests.ledger.fake_agent import GIB, FakeAgent, hosted, ok, request, said
from vramgate import errors


async def _submit(store: Store, number: int, *, nbytes: int = GIB // 4) -> list[str]:
    return [(await admission.submit(store, request(nbytes=nbytes, inputs=i))).job_id for i in range(number)]


def _timeless(handout: Handout) -> list[HandedJob]:
    return [dataclasses.replace(job, total_left_ms=0) for job in handout.jobs]


async def test_a_lost_reply_of_finish_hands_out_and_settles_nothing_twice(store: Store) -> None:
    """The same sequence number gets the same answer: the jobs of the first reply, no second batch, one settle
    each.
    """
    agent = FakeAgent(store)
    await agent.register()
    await _submit(store, 8)
    first = await agent.claim(want=2)
    agent.seq += 1
    call = {"card": agent.card, "session": agent.session, "seq": agent.seq, "want": 2}
    reports = [ok(job) for job in first]
    answers = [await cards.finish(store, reports=reports, **call) for _ in range(3)]  # type: ignore[arg-type]
    handed = [[job.lease_id for job in answer.jobs] for answer in answers]
    assert handed[0] == handed[1] == handed[2] and len(handed[0]) == 2
    assert [answer.verdicts for answer in answers] == [("ok", "ok")] * 3
    assert _timeless(answers[0]) == _timeless(answers[2]), "the repetition describes the jobs as before"
    totals = await inventory.totals(store)
    assert totals["settled.succeeded"] == 2
    assert totals["granted"] == 6, "four slots, then the two that became free"
    next_jobs = await agent.claim(want=16)
    assert not {job.lease_id for job in next_jobs} & set(handed[0])
    assert len(next_jobs) == 2


async def test_a_lost_reply_of_claim_hands_out_nothing_twice(store: Store) -> None:
    """A repeated claim returns what it returned, with the inputs."""
    agent = FakeAgent(store)
    await agent.register()
    await _submit(store, 4)
    answers = [
        await cards.claim(store, card=agent.card, session=agent.session, seq=1, want=2) for _ in range(2)
    ]
    assert _timeless(answers[0]) == _timeless(answers[1])
    assert all(job.inputs for job in answers[1].jobs)
    assert [job.attempt for job in answers[1].jobs] == [1, 1]


async def test_a_lower_number_is_stale(store: Store) -> None:
    """A call with a number below the last one changes nothing and is told so."""
    agent = FakeAgent(store)
    await agent.register()
    await _submit(store, 3)
    await agent.claim(want=1)
    await agent.claim(want=1)
    with pytest.raises(cards.StaleSeq):
        await cards.claim(store, card=agent.card, session=agent.session, seq=1, want=1)
    assert len(await agent.claim(want=16)) == 1


async def test_a_job_that_is_not_held_runs_again(store: Store) -> None:
    """The agent applied the number under which a job was handed out and does not hold it: requeued, no crash
    counted.
    """
    agent = FakeAgent(store)
    await agent.register()
    (job_id,) = await _submit(store, 1)
    (job,) = await agent.claim()
    await agent.beat(held=[])
    view = await jobs.view(store, job_id)
    assert view.state == "leased", "placed again at once, under a new lease"
    assert view.lease_id != job.lease_id
    assert (view.crashes, view.losses) == (0, 0)
    assert await agent.beat(held=[]) and (await jobs.view(store, job_id)).lease_id == view.lease_id
    (again,) = await agent.claim()
    assert again.attempt == 2


async def test_a_late_beat_requeues_nothing_that_a_newer_reply_handed_out(store: Store) -> None:
    """A beat composed before a hand-out says an older applied number: the new job stays where it is."""
    agent = FakeAgent(store)
    await agent.register()
    await agent.claim()
    before = agent.applied
    await _submit(store, 1)
    (job,) = await agent.claim()
    await agent.beat(applied=before, held=[])
    view = await jobs.view(store, job.job_id)
    assert (view.state, view.lease_id) == ("leased", job.lease_id)


async def test_an_old_lease_is_fenced_off(store: Store) -> None:
    """After a requeue the report under the old lease id is stale and moves no byte; the new one counts."""
    agent = FakeAgent(store)
    await agent.register()
    await _submit(store, 1)
    (old,) = await agent.claim()
    await agent.beat(held=[])
    (new,) = await agent.claim()
    handout = await agent.finish(ok(old))
    assert handout.verdicts == ("stale",)
    assert (await inventory.card(store, agent.card)).ledger.jobs == GIB // 4
    assert (await agent.finish(ok(new))).verdicts == ("ok",)
    outcome = await jobs.outcome(store, new.job_id)
    assert outcome is not None and outcome.state == "succeeded"


async def test_a_large_result_of_a_fenced_agent_never_meets_the_answer(store: Store) -> None:
    """A paused agent that stores its result after another one answered changes neither the result nor its
    life.
    """
    first, second = FakeAgent(store, "GPU-a"), FakeAgent(store, "GPU-b")
    await first.register()
    await _submit(store, 1)
    (old,) = await first.claim()
    await second.register()
    await inventory.set_card_state(store, "GPU-a", "cordoned")
    await first.beat(held=[])
    (new,) = await second.claim()
    await results.put(store, new.lease_id, b"right" * 30_000)
    await second.finish(dataclasses.replace(ok(new), result=None, is_stored=True, result_bytes=150_000))
    await results.put(store, old.lease_id, b"wrong" * 30_000)
    late = await first.finish(dataclasses.replace(ok(old), result=None, is_stored=True, result_bytes=150_000))
    assert late.verdicts == ("stale",)
    outcome = await jobs.outcome(store, new.job_id)
    assert outcome is not None and outcome.result == b"right" * 30_000
    assert not await store.redis.exists(store.keys.name("up", old.lease_id))


async def test_a_stored_result_that_is_gone_runs_again(store: Store) -> None:
    """A report of a large result that the ledger does not have (its server lost it) requeues the job."""
    agent = FakeAgent(store)
    await agent.register()
    (job_id,) = await _submit(store, 1)
    (job,) = await agent.claim()
    handout = await agent.finish(
        dataclasses.replace(ok(job), result=None, is_stored=True, result_bytes=9), want=1
    )
    assert [again.job_id for again in handout.jobs] == [job_id]


async def test_a_stored_result_outlives_a_finish_that_failed_half_way(store: Store) -> None:
    """A script that fails after it has taken a large result is asked again: the job is answered with that
    result, and does not run a second time.
    """
    agent = FakeAgent(store)
    await agent.register()
    job_id, _ = await _submit(store, 2)
    large, other = await agent.claim()
    assert large.job_id == job_id
    await results.put(store, large.lease_id, b"large" * 30_000)
    reports = (
        dataclasses.replace(ok(large), result=None, is_stored=True, result_bytes=150_000),
        said(other, "give_back"),
    )
    queue = store.keys.name("q", "echo")
    await store.redis.set(queue, "no sorted set")
    with pytest.raises(errors.Internal):
        await agent.finish(*reports)
    await store.redis.delete(queue)
    agent.seq -= 1
    handout = await agent.finish(*reports, want=2)
    assert [again.job_id for again in handout.jobs] == [other.job_id]
    outcome = await jobs.outcome(store, job_id)
    assert outcome is not None and outcome.result == b"large" * 30_000


async def test_what_was_cancelled_returns_its_bytes_with_the_report(store: Store) -> None:
    """Cancel settles the caller at once; the lease stays until its holder reports, whose result is thrown
    away.
    """
    agent = FakeAgent(store)
    await agent.register()
    (job_id,) = await _submit(store, 1)
    (job,) = await agent.claim()
    agent.start(job)
    await agent.beat()
    assert (await admission.cancel(store, job_id)).state == "cancelled"
    assert (await inventory.card(store, agent.card)).ledger.jobs == GIB // 4
    answer = await agent.beat()
    assert [(cancel.job_id, cancel.lease_id, cancel.force) for cancel in answer.cancels] == [
        (job_id, job.lease_id, False)
    ]
    assert (await agent.finish(ok(job))).verdicts == ("settled",)
    assert (await inventory.card(store, agent.card)).ledger.jobs == 0
    assert (await jobs.view(store, job_id)).state == "cancelled"


async def test_a_hint_of_a_cancel_is_not_lost_among_hints_of_work(store: Store) -> None:
    """Grants leave a hint to claim. A cancel leaves one to beat, which stands before and behind them."""
    agent = FakeAgent(store)
    await agent.register()
    listener = WakeListener(store, agent.card)
    try:
        (job_id,) = await _submit(store, 1)
        assert await listener.wait(1) == "work"
        (job,) = await agent.claim()
        await _submit(store, 1)
        await admission.cancel(store, job_id)
        await _submit(store, 1)
        assert await listener.wait(1) == "look"
        assert await listener.wait(0.05) is None
        await agent.finish(ok(job))
    finally:
        await listener.close()


async def test_a_lease_that_the_ledger_does_not_have_is_to_be_ended(store: Store) -> None:
    """What an agent holds and the ledger lost can settle nothing: the beat asks to end it."""
    agent = FakeAgent(store)
    await agent.register()
    await _submit(store, 1)
    (job,) = await agent.claim()
    stranger = dataclasses.replace(job, job_id="0" * 32, lease_id="f" * 32)
    answer = await agent.beat(held=[job, stranger])
    assert [(cancel.lease_id, cancel.reason) for cancel in answer.cancels] == [("f" * 32, "gone")]


async def test_an_idle_card_takes_over_what_is_not_handed_out(store: Store) -> None:
    """Jobs that are leased on a busy card and not handed out start on a card that becomes idle."""
    busy, idle = FakeAgent(store, "GPU-a"), FakeAgent(store, "GPU-b")
    await busy.register()
    job_ids = await _submit(store, 4)
    await busy.claim(want=1)
    await idle.register()
    taken = await idle.claim(want=1)
    assert [job.job_id for job in taken] == [job_ids[-1]]
    assert (await jobs.view(store, job_ids[-1])).card == "GPU-b"
    assert (await inventory.card(store, "GPU-a")).jobs == 3


async def test_an_idle_card_recalls_what_was_prefetched(store: Store) -> None:
    """A job that another agent holds and has not started is recalled, one at a time, and runs on the idle
    card.
    """
    busy, idle = FakeAgent(store, "GPU-a"), FakeAgent(store, "GPU-b")
    await busy.register()
    await _submit(store, 4)
    held = await busy.claim(want=4)
    busy.start(held[0])
    await busy.beat()
    await idle.register()
    for _ in range(3):
        assert await idle.claim() == []
    answer = await busy.beat()
    assert len(answer.recalls) == 1
    wanted = next(job for job in held if job.job_id == answer.recalls[0])
    assert wanted is not held[0]
    await busy.finish(said(wanted, "give_back"))
    assert [job.job_id for job in await idle.claim()] == [wanted.job_id]


async def test_takeover_without_a_fresh_lease_id_leaves_the_job_where_it_is(store: Store) -> None:
    """A call that has granted as many jobs as it may moves no further one: nothing ends between two cards."""
    busy = FakeAgent(store, "GPU-a", slots=64, total=100 * GIB)
    other = FakeAgent(store, "GPU-b", slots=64)
    models = (hosted(slots=64),)
    busy.models = other.models = models
    await other.register()
    await _submit(store, 16, nbytes=GIB // 8)
    held = await other.claim(want=16)
    await busy.register()
    waiting = await _submit(store, 4, nbytes=GIB // 8)
    handout = await other.finish(*(said(job, "killed") for job in held), want=4)
    assert handout.verdicts == ("ok",) * 16
    for job_id in waiting:
        view = await jobs.view(store, job_id)
        assert view.state in ("queued", "leased")
        if view.state == "leased":
            assert view.lease_id in {lease.id for lease in await inventory.leases(store)}


async def test_a_finish_reports_at_most_sixteen(store: Store) -> None:
    """More than sixteen reports in one call are refused before anything is sent."""
    agent = FakeAgent(store)
    await agent.register()
    (_,) = await _submit(store, 1)
    (job,) = await agent.claim()
    with pytest.raises(ValueError, match="at most 16"):
        await agent.finish(*[ok(job)] * 17)
    agent.seq -= 1
    assert (await agent.finish(ok(job))).verdicts == ("ok",)


async def test_a_detail_that_is_no_text_settles_like_any_other(store: Store) -> None:
    """What a model raised may hold anything: the job fails once, in words, and nothing stays live."""
    agent = FakeAgent(store)
    await agent.register()
    for detail in ({"field": [1, 2]}, 7, b"\xff\xfe", ["x"] * 3000):
        job_id = (await admission.submit(store, request())).job_id
        (job,) = await agent.claim()
        report = Report(job.job_id, job.lease_id, "failed", code="rejected_by_model", detail=detail)  # type: ignore[arg-type]
        assert (await agent.finish(report)).verdicts == ("ok",)
        view = await jobs.view(store, job_id)
        assert (view.state, view.code) == ("failed", "rejected_by_model")
        assert view.detail and len(view.detail) <= 2000
