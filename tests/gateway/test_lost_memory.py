"""A ledger that has lost its memory is no reason to tell a caller that there is no such model."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from gateway import catalogue
from scheduler.settings import Settings
from scheduler.store import Store
from scheduler.submissions import SubmitRequest, Submitted
from tests.conftest import TestServer
from tests.gateway.conftest import MIB, Running, hosted, run_gateway
from tests.ledger.fake_agent import FakeAgent
from tests.waiting import until


@pytest.fixture
async def forgetful(own_server: TestServer, settings: Settings) -> AsyncIterator[Store]:
    store = await Store.connect(settings.model_copy(update={"redis_url": own_server.url}))
    yield store
    await store.close()


@pytest.fixture
async def worker(forgetful: Store) -> AsyncIterator[Running]:
    async with run_gateway(forgetful.settings) as started:
        yield started


@pytest.fixture
async def caller(worker: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=worker.url, timeout=20) as client:
        yield client


def agent_of(store: Store, model: str) -> FakeAgent:
    return FakeAgent(store, f"GPU-{model}", total=1024 * MIB, models=(hosted(model, None, "1"),))


async def infer(caller: httpx.AsyncClient, model: str) -> tuple[int, str]:
    """Status and code; whoever is told to come back is told when."""
    response = await caller.post(
        f"/v1/models/{model}/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"}
    )
    assert response.status_code != 503 or int(response.headers["retry-after"]) >= 1
    return response.status_code, response.json().get("code", "")


async def is_noticed(caller: httpx.AsyncClient, worker: Running) -> None:
    """Wait until this worker has seen the empty ledger by itself."""
    await until("the worker has looked again", lambda: not worker.gateway.catalogue._views)


ACCEPTED, LOST, UNKNOWN = (202, ""), (503, "no_ready_card"), (404, "unknown_model")


async def test_a_model_that_the_ledger_has_lost_is_awaited(
    caller: httpx.AsyncClient, worker: Running, forgetful: Store
) -> None:
    """503 with Retry-After from the first call after FLUSHALL until its agent is back, also while other
    models are there already; 404 for a model that nobody knows.
    """
    first, second = agent_of(forgetful, "first"), agent_of(forgetful, "second")
    await first.register()
    await second.register()
    assert [await infer(caller, name) for name in ("first", "second@v1")] == [ACCEPTED] * 2
    assert await infer(caller, "nobody") == UNKNOWN
    await forgetful.redis.flushall()
    assert await infer(caller, "first") == await infer(caller, "second@v1") == LOST
    assert (await caller.get("/v1/models/first")).json()["code"] == "no_ready_card"
    await is_noticed(caller, worker)
    assert await infer(caller, "first") == await infer(caller, "second@v1") == LOST
    first.renew()
    await first.register()
    assert await infer(caller, "first") == ACCEPTED
    assert await infer(caller, "second") == await infer(caller, "second@v1") == LOST
    assert (await caller.get("/v1/models/second")).json()["code"] == "no_ready_card"
    assert await infer(caller, "nobody") == await infer(caller, "first@v9") == UNKNOWN
    second.renew()
    await second.register()
    assert await infer(caller, "second@v1") == ACCEPTED


async def test_a_pool_without_models_has_no_ready_card(caller: httpx.AsyncClient, forgetful: Store) -> None:
    """Whether its agents are still to come or the ledger has forgotten them, this worker cannot say."""
    assert await infer(caller, "nobody") == LOST
    assert (await caller.get("/v1/models/nobody")).json()["code"] == "no_ready_card"
    await agent_of(forgetful, "first").register()
    assert await infer(caller, "nobody") == UNKNOWN


async def test_a_model_that_does_not_come_back_is_unknown(
    caller: httpx.AsyncClient, worker: Running, forgetful: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while."""
    first, second = agent_of(forgetful, "first"), agent_of(forgetful, "second")
    await first.register()
    await second.register()
    assert await infer(caller, "second") == ACCEPTED
    await forgetful.redis.flushall()
    first.renew()
    await first.register()
    assert await infer(caller, "second") == LOST
    monkeypatch.setattr(catalogue, "LATELY_S", 0.0)
    assert await infer(caller, "second") == UNKNOWN


async def test_a_job_that_is_lost_as_it_is_accepted_is_503(
    caller: httpx.AsyncClient, worker: Running, forgetful: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for a run knows of no job: that the ledger forgot it at once is not their 404."""
    await agent_of(forgetful, "first").register()
    submit = worker.gateway.ledger.submit

    async def then_flush(request: SubmitRequest) -> Submitted:
        submitted = await submit(request)
        await forgetful.redis.flushall()
        return submitted

    monkeypatch.setattr(worker.gateway.ledger, "submit", then_flush)
    assert await infer(caller, "first") == (503, "lost")
