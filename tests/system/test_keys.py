"""One key, one run: whoever asks, how often, through whichever gateway, and whatever dies meanwhile."""

from __future__ import annotations

import asyncio

import httpx

from tests.system.caller import Caller, new_tag
from tests.waiting import until


async def test_one_key_sent_fifty_times_at_once_runs_once(caller: Caller) -> None:
    """50 requests with one key through both gateways: one run, and all get the same answer."""
    tag = new_tag()
    asked = [caller.infer("work", tag, key=tag, seconds=0.5, gateway=n % 2) for n in range(50)]
    answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert caller.box.runs(tag) == 1
    again = await caller.infer("work", tag, key=tag, seconds=0.5)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.content == answers[0].content
    assert caller.box.runs(tag) == 1


async def test_one_key_survives_the_gateway_that_took_it(caller: Caller) -> None:
    """50 callers share a key; the gateway that took the job is killed -9 while it runs: one run, the same
    answer for all, who retry at the other.
    """
    tag = new_tag()
    async with caller.client() as client:
        first = asyncio.create_task(caller.infer("work", tag, key=tag, seconds=2.0, gateway=0))
        await caller.tagged_run(tag)
        inputs = {"tag": tag, "seconds": 2.0}
        others = [asyncio.create_task(client.infer("work", inputs, idempotency_key=tag)) for _ in range(49)]
        job = await caller.only_job("work", "running")

        async def all_joined() -> bool:
            return (await caller.view(job.id)).clients == 50

        await until("all 50 wait for the one job", all_joined)
        caller.box.gateways[0].kill()
        answers = await asyncio.gather(*others)
        try:
            await first
        except httpx.TransportError:
            assert (await caller.infer("work", tag, key=tag, seconds=2.0, gateway=1)).status_code == 200
    assert {answer.id for answer in answers} == {job.id}
    assert len({str(answer.outputs) for answer in answers}) == 1
    assert max(answer.tries for answer in answers) > 1, "nobody had to retry: the test killed nothing"
    assert caller.box.runs(tag) == 1
    assert (await caller.view(job.id)).attempt == 1


async def test_an_impatient_client_keeps_its_place_in_the_queue(caller: Caller) -> None:
    """A client with a 2 s timeout against a 5 s queue succeeds by retries with one run, and nobody who came
    after it is served before it.
    """
    blocker = await caller.submit("one", new_tag(), seconds=5.0)
    await caller.in_state(blocker, "running")
    tag = new_tag()
    async with caller.client(timeout_s=2.0) as client:
        impatient = asyncio.create_task(client.infer("one", {"tag": tag, "seconds": 0.1}))
        mine = await caller.only_job("one", "queued")
        later = []
        for _ in range(6):
            later.append(await caller.submit("one", new_tag(), seconds=0.1))
            await asyncio.sleep(0.5)
        answer = await impatient
    assert answer.tries >= 3
    assert answer.id == mine.id
    assert caller.box.runs(tag) == 1
    for job in later:
        assert (await caller.ended(job))["state"] == "succeeded"
    served = [(await caller.view(job)).started_ms or 0 for job in (answer.id, *later)]
    assert served == sorted(served), "somebody who came later was served before"
    assert (await caller.view(answer.id)).wait_started_ms == (await caller.view(answer.id)).created_ms
