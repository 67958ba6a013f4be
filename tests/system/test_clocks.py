"""The three ends that a caller's patience, a run's limit and a lost client put to a job, and what they leave:
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics

import httpx
import pytest

from scheduler.views import JobView
from tests.system.box import CONFIGURATION
from tests.system.caller import Caller, new_tag
from tests.system.whole import check_whole
from tests.waiting import until

JOB_S = 0.5
QUEUE = 20


async def test_a_wait_over_the_limit_is_503(caller: Caller) -> None:
    """wait_timeout: 503, a whole number of seconds in Retry-After, not before the limit and soon after it; it
    never ran.
    """
    blocker = await caller.submit("one", new_tag(), seconds=3.0)
    await caller.in_state(blocker, "running")
    tag = new_tag()
    refused = await caller.infer("one", tag, options={"max_wait_s": 0.5})
    assert refused.status_code == 503
    problem = refused.json()
    assert problem["code"] == "wait_timeout" and problem["type"] == "urn:vramgate:wait_timeout"
    assert int(refused.headers["Retry-After"]) >= 1
    view = await caller.view(refused.headers["X-Job-Id"])
    assert view.state == "expired" and view.settled_ms is not None
    # Whoever sweeps does so at least once a second: gateways beat, and so do agents.
    assert 500 <= view.settled_ms - view.created_ms <= 500 + 1500
    assert (await caller.ended(blocker))["state"] == "succeeded"
    assert caller.box.runs(tag) == 0


async def test_retry_after_is_true_within_a_factor_of_two(caller: Caller) -> None:
    """Steady load of jobs of 0.5 s, a queue of 20 that is full, and 20 refused callers: the n-th of them
    could have been admitted at the n-th grant after that; its Retry-After is within a factor of 2 of this
    time, at the median.
    """
    configuration = caller.box.folder / "small-queue.toml"
    configuration.write_text(f"{CONFIGURATION}\n[limits]\nmodel_jobs = {QUEUE}\n")
    gateway = caller.box.new_gateway(configuration=configuration, workers=1)
    caller.box.gateways.append(gateway)
    try:
        gateway.start()
        caller.box.heal()
        # A class of its own, so that what other tests did to this model is not part of its measured rate.
        (card,) = [card for card in await caller.cards() if card.index == 0]
        model = "one@" + next(hosted.version for hosted in card.models if hosted.name == "one")
        warm = [await caller.submit(model, seconds=JOB_S) for _ in range(6)]
        await caller.ended(warm[3])
        while (
            await caller.infer(model, seconds=JOB_S, prefer="respond-async", gateway=2)
        ).status_code == 202:
            continue
        # A grant in the midst of it lets one of them in, who is load then.
        asked = [
            caller.infer(model, seconds=JOB_S, prefer="respond-async", gateway=2) for _ in range(QUEUE + 8)
        ]
        refused_ms = await caller.now_ms()
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} <= {202, 429}
        refusals = [answer for answer in answers if answer.status_code == 429]
        promised = sorted(int(answer.headers["Retry-After"]) for answer in refusals)
        jobs = await caller.jobs("queued", model="one")
        assert len(promised) >= QUEUE and len(jobs) >= QUEUE - 1
        for job in jobs:
            await caller.ended(job.id)
        granted = [(await caller.view(job.id)).granted_ms or 0 for job in jobs]
    finally:
        caller.box.gateways.pop()
        gateway.stop()
    waits = [at - refused_ms for at in sorted(granted)]
    ratios = [seconds * 1000 / wait for seconds, wait in zip(promised, waits, strict=False)]
    assert 0.5 <= statistics.median(ratios) <= 2.0, (promised, ratios)


@pytest.mark.parametrize("model", ["work", "deaf"])
async def test_a_run_over_its_limit_is_504_and_its_memory_is_back(caller: Caller, model: str) -> None:
    """run_timeout: 504 by the run's own clock; then its lease ends and the card measures as before, whether
    the model listens or its process has to be killed.
    """
    children = [caller.box.agents.child(card.id) for card in await caller.cards()]
    answer = await caller.infer(model, new_tag(), seconds=60.0, mib=64.0, options={"run_timeout_s": 0.5})
    assert answer.status_code == 504
    problem = answer.json()
    assert problem["code"] == "run_timeout"
    job = answer.headers["X-Job-Id"]
    assert problem["instance"].endswith(job)
    view = await caller.view(job)
    assert view.started_ms is not None and view.settled_ms is not None
    assert view.settled_ms - view.started_ms >= 500
    await check_whole(caller)
    assert (await caller.view(job)).attempt == 1
    now = [caller.box.agents.child(card.id) for card in await caller.cards()]
    assert (now != children) == (model == "deaf"), (
        "a process is killed where the model does not listen, only there"
    )


async def _leave(task: asyncio.Task[httpx.Response]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_client_that_leaves_frees_its_bytes(caller: Caller) -> None:
    """Without a key a job ends with its client: waiting, it leaves the queue; running, its lease ends and its
    memory is measured back, long before it would have been done.
    """
    running = asyncio.create_task(caller.infer("one", new_tag(), seconds=60.0, mib=64.0))
    first = await caller.only_job("one", "running")
    waiting = asyncio.create_task(caller.infer("one", new_tag(), seconds=60.0))
    second = await caller.only_job("one", "queued")
    await _leave(waiting)
    await caller.in_state(second.id, "cancelled")
    await _leave(running)
    assert (await caller.in_state(first.id, "cancelled")).code == "cancelled"
    await check_whole(caller)


async def test_a_client_that_leaves_costs_its_batch_mates_nothing(caller: Caller) -> None:
    """Four jobs in one batch, one client leaves without a key: its job is cancelled, the other three are
    answered by the run that they were in.
    """
    blocker = await caller.submit("batch", new_tag(), seconds=1.5)
    await caller.in_state(blocker, "running")
    tags = [new_tag() for _ in range(4)]
    tasks = [asyncio.create_task(caller.infer("batch", tag, seconds=2.0)) for tag in tags]
    for tag in tags:
        await caller.tagged_run(tag)

    async def leaver() -> JobView | None:
        running = await caller.jobs("running", model="batch")
        return running[0] if len(running) == 4 else None

    await until("all four run", leaver)
    await _leave(tasks[0])

    async def gone() -> JobView | None:
        cancelled = [
            job for job in await caller.jobs("cancelled", model="batch") if job.started_ms is not None
        ]
        return cancelled[0] if cancelled else None

    left = await until("the job of the client that left is cancelled", gone)
    for tag, task in zip(tags[1:], tasks[1:], strict=True):
        answer = await task
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"]["tag"] == tag and answer.json()["outputs"]["batch"] == 4
        view = await caller.view(answer.json()["id"])
        assert view.attempt == 1 and view.crashes == 0
        assert (view.settled_ms or 0) >= (left.settled_ms or 0)
        assert caller.box.runs(tag) == 1
    await caller.no_leases()
