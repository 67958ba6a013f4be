"""Events of a job: their order, their ids, and how a stream ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from gateway.events import Teller, parse_event_id
from scheduler import cards, jobs
from scheduler.handover import HandedJob, Report
from scheduler.store import Store
from tests.gateway.conftest import Answerer, Running
from tests.ledger.fake_agent import FakeAgent, failed, ok
from tests.waiting import until
from vramgate.errors import Malformed

STREAM = {"Accept": "text/event-stream"}


@dataclass(frozen=True)
class Event:
    name: str
    data: Any
    id: str | None


async def read(response: httpx.Response) -> AsyncIterator[Event]:
    name, data, event_id = "", "", None
    async for line in response.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            data = value
        elif field == "id":
            event_id = value
        elif not line and name:
            yield Event(name, json.loads(data), event_id)
            name, data, event_id = "", "", None


def emitting(answerer: Answerer, store: Store, *events: tuple[str, dict[str, Any]]) -> None:
    async def handle(job: HandedJob) -> Report:
        agent = answerer.agent
        for event in events:
            told = await cards.emit(
                store,
                card=agent.card,
                session=agent.session,
                job_id=job.job_id,
                lease_id=job.lease_id,
                attempt=job.attempt,
                events=[event],
            )
            assert told
        return ok(job)

    answerer.handler = handle


async def test_infer_as_a_stream_of_events(http: httpx.AsyncClient, answerer: Answerer, store: Store) -> None:
    """queued, running, what the model emitted in order, then exactly one done with the answer."""
    emitting(
        answerer,
        store,
        ("progress", {"done": 1, "total": 2}),
        ("output", {"output": [1]}),
        ("progress", {"done": 2, "total": 2}),
    )
    async with http.stream("POST", "/v1/models/echo/infer", json={"inputs": {}}, headers=STREAM) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [event async for event in read(response)]
    names = [event.name for event in events if event.name != "queued"]
    assert names == ["running", "progress", "output", "progress", "done"]
    emitted = [event for event in events if event.name in ("progress", "output")]
    assert [event.data for event in emitted] == [
        {"done": 1, "total": 2},
        {"output": [1]},
        {"done": 2, "total": 2},
    ]
    assert all(event.id and event.id.startswith(f"{answerer.seen[0].attempt}-") for event in emitted)
    assert events[-1].data["outputs"] == "ok" and events[-1].data["id"] == response.headers["x-job-id"]


async def test_a_failure_ends_the_stream_with_one_error(http: httpx.AsyncClient, answerer: Answerer) -> None:
    """The data of `error` are the problem document."""

    async def fail(job: HandedJob) -> Report:
        return failed(job)

    answerer.handler = fail
    async with http.stream("POST", "/v1/models/echo/infer", json={"inputs": {}}, headers=STREAM) as response:
        events = [event async for event in read(response)]
    assert [event.name for event in events if event.name in ("done", "error")] == ["error"]
    assert events[-1].data["code"] == "model_error"


async def test_a_stream_resumes_where_it_was_cut(
    http: httpx.AsyncClient, answerer: Answerer, store: Store
) -> None:
    """With Last-Event-ID a second listener is told what came after it, and how it ended."""
    steps = tuple(("progress", {"done": step, "total": 5}) for step in range(1, 6))
    emitting(answerer, store, *steps)
    async with http.stream("POST", "/v1/models/echo/infer", json={"inputs": {}}, headers=STREAM) as response:
        first = [event async for event in read(response)]
    third = next(event for event in first if event.data.get("done") == 3)
    assert third.id is not None
    async with http.stream(
        "GET", f"/v1/jobs/{response.headers['x-job-id']}/events", headers=STREAM | {"Last-Event-ID": third.id}
    ) as again:
        rest = [event async for event in read(again)]
    assert [event.data["done"] for event in rest if event.name == "progress"] == [4, 5]
    assert rest[-1].name == "done" and "reset" not in [event.name for event in rest]
    bad = await http.get(
        f"/v1/jobs/{response.headers['x-job-id']}/events", headers=STREAM | {"Last-Event-ID": "x"}
    )
    assert (bad.status_code, bad.json()["code"]) == (400, "malformed")


async def test_a_requeue_resets_the_stream(http: httpx.AsyncClient, agent: FakeAgent, store: Store) -> None:
    """After a crash listeners are told `reset`, and then the new attempt from its beginning."""
    accepted = await http.post(
        "/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"}
    )
    heard: list[Event] = []

    async def listen() -> None:
        async with http.stream("GET", accepted.headers["location"] + "/events", headers=STREAM) as response:
            async for event in read(response):
                heard.append(event)

    async def is_told(name: str) -> bool:
        await agent.beat()
        return name in [event.name for event in heard]

    listener = asyncio.create_task(listen())
    await until("the listener is there", lambda: bool(heard))
    job = (await agent.claim())[0]
    agent.start(job)
    await agent.beat()
    await until("running is told", lambda: is_told("running"))
    await agent.finish(Report(job.job_id, job.lease_id, "crashed"))
    await until("reset is told", lambda: is_told("reset"))
    assert await agent.run_all() == 1
    await asyncio.wait_for(listener, 10)
    names = [event.name for event in heard if event.name != "queued"]
    assert names in (["running", "reset", "running", "done"], ["running", "reset", "done"])


async def test_the_place_in_the_queue_is_told(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """`queued` carries the position, and is told again when it has changed."""
    for _ in range(8):
        await http.post("/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"})
    waiting = [
        await http.post("/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"})
        for _ in range(2)
    ]
    heard: list[Event] = []

    async def listen() -> None:
        async with http.stream("GET", waiting[1].headers["location"] + "/events", headers=STREAM) as response:
            async for event in read(response):
                heard.append(event)

    listener = asyncio.create_task(listen())
    await until("the listener is there", lambda: bool(heard))
    assert heard[0].name == "queued" and heard[0].data["position"] == 2
    await http.delete(waiting[0].headers["location"])
    await until("the new position is told", lambda: heard[-1].data["position"] == 1)
    await agent.beat()
    await agent.run_all()
    await asyncio.wait_for(listener, 10)
    assert heard[-1].name == "done"


async def test_a_listener_who_leaves_an_infer_stream_gives_the_job_up(
    http: httpx.AsyncClient, agent: FakeAgent, store: Store
) -> None:
    """As for a plain call: without a key the job is cancelled. One who only listens ends nothing."""
    accepted = await http.post(
        "/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"}
    )
    async with http.stream("GET", accepted.headers["location"] + "/events", headers=STREAM):
        pass
    async with http.stream("POST", "/v1/models/echo/infer", json={"inputs": {}}, headers=STREAM) as response:
        job_id = response.headers["x-job-id"]

    async def is_cancelled() -> bool:
        return (await jobs.view(store, job_id)).state == "cancelled"

    await until("the abandoned job is cancelled", is_cancelled)
    assert (await jobs.view(store, accepted.json()["id"])).state == "leased"


async def test_a_quiet_stream_carries_comments(
    running: Running, http: httpx.AsyncClient, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment per heartbeat interval keeps proxies from closing it."""
    quick = running.gateway.settings.model_copy(
        update={"gateway": running.gateway.settings.gateway.model_copy(update={"heartbeat_s": 0.2})}
    )
    monkeypatch.setattr("gateway.events.LOOK_S", 0.1)
    object.__setattr__(running.gateway, "settings", quick)
    accepted = await http.post(
        "/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"}
    )
    async with http.stream("GET", accepted.headers["location"] + "/events", headers=STREAM) as response:
        comments = 0
        async for line in response.aiter_lines():
            comments += line.startswith(":")
            if comments == 2:
                break


