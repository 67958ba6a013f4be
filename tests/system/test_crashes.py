"""kill -9, SIGSTOP and restarts of every kind of process: no accepted job is lost, none is settled twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import httpx
import pytest

from scheduler.views import JobView
from tests.system.box import SESSION_S, event_ms
from tests.system.caller import Caller, new_tag
from tests.waiting import is_running, until
from vramgate.client import Answer, AsyncClient


def load(client: AsyncClient, tags: Sequence[str], *, seconds: float = 0.3) -> list[asyncio.Task[Answer]]:
    """Keyed callers that retry, one for each tag."""
    return [
        asyncio.create_task(
            client.infer("work", {"tag": tag, "seconds": seconds, "mib": 8.0}, idempotency_key=tag)
        )
        for tag in tags
    ]


async def all_answered(caller: Caller, tags: Sequence[str], answers: Sequence[Answer]) -> None:
    """Each caller has the answer to its own question, and each job ended once for all."""
    for tag, answer in zip(tags, answers, strict=True):
        assert answer.outputs["tag"] == tag
        view = await caller.view(answer.id)
        assert view.state == "succeeded"
        assert caller.box.runs(tag) >= 1
    assert (await caller.totals()).get("settled_twice", 0) == 0


async def _running(caller: Caller, model: str) -> list[JobView]:
    async def check() -> list[JobView]:
        return await caller.jobs("running", model=model)

    return await until(f"a job of {model} runs", check)


async def test_kill_9_of_a_child_runs_its_jobs_again(caller: Caller) -> None:
    """The jobs of a killed child run again, once each, within 1 s of the next child's being warm; their
    callers see 200.
    """
    crashes_before = (await caller.totals()).get("requeued.crash", 0)
    tags = [new_tag() for _ in range(4)]
    tasks = [asyncio.create_task(caller.infer("batch", tag, seconds=1.5)) for tag in tags]
    (card,) = {job.card or "" for job in await _running(caller, "batch")}
    ready = len(caller.box.agents.events("card_ready", card=card))
    os.kill(caller.box.agents.child(card), signal.SIGKILL)
    answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 4
    warm_ms = event_ms(caller.box.agents.events("card_ready", card=card)[ready])
    began = []
    for tag, answer in zip(tags, answers, strict=True):
        assert answer.json()["outputs"]["tag"] == tag
        view = await caller.view(answer.json()["id"])
        assert view.attempt <= 2 and caller.box.runs(tag) <= 2
        began.append(view.started_ms or 0)
    crashed = (await caller.totals())["requeued.crash"] - crashes_before
    assert 1 <= crashed <= 4
    assert min(began) - warm_ms <= 1000


async def test_kill_9_of_a_supervisor_moves_its_job_to_the_other_card(caller: Caller) -> None:
    """A supervisor is killed: its child dies with it, its job waits again within the session and 1 s, and
    runs on the other card; the caller sees 200.
    """
    tag = new_tag()
    task = asyncio.create_task(caller.infer("work", tag, seconds=3.0))
    view = await caller.only_job("work", "running")
    assert view.card is not None
    child = caller.box.agents.child(view.card)
    killed_ms = await caller.now_ms()
    os.kill(caller.box.agents.supervisor(view.card), signal.SIGKILL)
    answer = await task
    assert answer.status_code == 200
    after = await caller.view(view.id)
    assert after.card != view.card and after.losses == 1 and after.crashes == 0
    assert killed_ms < after.wait_started_ms <= killed_ms + (SESSION_S + 1) * 1000
    assert not is_running(child)
    assert caller.box.runs(tag) == 2


async def test_kill_9_of_a_gateway_under_load(caller: Caller) -> None:
    """Keyed callers of a killed gateway find their jobs through the other one: each has one run and one
    answer.
    """
    tags = [new_tag() for _ in range(40)]
    async with caller.client() as client:
        tasks = load(client, tags)
        await caller.tagged_run(tags[0])
        caller.box.gateways[1].kill()
        answers = await asyncio.gather(*tasks)
    await all_answered(caller, tags, answers)
    assert any(answer.tries > 1 for answer in answers)
    assert [caller.box.runs(tag) for tag in tags] == [1] * len(tags)


async def test_a_job_without_a_key_ends_with_its_gateway(caller: Caller) -> None:
    """Nobody could take its answer any more: it is cancelled once its gateway's session is over, and its
    bytes are back long before it would have been done.
    """
    task = asyncio.create_task(caller.infer("one", new_tag(), seconds=60.0, gateway=0))
    view = await caller.only_job("one", "running")
    killed_ms = await caller.now_ms()
    caller.box.gateways[0].kill()
    with pytest.raises(httpx.TransportError):
        await task
    cancelled = await caller.in_state(view.id, "cancelled")
    assert cancelled.settled_ms is not None
    assert cancelled.settled_ms - killed_ms <= (SESSION_S + 1.5) * 1000
    await caller.no_leases()


async def test_models_stay_loaded_when_gateways_restart(caller: Caller) -> None:
    """Both gateways are stopped and started again: the same children, no model loaded again, nobody's job is
    lost.
    """
    cards = [card.id for card in await caller.cards()]
    children = [caller.box.agents.child(card) for card in cards]
    loads = len(caller.box.agents.events("model_loaded"))
    job = await caller.submit("work", new_tag(), seconds=1.0)
    for gateway in caller.box.gateways:
        assert await asyncio.to_thread(gateway.stop) == 0
    caller.box.heal()
    assert (await caller.ended(job))["state"] == "succeeded"
    assert [caller.box.agents.child(card) for card in cards] == children
    assert all(map(is_running, children))
    assert len(caller.box.agents.events("model_loaded")) == loads


async def test_kill_9_of_the_server_loses_nothing(caller: Caller) -> None:
    """The server is killed under load and started again over its append-only file: all callers are answered,
    and no job is settled twice; no child ends.
    """
    children = [caller.box.agents.child(card.id) for card in await caller.cards()]
    tags = [new_tag() for _ in range(40)]
    accepted = [await caller.submit("work", tag, seconds=0.2) for tag in (new_tag() for _ in range(20))]
    async with caller.client() as client:
        tasks = load(client, tags)
        await caller.tagged_run(tags[0])
        caller.box.server.kill()
        await asyncio.sleep(1.0)  # The time for which there is no server.
        caller.box.server.start()
        await all_answered(caller, tags, await asyncio.gather(*tasks))
    for job in accepted:
        assert (await caller.ended(job))["state"] == "succeeded"
    assert [caller.box.agents.child(card.id) for card in await caller.cards()] == children


async def test_an_agent_that_slept_past_its_session_cannot_finish_its_job(caller: Caller) -> None:
    """A supervisor is stopped past its session and continued: the job ran elsewhere and is settled once; the
    late one ends its work, keeps its models, and serves again.
    """
    tag = new_tag()
    task = asyncio.create_task(caller.infer("work", tag, seconds=2.0))
    view = await caller.only_job("work", "running")
    assert view.card is not None
    child = caller.box.agents.child(view.card)
    supervisor = caller.box.agents.supervisor(view.card)
    os.kill(supervisor, signal.SIGSTOP)
    try:

        async def moved() -> bool:
            now = await caller.view(view.id)
            return now.state == "running" and now.card != view.card

        await until("the job runs on the other card", moved)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    answer = await task
    assert answer.status_code == 200
    after = await caller.view(view.id)
    assert answer.json()["card"] == after.card != view.card
    assert after.lease_id != view.lease_id and after.losses == 1
    assert caller.box.runs(tag) == 2
    await caller.all_ready()
    assert caller.box.agents.child(view.card) == child and is_running(child)
    assert (await caller.totals()).get("settled_twice", 0) == 0


async def test_an_async_job_outlives_a_restart_of_everything(caller: Caller) -> None:
    """Accepted, then agents, gateways and server are stopped and started again: the job is answered, under
    its id and under its key.
    """
    tag = new_tag()
    job = await caller.submit("one", tag, key=tag, seconds=1.0)
    blocked = await caller.submit("one", seconds=0.1)
    box = caller.box
    assert await asyncio.to_thread(box.agents.stop) == 0
    for gateway in box.gateways:
        assert await asyncio.to_thread(gateway.stop) == 0
    box.server.signal(signal.SIGTERM)
    assert box.server.process is not None
    await asyncio.to_thread(box.server.process.wait)
    box.server.process = None
    box.heal()
    assert (await caller.ended(job))["state"] == "succeeded"
    assert (await caller.ended(blocked))["state"] == "succeeded"
    again = await caller.infer("one", tag, key=tag, seconds=1.0, gateway=1)
    assert again.status_code == 200 and again.json()["id"] == job
    assert again.headers["Idempotency-Replayed"] == "true"
