"""The short way of our own server to a route answers as the application does."""

from __future__ import annotations

import re

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway import metrics
from gateway.app import create_app, short_way
from scheduler.settings import Settings

REQUESTS = [
    ("GET", "/livez"),
    ("HEAD", "/livez"),
    ("GET", "/readyz"),
    ("GET", "/livez?x=1"),
    ("POST", "/v1/models/echo/infer"),
    ("GET", "/v1/models/echo/infer"),
    ("GET", "/v1/jobs/"),
    ("DELETE", "/v1/jobs/no%20id"),
    ("PATCH", "/v1/cards/GPU-a"),
    ("DELETE", "/v1/models"),
    ("GET", "/v1/jobs/1/2"),
    ("GET", "/nowhere"),
    ("GET", "/openapi.json"),
]


@pytest.mark.parametrize(("method", "target"), REQUESTS)
async def test_both_ways_answer_alike(settings: Settings, method: str, target: str) -> None:
    """Answers, refusals, wrong methods and paths that nobody has: status, headers and body."""
    app = create_app(settings)
    answers = []
    for way in (app, short_way(app)):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(way), base_url="http://here") as http:
            answers.append(await http.request(method, target, headers={"X-Request-Id": "r1"}))
    first, second = answers
    assert first.status_code == second.status_code
    assert first.headers == second.headers
    assert first.content == second.content


async def test_below_another_application_the_path_is_its_own(settings: Settings) -> None:
    """A root path is taken off before a route is looked for."""
    app = short_way(create_app(settings))
    transport = httpx.ASGITransport(app, root_path="/gate")
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        assert (await http.get("/gate/livez")).status_code == 200


async def test_an_answer_that_breaks_off_is_counted(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `internal`; the server is told, so that it cuts the connection."""

    class Broken(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise ValueError("no more")

    monkeypatch.setattr("gateway.health.rendering.render", lambda _: Broken())
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    def faults() -> float:
        found = re.search(
            rb'^vramgate_request_refused_total{code="internal"} (\S+)',
            metrics.exposition(metrics.PoolCollector(None)),
            re.M,
        )
        return float(found[1]) if found else 0.0

    before = faults()
    scope: Scope = {
        "type": "http",
        "method": "GET",
        "path": "/livez",
        "query_string": b"",
        "headers": [],
        "client": None,
        "server": ("here", 80),
        "scheme": "http",
    }
    with pytest.raises(ValueError, match="no more"):
        await short_way(create_app(settings))(scope, receive, send)
    assert faults() == before + 1
    assert [message["type"] for message in sent] == ["http.response.start"]
