"""The routes of jobs, of the pool's collections, and of operators."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from scheduler.handover import HandedJob, Report
from scheduler.store import Store
from tests.gateway.conftest import Answerer, Running
from tests.ledger.fake_agent import FakeAgent, failed
from tests.waiting import until

LATER = {"Prefer": "respond-async"}


async def submit(http: httpx.AsyncClient, **options: Any) -> dict[str, Any]:
    response = await http.post(
        "/v1/models/echo/infer", json={"inputs": {}, "options": options}, headers=LATER
    )
    assert response.status_code == 202, response.text
    job: dict[str, Any] = response.json()
    return job


async def test_a_job_is_shown_in_any_state(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """200 while it waits, with its place; and after it failed, with the problem as `error`."""
    jobs = [await submit(http) for _ in range(10)]
    # A reading that grows old is a reason of its own.
    await agent.beat()
    last = await http.get(f"/v1/jobs/{jobs[-1]['id']}")
    assert (last.status_code, last.json()["state"]) == (200, "queued")
    assert last.json()["position"] == 2 and last.headers["x-queue-position"] == "2"
    assert last.json()["why"] == "behind"
    first = (await agent.claim(1))[0]
    agent.start(first)
    await agent.finish(failed(first))
    shown = (await http.get(f"/v1/jobs/{first.job_id}")).json()
    assert shown["state"] == "failed" and shown["error"]["code"] == "model_error"
    assert shown["error"]["instance"] == f"/v1/jobs/{first.job_id}"


async def test_a_job_is_waited_for(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """With wait_s the answer comes when the job is settled, not before and not much later."""
    job = await submit(http)
    short = await http.get(f"/v1/jobs/{job['id']}?wait_s=0.05")
    assert short.json()["state"] == "leased"
    waiting = asyncio.create_task(http.get(f"/v1/jobs/{job['id']}?wait_s=15"))
    await asyncio.sleep(0)
    await agent.run_all()
    assert (await waiting).json()["result"] == "ok"


async def test_a_cancelled_job_ends_for_all_its_callers(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """DELETE is 202 with the job, also the second time; who waits for it is told 409 cancelled."""
    waiting = asyncio.create_task(http.post("/v1/models/echo/infer", json={"inputs": {}}))

    async def is_there() -> bool:
        return bool((await http.get("/v1/jobs")).json()["data"])

    await until("the job is stored", is_there)
    job_id = (await http.get("/v1/jobs")).json()["data"][0]["id"]
    for _ in range(2):
        deleted = await http.delete(f"/v1/jobs/{job_id}")
        assert (deleted.status_code, deleted.json()["state"]) == (202, "cancelled")
    told = await waiting
    assert (told.status_code, told.json()["code"]) == (409, "cancelled")
    assert told.json()["instance"] == f"/v1/jobs/{job_id}"


async def test_operating_routes_answer_local_callers_only(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """A forwarding header means that the caller is somewhere else: 403 for force and for a card's state."""
    job = await submit(http)
    for name in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"):
        behind = {name: "for=127.0.0.1"}
        force = await http.delete(f"/v1/jobs/{job['id']}?force=true", headers=behind)
        state = await http.patch("/v1/cards/GPU-a", json={"state": "cordoned"}, headers=behind)
        assert {(r.status_code, r.json()["code"]) for r in (force, state)} == {(403, "forbidden")}
    plain = await http.delete(f"/v1/jobs/{job['id']}", headers={"X-Forwarded-For": "10.0.0.1"})
    assert plain.status_code == 202


