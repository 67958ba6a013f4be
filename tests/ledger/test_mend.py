"""What a script that failed half-way leaves behind is found by the audit, and every caller is answered.

Each test breaks the records by hand as such a script would.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgpack
import pytest

from scheduler import admission, inventory, jobs
from scheduler.gateways import gateway_beat
from scheduler.handover import HandedJob
from scheduler.store import Store
from tests import packed
from tests.ledger.fake_agent import GIB, MIB, FakeAgent, failed, hosted, ok, request, said
from tests.waiting import until
from vramgate import errors

Break = Callable[["Broken", HandedJob], Awaitable[object]]


class Broken:
    """A pool with one agent, and a hand that reaches into its records."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.redis: Any = store.redis
        self.name = store.keys.name
        self.agent = FakeAgent(store)

    async def field(self, job_id: str, name: str) -> object:
        return packed.unpack_job(await self.redis.get(self.name("job", job_id)))[name]

    async def edit(self, job_id: str, **changes: object) -> None:
        """Change a record; None takes away what few jobs have."""
        name = self.name("job", job_id)
        job = packed.unpack_job(await self.redis.get(name)) | changes
        kept = {field: value for field, value in job.items() if value is not None}
        await self.redis.set(name, packed.pack_job(kept), keepttl=True)

    async def submit(self, number: int = 1, **given: Any) -> list[str]:
        return [
            (await admission.submit(self.store, request(inputs=i, **given))).job_id for i in range(number)
        ]

    async def running(self) -> HandedJob:
        """A job that runs."""
        await self.submit()
        (job,) = await self.agent.claim()
        self.agent.start(job)
        await self.agent.beat()
        return job

    async def mended(self) -> dict[str, int]:
        """Audit, and say what was found; a second audit must find nothing."""
        await self.redis.delete(self.name("stats"))
        sums = await inventory.audit(self.store)
        found = await self._found()
        assert (await inventory.totals(self.store)).get("drift", 0) == sum(found.values()) + sum(
            sums.values()
        )
        await inventory.audit(self.store)
        assert await self._found() == found, "the second audit finds nothing"
        await self.redis.hdel(self.name("stats"), "drift")
        return found

    async def _found(self) -> dict[str, int]:
        totals = await inventory.totals(self.store)
        return {n.removeprefix("mended."): v for n, v in totals.items() if n.startswith("mended.")}

    async def ends(self, job_id: str) -> str:
        """The agent runs what it is given and beats, a gateway sweeps, until the job is settled."""

        async def settled() -> str | None:
            self.agent.held.clear()
            await self.agent.beat()
            await self.agent.run_all()
            await gateway_beat(self.store, "w1")
            outcome = await jobs.outcome(self.store, job_id)
            return None if outcome is None else outcome.code or outcome.state

        return await until(f"job {job_id} settles", settled)

    async def lose_lease(self, job: HandedJob) -> None:
        await self.redis.hdel(self.name("leases", self.agent.card), job.lease_id)

    async def lose_deadline(self, job: HandedJob) -> None:
        assert await self.redis.zrem(self.name("deadlines"), job.job_id) == 1

    async def half_settle(self, job: HandedJob) -> None:
        """As far as settle came: stamped, without a deadline and without its lease."""
        await self.edit(job.job_id, st=1)
        await self.lose_deadline(job)
        await self.lose_lease(job)


@pytest.fixture
async def broken(store: Store) -> AsyncIterator[Broken]:
    made = Broken(store)
    await made.agent.register()
    yield made
    await made.redis.hdel(made.name("stats"), "drift")


async def test_a_waiting_job_without_a_deadline_gets_it_back(broken: Broken) -> None:
    """It would live for ever: its total clock ends it again."""
    await broken.agent.beat("down")
    (job,) = await broken.submit(total_timeout_ms=300, max_wait_ms=300)
    await broken.redis.zrem(broken.name("deadlines"), job)
    assert await broken.mended() == {"deadline": 1}

    async def expired() -> bool:
        await gateway_beat(broken.store, "w1")
        return (await jobs.view(broken.store, job)).state == "expired"

    await until("its clock ends it", expired)


