"""Health, metrics, the OpenAPI document and the table of errors."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request

from gateway import problems
from scheduler import inventory, jobs, silence
from scheduler.settings import Settings
from scheduler.silence import Silence
from scheduler.store import Store
from tests.conftest import TestServer
from tests.gateway.conftest import MIB, MODELS, Answerer, Running, run_gateway
from tests.invariants import check_pool
from tests.ledger.fake_agent import FakeAgent, hosted
from tests.waiting import until
from vramgate.errors import TABLE, StoreUnavailable, by_code


async def test_readiness_says_what_is_missing(http: httpx.AsyncClient, running: Running) -> None:
    """Alive at once;

    ready for a balancer without a card; ready for a request with one; draining is neither.
    """
    assert (await http.get("/livez")).status_code == 200
    assert (await http.get("/readyz?scope=gateway")).status_code == 200
    no_card = await http.get("/readyz")
    assert (no_card.status_code, no_card.json()["code"]) == (503, "no_ready_card")
    running.gateway.lifecycle.drain()
    for path in ("/readyz", "/readyz?scope=gateway"):
        draining = await http.get(path)
        assert (draining.status_code, draining.json()["code"]) == (503, "draining")
        assert int(draining.headers["retry-after"]) >= 1
    assert (await http.get("/livez")).headers["connection"] == "close"


async def test_a_ready_card_makes_the_service_ready(http: httpx.AsyncClient, answerer: Answerer) -> None:
    """Within a beat of the card's registration."""

    async def is_ready() -> bool:
        return (await http.get("/readyz")).status_code == 200

    await until("the service is ready", is_ready)


async def test_cards_without_a_model_make_no_service_ready(http: httpx.AsyncClient, store: Store) -> None:
    """A card that is up and can load none of its models serves nobody: not ready, with what it says of
    each.
    """
    broken = (hosted("one", ready=False), hosted("two", ready=False))
    agent = FakeAgent(store, models=broken, slots=0)
    await agent.register()

    async def reason() -> str | None:
        await agent.beat()
        answer = await http.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "no_ready_card")
        detail = str(answer.json()["detail"])
        return detail if "does not fit" in detail else None

    detail = await until("the reasons are said", reason)
    assert "one on GPU-a: does not fit" in detail and "two on GPU-a: does not fit" in detail
    agent.models, agent.slots = (hosted("one"), broken[1]), 4
    await agent.register()

    async def is_ready() -> bool:
        await agent.beat()
        return (await http.get("/readyz")).status_code == 200

    await until("one model is enough", is_ready)


async def test_metrics_show_the_gateway_and_the_pool(http: httpx.AsyncClient, answerer: Answerer) -> None:
    """Counts of this gateway, gauges of every card, and no label that grows with the jobs."""
    answer = await http.post("/v1/models/echo/infer", json={"inputs": {}})
    await http.post("/v1/models/unheard-of/infer", json={"inputs": {}})
    text = (await http.get("/metrics")).text
    assert re.search(r'^vramgate_requests_total\{route="infer",status="200"\} \d', text, re.M)
    assert re.search(r'^vramgate_request_refused_total\{code="unknown_model"\} \d', text, re.M)
    assert re.search(r'^vramgate_card_bytes\{card="GPU-a",part="grantable"\} \d', text, re.M)
    assert re.search(r'^vramgate_inferences_total\{model="echo",outcome="answered"\} \d', text, re.M)
    assert "vramgate_store_up 1.0" in text and 'vramgate_pool_events_total{event="submitted"}' in text
    assert answer.json()["id"] not in text and "unheard-of" not in text


def test_every_code_has_its_answer() -> None:
    """The handler's status, type and Retry-After follow the table for each code."""
    request = Request({"type": "http", "method": "GET", "path": "/x", "headers": [], "query_string": b""})
    for code, row in TABLE.items():
        response = problems.respond(request, by_code(code)("said", job_id="0" * 32))
        assert response.status_code == row.status
        assert f'"type":"urn:vramgate:{code}"'.encode() in response.body
        assert ("retry-after" in response.headers) == (row.retry == "after")
        assert response.headers["x-job-id"] == "0" * 32


