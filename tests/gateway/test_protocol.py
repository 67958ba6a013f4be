"""A request's head has a size and its arrival an end, whoever sends it, and each is heard by itself."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from uvicorn.protocols.http import httptools_impl

from gateway import protocol
from scheduler import inventory, jobs
from scheduler.store import Store
from tests.gateway.conftest import Running
from tests.ledger.fake_agent import FakeAgent
from tests.waiting import until

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n"


async def exchange(running: Running, *pieces: bytes) -> bytes:
    """What the service says until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.01)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


@pytest.mark.parametrize(
    "pieces",
    [
        [GET + b"X: " + b"a" * 70_000],
        [GET, *[b"X: " + b"a" * 999 + b"\r\n"] * 70],
        [GET + b"X: " + b"a" * 70_000 + b"\r\n\r\n"],
        [b"GET /" + b"a" * 70_000],
        [b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"],
    ],
    ids=["one-open-header", "many-headers", "complete", "open-target", "target"],
)
async def test_a_head_beyond_the_limit_is_431(running: Running, pieces: list[bytes]) -> None:
    """A short answer in plain text, then the end of the connection."""
    answer = await exchange(running, *pieces)
    assert b"HTTP/1.1 431 Request Header Fields Too Large\r\n" in answer, answer[:200]
    assert b"connection: close" in answer


async def test_a_second_head_beyond_the_limit_is_431(running: Running) -> None:
    """A connection that was used before is no exception."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(GET + b"\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"}"), 10)).startswith(b"HTTP/1.1 200 OK")
    writer.write(GET + b"X: " + b"a" * 200_000)
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 431")
    writer.close()


async def test_a_head_within_the_limit_is_read(http: httpx.AsyncClient) -> None:
    """60 KiB of headers, twice on one connection."""
    for _ in range(2):
        assert (await http.get("/livez", headers={"X": "a" * 60_000})).status_code == 200


async def test_a_large_body_is_no_head(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """Bodies over 64 KiB are read, also the second one of a connection."""
    for _ in range(2):
        response = await http.post(
            "/v1/models/echo/infer",
            json={"inputs": {"x": "a" * 300_000}},
            headers={"Prefer": "respond-async"},
        )
        assert response.status_code == 202, response.text


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (GET, b"HTTP/1.1 408 Request Timeout\r\n"),
        (b"POST /v1/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", b""),
    ],
    ids=["nothing", "head", "body"],
)
async def test_a_request_that_never_arrives_is_cut(
    running: Running, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, sent: bytes, answered: bytes
) -> None:
    """The connection ends once the time is over, however little trickles in meanwhile."""
    monkeypatch.setattr(protocol, "ARRIVAL_S", 0.2)
    answer = await exchange(running, sent)
    assert answer.startswith(answered) and (answered or not answer), answer[:200]


INFER = b"POST /v1/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
JOB = INFER + b'Content-Length: 14\r\n\r\n{"inputs": {}}'
SECONDS = [
    GET + b"\r\n",
    GET,
    JOB,
    GET + b"X: " + b"a" * 200_000,
    INFER + b"Content-Length: 3000000\r\n\r\n" + b" " * 1_000_000,
    b"\0\1 no HTTP",
]
IDS = ["small", "half", "job", "large-head", "large-body", "garbage"]


@pytest.mark.parametrize("second", SECONDS, ids=IDS)
@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_request_that_comes_too_early_is_dropped(
    running: Running, agent: FakeAgent, store: Store, second: bytes, is_at_once: bool
) -> None:
    """The one before it is answered whole, and the answer says that the connection closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(JOB + second if is_at_once else JOB)
    await until("the job waits", lambda: running.gateway.lifecycle.waiting == 1)
    if not is_at_once:
        writer.write(second)
        await writer.drain()
    await until("the job is answered", agent.run_all)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b"}"), answer
    assert answer.count(b"HTTP/1.1") == 1 and b"connection: close" in answer
    assert len((await jobs.list_jobs(store)).data) == 1


@pytest.mark.parametrize("second", SECONDS, ids=IDS)
@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_client_that_sends_too_early_and_leaves_is_missed(
    running: Running, agent: FakeAgent, store: Store, second: bytes, is_at_once: bool
) -> None:
    """Its job is cancelled and its bytes are free, as if it had sent nothing more."""
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(JOB + second if is_at_once else JOB)
    await until("the job waits", lambda: running.gateway.lifecycle.waiting == 1)
    if not is_at_once:
        writer.write(second)
        await writer.drain()
    writer.transport.abort()

    async def is_cancelled() -> bool:
        return [view.state for view in (await jobs.list_jobs(store)).data] == ["cancelled"]

    await until("the job is cancelled", is_cancelled)
    assert not await inventory.leases(store)


async def test_a_client_that_leaves_after_a_large_body_is_missed(
    running: Running, agent: FakeAgent, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the high-water mark nothing more is read; once the body is taken, the client is heard again."""
    monkeypatch.setattr(httptools_impl, "HIGH_WATER_LIMIT", 8)
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(INFER + b"Content-Length: 14\r\n\r\n")
    await until("the request has begun", lambda: bool(running.server.server_state.tasks))
    writer.write(b'{"inputs": {}}')
    await until("the job waits", lambda: running.gateway.lifecycle.waiting == 1)
    writer.close()

    async def is_free() -> bool:
        return not await inventory.leases(store)

    await until("the lease of the client that left is released", is_free)


async def test_a_stream_that_began_cannot_say_that_it_closes(running: Running, agent: FakeAgent) -> None:
    """What is sent while it is open is dropped all the same, and its end is the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(JOB.replace(b"Host: x\r\n", b"Host: x\r\nAccept: text/event-stream\r\n"))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    await asyncio.wait_for(reader.readuntil(b"event: queued"), 10)
    writer.write(GET + b"\r\n")
    await writer.drain()
    await until("the job is answered", agent.run_all)
    events = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert head.startswith(b"HTTP/1.1 200 OK") and b"connection: close" not in head
    assert b"event: done" in events and b"HTTP/1.1" not in events


async def test_an_empty_line_after_a_body_is_no_request(running: Running, agent: FakeAgent) -> None:
    """Old clients send one; their connection goes on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    for _ in range(2):
        writer.write(JOB + b"\r\n")
        await until("the job waits", lambda: running.gateway.lifecycle.waiting == 1)
        await until("the job is answered", agent.run_all)
        answer = await asyncio.wait_for(reader.readuntil(b"false}"), 10)
        assert answer.startswith(b"HTTP/1.1 200 OK") and b"connection" not in answer
    writer.close()