async def test_a_run_without_a_deadline_gets_it_back(broken: Broken) -> None:
    """Its run clock is watched again; the run itself goes on and answers."""
    job = await broken.running()
    before = await broken.redis.zscore(broken.name("deadlines"), job.job_id)
    await broken.lose_deadline(job)
    assert await broken.mended() == {"deadline": 1}
    assert await broken.redis.zscore(broken.name("deadlines"), job.job_id) == before
    await broken.agent.finish(ok(job))
    assert (await jobs.view(broken.store, job.job_id)).state == "succeeded"


@pytest.mark.parametrize("breaking", [Broken.lose_lease, Broken.half_settle])
async def test_a_run_whose_lease_is_gone_runs_again(broken: Broken, breaking: Break) -> None:
    """No agent could ever report it: it goes back into the queue, is answered, and settles once."""
    job = await broken.running()
    await breaking(broken, job)
    assert await broken.mended() == {"run": 1}
    assert (await broken.agent.finish(ok(job))).verdicts == ("stale",)
    assert await broken.ends(job.job_id) == "succeeded"


async def test_an_answer_that_was_stored_is_given(broken: Broken) -> None:
    """The script failed after it had taken the answer: nothing is run again, also without its inputs."""
    job = await broken.running()
    await broken.half_settle(job)
    await broken.redis.set(broken.name("res", job.job_id), b"\xa2ok")
    await broken.redis.delete(broken.name("pay", job.job_id))
    assert await broken.mended() == {"run": 1}
    outcome = await jobs.outcome(broken.store, job.job_id)
    assert outcome is not None and outcome.result is not None
    assert (outcome.state, msgpack.unpackb(outcome.result)) == ("succeeded", "ok")


async def test_a_job_whose_inputs_are_gone_is_lost(broken: Broken) -> None:
    """It cannot run again: its callers are told to retry, and its key is free for that."""
    await broken.submit(key="k")
    (job,) = await broken.agent.claim()
    await broken.half_settle(job)
    await broken.redis.delete(broken.name("pay", job.job_id))
    assert "run" in await broken.mended()
    assert await broken.ends(job.job_id) == "lost"
    (again,) = await broken.submit(key="k")
    assert again != job.job_id and await broken.ends(again) == "succeeded"


async def test_a_granted_job_that_stands_in_no_list_is_handed_out(broken: Broken) -> None:
    """Its card is told, and gets it with the next claim."""
    (job,) = await broken.submit()
    await broken.redis.delete(broken.name("ready", broken.agent.card))
    assert await broken.mended() == {"ready": 1}
    assert await broken.ends(job) == "succeeded"


async def test_a_granted_job_without_its_lease_waits_again(broken: Broken) -> None:
    """It is queued, granted anew and answered."""
    (job,) = await broken.submit()
    await broken.redis.delete(broken.name("leases", broken.agent.card))
    assert "run" in await broken.mended()
    assert await broken.ends(job) == "succeeded"


async def test_bytes_that_no_job_has_come_back(broken: Broken) -> None:
    """A grant that stopped between lease and job: the job is still queued, its bytes are leased to nobody."""
    (job,) = await broken.submit()
    await broken.edit(job, s="queued", d="", l="", gr=0)
    found = await broken.mended()
    assert found.items() >= {"lease": 1, "queue": 1}.items()
    card = await inventory.card(broken.store, broken.agent.card)
    assert card.ledger.jobs in (0, GIB), "one lease at most"
    assert await broken.ends(job) == "succeeded"


async def test_a_waiter_that_stands_in_no_queue_is_served(broken: Broken) -> None:
    """Its class is known again as well."""
    await broken.agent.beat("down")
    (job,) = await broken.submit()
    await broken.redis.delete(broken.name("q", "echo"), broken.name("classes"))
    assert await broken.mended() == {"queue": 1}
    assert [each.waiting for each in await inventory.queue(broken.store)] == [1]
    assert await broken.ends(job) == "succeeded"