async def test_listeners_do_not_hold_up_the_end(
    http: httpx.AsyncClient, agent: FakeAgent, running: Running
) -> None:
    """A worker that stops accepting ends their streams without a last word; they resume elsewhere."""
    accepted = await http.post(
        "/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"}
    )
    path = accepted.headers["location"]
    async with http.stream("GET", f"{path}/events", headers={"Accept": "text/event-stream"}) as stream:
        polling = asyncio.create_task(http.get(f"{path}?wait_s=60"))
        lines = stream.aiter_lines()
        assert await anext(lines) == "event: queued"
        running.gateway.lifecycle.send_listeners_away()
        rest = [line async for line in lines]
    assert not any(line.startswith(("event: done", "event: error")) for line in rest)
    assert (await polling).json()["state"] == "leased"


async def test_without_a_server_requests_are_503_until_there_is_one(
    own_server: TestServer, settings: Settings
) -> None:
    """A gateway starts without Redis, says so, and serves as soon as it is there."""
    own_server.kill()
    lonely = settings.model_copy(update={"redis_url": own_server.url})
    async with run_gateway(lonely) as started, httpx.AsyncClient(base_url=started.url, timeout=20) as http:
        assert (await http.get("/livez")).status_code == 200
        assert (await http.get("/readyz?scope=gateway")).status_code == 200
        ready = await http.get("/readyz")
        infer = await http.post("/v1/models/echo/infer", json={"inputs": {}})
        for response in (ready, infer, await http.get("/v1/cards")):
            assert (response.status_code, response.json()["code"]) == (503, "store_unavailable")
            assert int(response.headers["retry-after"]) >= 1
        assert "vramgate_store_up 0.0" in (await http.get("/metrics")).text
        own_server.start()

        async def answers() -> bool:
            return (await http.get("/v1/cards")).status_code == 200

        await until("the gateway has found the server", answers)

        async def knows_of_no_card() -> bool:
            return bool((await http.get("/readyz")).json()["code"] == "no_ready_card")

        await until("its beat came through", knows_of_no_card)


