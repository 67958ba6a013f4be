"""How an answer reaches the gateway worker that waits for it, and how long answers are kept."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from scheduler import admission, cards, inventory, jobs, results
from scheduler.handover import HandedJob, Report
from scheduler.store import Store
from tests.ledger.conftest import Tuned
from tests.ledger.fake_agent import MIB, FakeAgent, failed, hosted, ok, request
from tests.waiting import until
from vramgate import errors

TIMEOUT_S = 10


@pytest.fixture
async def reader(store: Store) -> AsyncIterator[results.ResultReader]:
    opened = results.ResultReader(store, "w1")
    await opened.start()
    yield opened
    await opened.close()


@pytest.fixture
async def agent(store: Store) -> FakeAgent:
    started = FakeAgent(store)
    await started.register()
    return started


def _large(job: HandedJob, size: int) -> Report:
    return dataclasses.replace(ok(job), result=None, is_stored=True, result_bytes=size)


async def test_answers_come_by_the_workers_stream(
    store: Store, reader: results.ResultReader, agent: FakeAgent
) -> None:
    """Success with its outputs and a failure with its code, each to all who wait for it in this worker."""
    good = await admission.submit(store, request(key="a"))
    bad = await admission.submit(store, request(key="b"))
    futures = [reader.expect(job_id) for job_id in (good.job_id, good.job_id, bad.job_id)]
    first, second = await agent.claim()
    await agent.finish(ok(first, b"\xa3yes"), failed(second))
    done = await asyncio.wait_for(asyncio.gather(*futures), TIMEOUT_S)
    assert [(each.state, each.result, each.code) for each in done] == [
        ("succeeded", b"\xa3yes", None),
        ("succeeded", b"\xa3yes", None),
        ("failed", None, "model_error"),
    ]
    assert done[0] == await jobs.outcome(store, good.job_id)
    for job_id, future in zip((good.job_id, good.job_id, bad.job_id), futures, strict=True):
        reader.forget(job_id, future)
    assert reader.pending == 0


@pytest.mark.parametrize("size", [16_385, 65_537])
async def test_a_large_answer_comes_by_reference(
    store: Store, reader: results.ResultReader, agent: FakeAgent, size: int
) -> None:
    """Over 16 KiB the stream holds no bytes of it; over 64 KiB the agent stored it before."""
    asked = await admission.submit(store, request())
    future = reader.expect(asked.job_id)
    (job,) = await agent.claim()
    if size > cards.INLINE_RESULT_BYTES:
        await results.put(store, job.lease_id, b"x" * size)
        await agent.finish(_large(job, size))
    else:
        await agent.finish(ok(job, b"x" * size))
    outcome = await asyncio.wait_for(future, TIMEOUT_S)
    assert outcome.result == b"x" * size


async def test_checks_that_keep_failing_are_logged_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A ledger that stays away costs the log a line now and then, not one for every look at it."""
    looks = 0

    async def outcome(_store: Store, _job_id: str) -> None:
        nonlocal looks
        looks += 1
        raise errors.StoreUnavailable("the ledger does not answer")

    monkeypatch.setattr(results, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(jobs, "outcome", outcome)
    reader = results.ResultReader(store, "w1")
    reader.expect("0" * 32)
    await reader.start()
    try:
        await until("it has looked five times", lambda: looks >= 5)
    finally:
        await reader.close()
    assert [line.message.split()[0] for line in caplog.records].count("results_check_failed") == 1


async def test_one_entry_of_a_stream_is_bounded(store: Store) -> None:
    """Answers of one call that are too large together come by reference, and all of them come."""
    agent = FakeAgent(store, models=(hosted(slots=8),))
    await agent.register()
    for _ in range(8):
        await admission.submit(store, request())
    handed = await agent.claim()
    sent = {job.job_id: bytes([at]) * 16_000 for at, job in enumerate(handed)}
    assert len(sent) == 8
    await agent.finish(*(ok(job, sent[job.job_id]) for job in handed))
    entries: Any = await store.redis.xrange(store.keys.name("st", "w1"))
    assert max(sum(map(len, fields.values())) for _, fields in entries) < 80_000
    reader = results.ResultReader(store, "w1")
    futures = [reader.expect(job_id) for job_id in sent]
    await reader.start()
    outcomes = await asyncio.wait_for(asyncio.gather(*futures), TIMEOUT_S)
    assert {outcome.job_id: outcome.result for outcome in outcomes} == sent
    await reader.close()


async def test_an_entry_that_cannot_be_read_hides_no_other(
    store: Store, reader: results.ResultReader, agent: FakeAgent
) -> None:
    """Answers that come after it are heard as before."""
    stream: Any = store.keys.name("st", "w1")
    await store.redis.xadd(stream, {"0" * 32: b"nonsense"})
    submitted = await admission.submit(store, request())
    future = reader.expect(submitted.job_id)
    (job,) = await agent.claim()
    await agent.finish(ok(job))
    assert (await asyncio.wait_for(future, TIMEOUT_S)).state == "succeeded"
    reader.forget(submitted.job_id, future)


async def test_an_answer_that_overtakes_the_reply_of_submit_is_kept(
    store: Store, reader: results.ResultReader, agent: FakeAgent
) -> None:
    """The caller asks a moment after its job was settled and is answered at once."""
    asked = await admission.submit(store, request())
    await agent.run_all()
    await until("the reader has read its stream", lambda: _has_read(reader))
    outcome = await asyncio.wait_for(reader.expect(asked.job_id), TIMEOUT_S)
    assert outcome.state == "succeeded"


async def _has_read(reader: results.ResultReader) -> bool:
    return reader._last != "0"


async def test_an_entry_that_never_came_is_found(
    store: Store, reader: results.ResultReader, agent: FakeAgent
) -> None:
    """The stream is deleted with its unread entries: the round-robin check finds the answers."""
    asked = [await admission.submit(store, request(worker="another")) for _ in range(4)]
    futures = [reader.expect(each.job_id) for each in asked]
    await agent.run_all()
    await store.redis.delete(store.keys.name("st", "another"))
    done = await asyncio.wait_for(asyncio.gather(*futures), TIMEOUT_S)
    assert {each.state for each in done} == {"succeeded"}


async def test_a_reader_that_starts_late_reads_from_the_beginning(store: Store, agent: FakeAgent) -> None:
    """A worker's second reader finds what the first one left."""
    asked = await admission.submit(store, request())
    await agent.run_all()
    reader = results.ResultReader(store, "w1")
    future = reader.expect(asked.job_id)
    await reader.start()
    assert (await asyncio.wait_for(future, TIMEOUT_S)).state == "succeeded"
    await reader.close()


async def test_a_job_that_is_nowhere_is_lost(store: Store, reader: results.ResultReader) -> None:
    """The ledger has no record of it: told `lost`, and nobody submits it again."""
    outcome = await asyncio.wait_for(reader.expect("0" * 32), TIMEOUT_S)
    assert (outcome.state, outcome.code) == ("failed", "lost")


async def test_a_closing_reader_says_draining(store: Store) -> None:
    """Whoever still waits is told to ask again elsewhere."""
    reader = results.ResultReader(store, "w1")
    await reader.start()
    await FakeAgent(store).register(state="starting")
    asked = await admission.submit(store, request())
    future = reader.expect(asked.job_id)
    await reader.close()
    with pytest.raises(errors.Draining):
        await future


async def test_news_and_events_of_an_attempt(
    store: Store, reader: results.ResultReader, agent: FakeAgent
) -> None:
    """Progress and output come with their attempt; a requeue rings and takes the old attempt's events
    away.
    """
    asked = await admission.submit(store, request(wants_events=True))
    async with reader.news(asked.job_id) as event:
        (job,) = await agent.claim()
        assert job.wants_events
        line = {"card": agent.card, "session": agent.session, "job_id": job.job_id, "lease_id": job.lease_id}
        assert await cards.emit(store, attempt=1, events=[("progress", {"done": 0.5})], **line)
        await asyncio.wait_for(event.wait(), TIMEOUT_S)
        ((event_id, told),) = await jobs.read_events(store, job.job_id)
        assert told == {"attempt": 1, "type": "progress", "data": {"done": 0.5}}
        assert await jobs.read_events(store, job.job_id, after=event_id) == []
        event.clear()
        await agent.beat(held=[])
        await asyncio.wait_for(event.wait(), TIMEOUT_S)
        assert await jobs.read_events(store, job.job_id) == []
        assert not await cards.emit(store, attempt=1, events=[("output", {"text": "old"})], **line)
        (again,) = await agent.claim()
        await agent.finish(ok(again))
        assert (await asyncio.wait_for(reader.expect(job.job_id), TIMEOUT_S)).attempts == 2


async def test_who_watches_is_told_and_who_no_longer_does_is_not(
    store: Store, reader: results.ResultReader, agent: FakeAgent
) -> None:
    """An operator's or another worker's watch gets the settle; unwatch ends it."""
    asked = await admission.submit(store, request(worker="another"))
    await jobs.view(store, asked.job_id, watch=("w1", "c1"))
    await jobs.view(store, asked.job_id, watch=("w2", "c2"))
    await jobs.unwatch(store, asked.job_id, client="c2")
    future = reader.expect(asked.job_id)
    await agent.run_all()
    assert (await asyncio.wait_for(future, TIMEOUT_S)).state == "succeeded"
    assert not await store.redis.exists(store.keys.name("st", "w2"))


async def test_a_result_over_the_budget_goes_and_its_key_answers_410(tuned: Tuned) -> None:
    """The oldest results go first; their keys say result_expired and run nothing."""
    store = await tuned(limits={"result_bytes": MIB})
    agent = FakeAgent(store)
    await agent.register()
    for i in range(6):
        await admission.submit(store, request(key=f"k{i}"))
        (job,) = await agent.claim()
        await results.put(store, job.lease_id, b"x" * 300_000)
        await agent.finish(_large(job, 300_000))
    for i in range(3):
        with pytest.raises(errors.ResultExpired):
            await admission.submit(store, request(key=f"k{i}"))
    for i in range(3, 6):
        again = await admission.submit(store, request(key=f"k{i}"))
        assert again.outcome is not None and again.outcome.result == b"x" * 300_000
    assert int(await store.redis.hget(store.keys.meta, "rb") or 0) == 900_000


async def test_a_fresh_answer_does_not_make_room_for_old_ones(tuned: Tuned) -> None:
    """An answer without a key lives a minute only, and still goes after the older answers of keys and
    after the inputs of dead letters.
    """
    store = await tuned(limits={"result_bytes": MIB})
    agent = FakeAgent(store)
    await agent.register()
    for i in range(3):
        await admission.submit(store, request(key=f"k{i}", inputs="x" * 200_000))
        (job,) = await agent.claim()
        await agent.finish(failed(job))
    for i in range(3, 6):
        await admission.submit(store, request(key=f"k{i}"))
        (job,) = await agent.claim()
        await results.put(store, job.lease_id, b"x" * 300_000)
        await agent.finish(_large(job, 300_000))
    await asyncio.sleep(0.005)
    fresh = await admission.submit(store, request())
    (job,) = await agent.claim()
    await results.put(store, job.lease_id, b"y" * 300_000)
    await agent.finish(_large(job, 300_000))
    outcome = await jobs.outcome(store, fresh.job_id)
    assert outcome is not None and outcome.result == b"y" * 300_000
    with pytest.raises(errors.ResultExpired):
        await admission.submit(store, request(key="k3"))
    assert not await store.redis.zcard(store.keys.name("letters"))
    assert (await inventory.totals(store))["settled.succeeded"] == 4


async def test_an_answer_of_an_agent_whose_job_was_settled_is_thrown_away(
    store: Store, agent: FakeAgent
) -> None:
    """A cancelled job's stored result leaves no key behind."""
    asked = await admission.submit(store, request())
    (job,) = await agent.claim()
    await admission.cancel(store, asked.job_id)
    await results.put(store, job.lease_id, b"x" * 100_000)
    assert (await agent.finish(_large(job, 100_000))).verdicts == ("settled",)
    for kind, name in (("up", job.lease_id), ("res", job.job_id)):
        assert not await store.redis.exists(store.keys.name(kind, name))