async def test_a_head_that_is_no_waiter_leaves_the_queue(broken: Broken) -> None:
    """Sixteen of them would hide everybody behind them."""
    await broken.agent.beat("down")
    await broken.redis.zadd(broken.name("q", "echo"), {f"{i:032x}": i for i in range(40)})
    (job,) = await broken.submit()
    for _ in range(3):
        await inventory.audit(broken.store)
    assert await broken.redis.zcard(broken.name("q", "echo")) == 1
    assert await broken.ends(job) == "succeeded"


async def test_a_waiter_for_a_run_that_is_gone_may_start(broken: Broken) -> None:
    """A retry with a key waits for the end of the former run; whatever lost that end, it does not wait on."""
    await broken.submit(key="k")
    (job,) = await broken.agent.claim()
    broken.agent.start(job)
    await broken.agent.beat()
    await admission.cancel(broken.store, job.job_id)
    (again,) = await broken.submit(key="k")
    assert await broken.field(again, "bl") == job.job_id
    await broken.edit(job.job_id, nx=None)
    assert await broken.mended() == {"blocked": 1}
    await broken.agent.finish(failed(job))
    assert await broken.ends(again) == "succeeded"


async def test_a_settled_record_that_nobody_would_forget(broken: Broken) -> None:
    """It gets its end, and so do its answer and its inputs."""
    (job,) = await broken.submit(is_async=True)
    await broken.agent.run_all()
    await broken.redis.zrem(broken.name("expiry"), job)
    await broken.redis.persist(broken.name("job", job))
    await broken.redis.zadd(broken.name("jobs"), {"0" * 32: 5})
    assert await broken.mended() == {"record": 1, "index": 1}


async def test_counters_of_waiters_and_stored_bytes_are_recounted(broken: Broken) -> None:
    """A counter that never comes down would keep callers out, or fail every settling, for ever."""
    await broken.agent.beat("down")
    (job,) = await broken.submit()
    limits = broken.name("limits")
    right = await broken.redis.hgetall(limits)
    wrong = {"p": (7, 10**9), "m:echo": (0, 0), "t:gone": (3, 0)}
    await broken.redis.hset(limits, mapping={name: struct.pack("<dd", *two) for name, two in wrong.items()})
    await broken.redis.hset(broken.store.keys.meta, "rb", 10**12)
    assert await broken.mended() == {"limits": 3, "stored": 1}
    assert await broken.redis.hgetall(limits) == right
    assert await broken.ends(job) == "succeeded"


async def test_many_are_mended_in_bounded_steps(broken: Broken) -> None:
    """At most sixteen jobs are moved per call, the caller goes on, and in the end all are answered."""
    await broken.agent.beat("down")
    ids = await broken.submit(40, nbytes=MIB)
    await broken.redis.delete(broken.name("q", "echo"), broken.name("classes"), broken.name("deadlines"))
    reply, steps = await broken.store.run("audit", {"cards": []}), 1
    while reply.fields["more"]:
        assert sum(dict(reply.fields["mended"] or {}).values()) <= 17
        reply, steps = await broken.store.run("audit", {"go_on": 1}), steps + 1
    assert steps >= 5
    assert await broken.mended() == {}
    for job in ids:
        assert await broken.ends(job) == "succeeded"


async def test_a_round_passes_what_is_settled(broken: Broken) -> None:
    """The oldest job of many is found behind more settled ones than one call looks at."""
    await broken.agent.beat("down")
    (job,) = await broken.submit()
    await broken.agent.beat()
    broken.agent.models = (hosted(slots=16),)
    for _ in range(12):
        await broken.submit(16, nbytes=MIB)
        await broken.agent.run_all()
    assert await broken.ends(job) == "succeeded"
    await broken.edit(job, s="queued")
    await broken.redis.zrem(broken.name("expiry"), job)
    await broken.redis.set(broken.name("pay", job), b"\x81\xa1x\x01")
    found = await broken.mended()
    assert found.items() >= {"queue": 1, "deadline": 1}.items()
    assert await broken.ends(job) == "succeeded"