async def test_a_silence_that_lasts_is_said_again_and_its_end_once(
    own_server: TestServer,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that whoever looks at the end of the log sees that Redis is away, and since when."""
    monkeypatch.setattr(silence, "REMIND_S", 0.2)
    caplog.set_level(logging.INFO, "gateway")
    own_server.kill()

    def said(event: str) -> list[dict[str, object]]:
        found = [record for record in caplog.records if record.getMessage() == event]
        return [record.__dict__["vramgate_fields"] for record in found]

    async with run_gateway(settings.model_copy(update={"redis_url": own_server.url})):
        await until("it is said again", lambda: len(said("store_unavailable")) >= 3)
        own_server.start()
        await until("it is said that the server answers", lambda: bool(said("store_answers")))
    assert said("store_unavailable")[0]["silent_s"] == 0
    assert [fields["silent_s"] != 0 for fields in said("store_answers")] == [True]


def test_a_silence_is_said_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its beginning, after each REMIND_S that it lasts, and at its end with its length."""
    seconds = iter([*range(1000, 1100), 1100.0, 1101.0])
    monkeypatch.setattr(silence, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    server = Silence()
    assert server.ended() is None
    said = [server.lasts() for _ in range(100)]
    assert [silent_s for silent_s in said if silent_s is not None] == [0, 30, 60, 90]
    assert (server.ended(), server.ended(), server.lasts()) == (100, None, 0)


async def test_a_server_that_freezes_is_503_and_back(own_server: TestServer, settings: Settings) -> None:
    """While it is frozen callers are told so within the command timeout; afterwards all is as before."""
    frozen = settings.model_copy(
        update={
            "redis_url": own_server.url,
            "redis": settings.redis.model_copy(update={"command_timeout_s": 0.3, "connect_timeout_s": 0.3}),
        }
    )
    async with run_gateway(frozen) as started, httpx.AsyncClient(base_url=started.url, timeout=20) as http:
        assert (await http.get("/v1/cards")).status_code == 200
        own_server.signal(signal.SIGSTOP)
        try:
            told = await http.get("/v1/cards")
            assert (told.status_code, told.json()["code"]) == (503, "store_unavailable")
            assert "\n" not in told.json()["detail"]
        finally:
            own_server.signal(signal.SIGCONT)

        async def answers() -> bool:
            return (await http.get("/v1/cards")).status_code == 200

        await until("the gateway speaks to the server again", answers)


async def test_a_silent_job_does_not_lose_its_caller(
    http: httpx.AsyncClient, agent: FakeAgent, running: Running
) -> None:
    """Those who wait when a worker ends are told `draining` with the job's id, and the job lives on."""
    waiting = asyncio.create_task(
        http.post("/v1/models/echo/infer", json={"inputs": {}}, headers={"Idempotency-Key": "k"})
    )
    await until("the request waits", lambda: running.gateway.lifecycle.waiting == 1)
    running.gateway.lifecycle.close()
    told = await waiting
    assert (told.status_code, told.json()["code"]) == (503, "draining")
    assert told.headers["x-job-id"] and int(told.headers["retry-after"]) >= 1
    async with (
        run_gateway(running.gateway.settings) as other,
        httpx.AsyncClient(base_url=other.url) as client,
    ):
        retry = asyncio.create_task(
            client.post("/v1/models/echo/infer", json={"inputs": {}}, headers={"Idempotency-Key": "k"})
        )
        await until("the retry waits at another gateway", lambda: other.gateway.lifecycle.waiting == 1)
        assert await agent.run_all() == 1
        assert (await retry).json()["id"] == told.headers["x-job-id"]


async def test_who_waits_outlives_a_server_that_is_killed(own_server: TestServer, settings: Settings) -> None:
    """kill -9 of the server while a caller waits, and its return: the caller gets the answer."""
    elsewhere = settings.model_copy(update={"redis_url": own_server.url})
    store = await Store.connect(elsewhere)
    agent = FakeAgent(store, total=1024 * MIB, models=MODELS)
    await agent.register()
    async with run_gateway(elsewhere) as started, httpx.AsyncClient(base_url=started.url, timeout=30) as http:
        waiting = asyncio.create_task(http.post("/v1/models/echo/infer", json={"inputs": {}}))
        await until("the request waits", lambda: started.gateway.lifecycle.waiting == 1)
        # everysec: what was written in the last second may be lost with the server.
        await store.redis.config_set("appendfsync", "always")
        await store.redis.set("flushed", "1", px=1000)
        own_server.kill()
        with pytest.raises(StoreUnavailable):
            await inventory.cards(store)
        assert not waiting.done()
        own_server.start()

        async def is_back() -> bool:
            try:
                await agent.beat()
            except StoreUnavailable:
                return False
            return True

        await until("the agent speaks to the server again", is_back)
        assert await agent.run_all() == 1
        answer = await waiting
        assert (answer.status_code, answer.json()["outputs"]) == (200, "ok"), answer.text
    await check_pool(store)
    await store.close()


async def test_a_submit_of_unknown_outcome_leaves_no_job(own_server: TestServer, settings: Settings) -> None:
    """A frozen server runs the submit when it wakes; the gateway has given it up by then."""
    frozen = settings.model_copy(
        update={
            "redis_url": own_server.url,
            "redis": settings.redis.model_copy(update={"command_timeout_s": 0.3, "connect_timeout_s": 0.3}),
        }
    )
    store = await Store.connect(frozen)
    agent = FakeAgent(store, total=1024 * MIB, models=MODELS)
    await agent.register()
    async with run_gateway(frozen) as started, httpx.AsyncClient(base_url=started.url, timeout=30) as http:
        own_server.signal(signal.SIGSTOP)
        try:
            told = await http.post("/v1/models/echo/infer", json={"inputs": {}})
        finally:
            own_server.signal(signal.SIGCONT)
        assert (told.status_code, told.json()["code"]) == (503, "store_unavailable")

        async def is_settled() -> bool:
            try:
                page = await jobs.list_jobs(store)
                tombs = [name async for name in store.redis.scan_iter(match="*:tomb:*")]
            except StoreUnavailable:
                return False
            return bool(page.data or tombs) and all(view.state == "cancelled" for view in page.data)

        await until("the job was cancelled, or its submit is refused when it comes", is_settled)
    await check_pool(store)
    await store.close()
