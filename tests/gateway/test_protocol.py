"""A request's head has a size and its arrival an end, whoever sends it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gateway import protocol
from tests.gateway.conftest import Running
from tests.ledger.fake_agent import FakeAgent

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
        [GET + b"\r\n" + GET + b"X: " + b"a" * 200_000],
    ],
    ids=["one-open-header", "many-headers", "complete", "open-target", "target", "second-on-a-connection"],
)
async def test_a_head_beyond_the_limit_is_431(running: Running, pieces: list[bytes]) -> None:
    """A short answer in plain text, then the end of the connection."""
    answer = await exchange(running, *pieces)
    assert b"HTTP/1.1 431 Request Header Fields Too Large\r\n" in answer, answer[:200]
    assert b"connection: close" in answer


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


async def test_a_long_answer_is_not_cut(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a request that waits behind one that is being answered does not end that answer."""
    monkeypatch.setattr(protocol, "ARRIVAL_S", 0.1)
    gateway = running.gateway

    async def slow() -> list[object]:
        await asyncio.sleep(0.5)
        return []

    monkeypatch.setattr(gateway.ledger, "models", slow)
    answer = await exchange(running, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
    assert answer.startswith(b"HTTP/1.1 200 OK"), answer[:200]
