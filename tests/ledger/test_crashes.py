"""Crashes, losses, out of memory: how often a job runs again, and when alone."""

from __future__ import annotations

from scheduler import admission, cards, inventory, jobs
from scheduler.gateways import gateway_beat
from scheduler.handover import OutcomeKind
from scheduler.store import Store
from tests.ledger.conftest import Tuned
from tests.ledger.fake_agent import GIB, FakeAgent, ok, request, said
from tests.waiting import until


async def _submit(store: Store, number: int = 1, *, total_timeout_ms: int = 100_000) -> list[str]:
    asked = [request(nbytes=GIB, inputs=i, total_timeout_ms=total_timeout_ms) for i in range(number)]
    return [(await admission.submit(store, each)).job_id for each in asked]


async def _again(agent: FakeAgent, kind: OutcomeKind, *, alone: bool) -> None:
    (job,) = await agent.claim()
    agent.start(job)
    await agent.finish(said(job, kind, alone=alone))


async def test_a_suspect_runs_alone_and_two_crashes_alone_end_it(store: Store) -> None:
    """Crash beside others, then alone, then alone again: `crashed` after at most three runs."""
    agent = FakeAgent(store)
    await agent.register()
    (job_id,) = await _submit(store)
    await _again(agent, "crashed", alone=False)
    assert (await jobs.view(store, job_id)).crashes == 0
    (job,) = await agent.claim()
    assert job.alone
    assert (await inventory.card(store, agent.card)).ledger.grantable == 0, "it has the card to itself"
    await agent.finish(said(job, "crashed", alone=True))
    await _again(agent, "crashed", alone=True)
    view = await jobs.view(store, job_id)
    assert (view.state, view.code, view.attempt, view.crashes) == ("failed", "crashed", 3, 2)


async def test_an_innocent_suspect_is_answered(store: Store) -> None:
    """One of two that died together crashes again, the other one succeeds alone."""
    agent = FakeAgent(store)
    await agent.register()
    guilty, innocent = await _submit(store, 2)
    held = await agent.claim()
    await agent.down(*(said(job, "crashed") for job in held))
    await agent.beat("ready")
    seen = []
    while handed := await agent.claim():
        assert len(handed) == 1, "suspects run one at a time"
        (job,) = handed
        seen.append(job.job_id)
        await agent.finish(said(job, "crashed", alone=True) if job.job_id == guilty else ok(job))
    assert (await jobs.view(store, guilty)).code == "crashed"
    assert (await jobs.view(store, innocent)).state == "succeeded"
    assert (seen.count(guilty), seen.count(innocent)) == (2, 1)


async def test_a_killed_neighbour_counts_nothing(store: Store) -> None:
    """Jobs of a child that was killed because of another one run again, however often, and not alone."""
    agent = FakeAgent(store)
    await agent.register()
    (job_id,) = await _submit(store)
    for _ in range(6):
        (job,) = await agent.claim()
        agent.start(job)
        await agent.down(said(job, "killed"))
        await agent.beat("ready")
    (job,) = await agent.claim()
    view = await jobs.view(store, job_id)
    assert (view.crashes, view.losses, view.attempt, job.alone) == (0, 0, 7, False)


async def test_out_of_memory_runs_alone_once(store: Store) -> None:
    """The first OOM requeues the job with the card to itself, the second one is told."""
    agent = FakeAgent(store)
    await agent.register()
    (job_id,) = await _submit(store)
    await _again(agent, "oom", alone=False)
    (job,) = await agent.claim()
    assert job.alone and job.lease_bytes == 10 * GIB
    await agent.finish(said(job, "oom", alone=True))
    view = await jobs.view(store, job_id)
    assert (view.state, view.code) == ("failed", "oom")


async def test_an_exclusive_job_runs_with_nobody_beside_it(store: Store) -> None:
    """While others run it reserves the card and waits; while it runs nothing is granted; then the others go
    on.
    """
    agent = FakeAgent(store)
    await agent.register()
    await _submit(store, 1)
    (suspect,) = await agent.claim()
    await _submit(store, 1)
    (neighbour,) = await agent.claim()
    await agent.finish(said(suspect, "oom"))
    small = await _submit(store, 2)
    assert await agent.claim() == [], "the card is reserved for the suspect"
    assert (await inventory.card(store, agent.card)).head == suspect.job_id
    handout = await agent.finish(ok(neighbour), want=4)
    (alone,) = handout.jobs
    assert (alone.job_id, alone.alone) == (suspect.job_id, True)
    assert await agent.claim() == []
    handout = await agent.finish(ok(alone), want=4)
    assert [job.job_id for job in handout.jobs] == small


async def _lose(store: Store, agent: FakeAgent) -> None:
    """The agent falls silent while a job runs; another process takes its card."""
    (job,) = await agent.claim()
    agent.start(job)
    await agent.beat()
    job_id = job.job_id

    async def is_requeued() -> bool:
        await gateway_beat(store, "w1")
        return (await jobs.view(store, job_id)).state in ("queued", "failed")

    await until("the session ended", is_requeued)
    agent.renew()
    await agent.register()


async def test_the_fourth_loss_ends_a_job(tuned: Tuned) -> None:
    """A job whose agents are lost runs again; after three losses alone; the fourth one is told as `lost`."""
    store = await tuned()
    agent = FakeAgent(store)
    await agent.register()
    (job_id,) = await _submit(store, total_timeout_ms=600_000)
    for losses in (1, 2, 3):
        await _lose(store, agent)
        view = await jobs.view(store, job_id)
        assert (view.losses, view.crashes) == (losses, 0)
    (job,) = await agent.claim()
    assert job.alone
    agent.seq -= 1
    await _lose(store, agent)
    view = await jobs.view(store, job_id)
    assert (view.state, view.code, view.losses) == ("failed", "lost", 4)


async def test_a_clean_leave_counts_no_loss(store: Store) -> None:
    """What an agent still holds when it leaves in order runs elsewhere, without a count."""
    agent, other = FakeAgent(store, "GPU-a"), FakeAgent(store, "GPU-b")
    await agent.register()
    (job_id,) = await _submit(store)
    (job,) = await agent.claim()
    agent.start(job)
    await agent.beat()
    await other.register()
    await cards.leave(store, card=agent.card, session=agent.session)
    (again,) = await other.claim()
    view = await jobs.view(store, job_id)
    assert (again.job_id, view.losses, view.crashes, view.card) == (job_id, 0, 0, "GPU-b")
    left = await inventory.card(store, agent.card)
    assert (left.state, left.jobs, left.ledger.jobs) == ("lost", 0, 0)