async def test_jobs_come_in_pages_newest_first(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """`next` leads through all of them, and filters apply."""
    ids = [(await submit(http))["id"] for _ in range(5)]
    seen: list[str] = []
    cursor = ""
    while True:
        page = (await http.get(f"/v1/jobs?limit=2{cursor}")).json()
        assert page["object"] == "list" and len(page["data"]) <= 2
        seen += [job["id"] for job in page["data"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert sorted(seen) == sorted(ids)
    assert (await http.get("/v1/jobs?state=succeeded")).json()["data"] == []
    assert len((await http.get("/v1/jobs?state=leased&model=echo")).json()["data"]) == 5


async def test_the_pool_is_shown(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """Models, cards, leases and the queue are lists of objects that name their kind."""
    for _ in range(9):
        await submit(http)
    await agent.beat()
    models = (await http.get("/v1/models")).json()
    assert {model["id"] for model in models["data"]} == {"echo", "pictures", "files", "squares"}
    one = (await http.get("/v1/models/squares")).json()
    assert (one["id"], one["object"], one["owned_by"]) == ("squares", "model", "vramgate")
    assert one["versions"][0]["estimate"] == {
        "resident_bytes": 0,
        "bytes_per_item": 2**20,
        "bytes_per_unit": 10.0,
    }
    card = (await http.get("/v1/cards")).json()["data"][0]
    ledger = card["ledger"]
    assert card["id"] == "GPU-a" and card["state"] == "ready"
    assert ledger["usable"] == sum(value for name, value in ledger.items() if name != "usable")
    leases = (await http.get("/v1/leases")).json()["data"]
    assert len(leases) == 8 and sum(lease["bytes"] for lease in leases) == ledger["jobs"]
    assert not any("token" in lease for lease in leases)
    queue = (await http.get("/v1/queue")).json()["data"]
    assert [(row["model"], row["waiting"]) for row in queue] == [("echo", 1)]


async def test_a_cordoned_card_gets_nothing_new(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """PATCH answers with the card; the reason is shown; ready again, it grants again."""
    patched = await http.patch("/v1/cards/GPU-a", json={"state": "cordoned", "reason": "fan is loud"})
    assert patched.status_code == 200, patched.text
    assert (patched.json()["state"], patched.json()["reason"]) == ("cordoned", "fan is loud")
    assert (await submit(http))["state"] == "queued"
    assert (await http.patch("/v1/cards/GPU-a", json={"state": "ready"})).json()["state"] == "ready"
    await agent.beat()
    assert await agent.run_all() == 1


async def test_a_result_outlives_its_gateway(
    http: httpx.AsyncClient, running: Running, agent: FakeAgent, store: Store
) -> None:
    """A job submitted async is answered by another worker after this one left."""
    from tests.gateway.conftest import run_gateway

    job = await submit(http)
    running.gateway.lifecycle.drain()
    await running.gateway.ledger.close()
    await agent.run_all()
    async with run_gateway(store.settings) as other, httpx.AsyncClient(base_url=other.url) as client:
        assert (await client.get(f"/v1/jobs/{job['id']}")).json()["result"] == "ok"


async def test_forced_cancel_reaches_the_agent(http: httpx.AsyncClient, answerer: Answerer) -> None:
    """?force=true from this host: the running job is settled at once and its card is told to end it."""
    hold = asyncio.Event()

    async def never(job: HandedJob) -> Report:
        await hold.wait()
        raise AssertionError("not reached")

    answerer.handler = never
    job = await submit(http)
    await until("the job runs", lambda: bool(answerer.seen))
    deleted = await http.delete(f"/v1/jobs/{job['id']}?force=true")
    assert (deleted.status_code, deleted.json()["state"]) == (202, "cancelled")
    await until("the agent was told", lambda: answerer.cancelled == [job["id"]])


async def test_what_has_two_forms_says_that_accept_decides(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """A cache between us and callers keeps them apart; what is JSON in any case says nothing."""
    accepted = await http.post(
        "/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"}
    )
    job = accepted.headers["location"]
    for path in (job, "/v1/jobs", "/v1/models", "/v1/models/echo", "/v1/cards", "/v1/leases", "/v1/queue"):
        assert (await http.get(path)).headers["vary"] == "Accept", path
    assert (await http.delete(job)).headers["vary"] == "Accept"
    assert "vary" not in (await http.get("/livez")).headers