def test_event_ids() -> None:
    """Only ids of this service are taken."""
    assert parse_event_id("2-170-3") == (2, "170-3") and parse_event_id(None) is None
    for bad in ("x", "1", "-1-2", "1-2-3-4", "1-2\n", "9" * 30 + "-1"):
        with pytest.raises(Malformed):
            parse_event_id(bad)


def test_a_resumed_listener_of_an_old_attempt_is_reset_first() -> None:
    """What an earlier attempt emitted after the cut is not told any more."""
    import dataclasses

    from tests.cli.test_documents import VIEW

    view = dataclasses.replace(VIEW, state="running", attempt=2, card="c")
    news = [
        ("5-0", {"attempt": 1, "type": "progress", "data": {"done": 9}}),
        ("6-0", {"attempt": 2, "type": "progress", "data": {"done": 1}}),
    ]
    told = b"".join(Teller((1, "4-0")).tell(view, news)).decode()
    names = [line.removeprefix("event: ") for line in told.splitlines() if line.startswith("event: ")]
    assert names == ["reset", "running", "progress"] and '"done":9' not in told


async def test_head_of_a_stream_is_answered_and_over(
    http: httpx.AsyncClient, running: Running, agent: FakeAgent
) -> None:
    """The job still waits, and the connection takes the next request."""
    accepted = await http.post(
        "/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"}
    )
    target = f"{accepted.headers['location']}/events"
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(f"HEAD {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert head.startswith(b"HTTP/1.1 200 OK") and b"content-type: text/event-stream" in head
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"}"), 10)).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    await http.delete(accepted.headers["location"])