async def test_gateways_go_on_with_a_round(broken: Broken) -> None:
    """Once a minute a gateway's beat begins one, and the beats after it go on: no operator is needed."""
    await broken.agent.beat("down")
    (job,) = await broken.submit()
    await gateway_beat(broken.store, "w1")
    await broken.redis.zrem(broken.name("deadlines"), job)
    await gateway_beat(broken.store, "w1")
    assert await broken.redis.zscore(broken.name("deadlines"), job) is None, "the last audit is not old"
    await broken.redis.hset(broken.store.keys.meta, "audited", 0)
    await gateway_beat(broken.store, "w1")
    assert await broken.redis.zscore(broken.name("deadlines"), job) is not None
    await gateway_beat(broken.store, "w1")
    assert await broken.redis.hget(broken.store.keys.meta, "mend") is None, "the round is over"
    assert await broken.ends(job) == "succeeded"


async def test_a_finish_that_fails_half_way_is_mended_at_once(
    broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    """A script of ours that fails leaves a job stamped, without a deadline and without its lease: the audit
    that follows puts it back, says so, and it is answered.
    """
    job = await broken.running()
    await broken.redis.set(broken.name("letters"), "of a wrong type")
    with pytest.raises(errors.Internal, match="finish failed"):
        await broken.agent.finish(failed(job))
    await broken.redis.delete(broken.name("letters"))
    assert "ledger_mended" in caplog.text
    assert (await jobs.view(broken.store, job.job_id)).state in ("queued", "leased")
    assert await broken.redis.zscore(broken.name("deadlines"), job.job_id) is not None
    assert await broken.ends(job.job_id) == "succeeded"


async def test_a_script_that_fails_at_its_very_end_is_mended_at_once(broken: Broken) -> None:
    """One job settled, and the grant of a newer one to another card fails while all is written: no index has
    called the first one settled before its record does, or a round that has seen as many as live would not
    reach it.
    """
    await broken.submit(2)
    first, second = await broken.agent.claim()
    for job in (first, second):
        broken.agent.start(job)
    await broken.agent.beat()
    other = FakeAgent(broken.store, "GPU-b", total=20 * GIB)
    await other.register()
    await broken.redis.set(broken.name("ready", other.card), "of a wrong type")
    with pytest.raises(errors.Internal, match="finish failed"):
        await broken.agent.finish(failed(first), said(second, "killed"))
    await broken.redis.delete(broken.name("ready", other.card))
    await other.beat("down")
    waiting = [first.job_id, second.job_id]
    assert all(await broken.redis.zmscore(broken.name("deadlines"), waiting))
    assert [await broken.ends(job) for job in waiting] == ["succeeded", "succeeded"]


@pytest.mark.parametrize("spoilt", ["cut short", "of a wrong type"])
@pytest.mark.parametrize("state", ["queued", "granted", "running"])
async def test_a_record_that_cannot_be_read_holds_nobody_up(broken: Broken, spoilt: str, state: str) -> None:
    """Its deadline passes and its card reports: the job is unknown from then on, and what is left of it goes
    with the dead letters; beats, finishes and the jobs of others go on.
    """
    if state == "queued":
        await broken.agent.beat("down")
    job = await broken.running() if state == "running" else None
    odd = job.job_id if job else (await broken.submit())[0]
    name = broken.name("job", odd)
    record = await broken.redis.get(name)
    await broken.redis.delete(name)
    if spoilt == "cut short":
        await broken.redis.set(name, record[:50])
    else:
        await broken.redis.hset(name, "s", "queued")
    await broken.redis.zadd(broken.name("deadlines"), {odd: 0})
    await gateway_beat(broken.store, "w1")
    await broken.agent.beat()
    with pytest.raises(errors.UnknownJob):
        await jobs.view(broken.store, odd)
    assert await broken.mended()
    assert await broken.redis.pttl(name) > 0
    if job:
        await broken.agent.finish(ok(job))
    (other,) = await broken.submit()
    assert await broken.ends(other) == "succeeded"
    # Nobody else reads it, but what looks at every key after the test would.
    await broken.redis.delete(name)
