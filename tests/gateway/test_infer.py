"""POST infer: answers, keys, preferences, forms."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

import httpx
import msgpack
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.protocol import BoundedProtocol
from scheduler import inventory, jobs
from scheduler.estimates import lease_bytes
from scheduler.handover import HandedJob, Report
from scheduler.settings import Settings
from scheduler.store import Store
from scheduler.submissions import SubmitRequest, Submitted
from tests.gateway.conftest import SQUARE, Answerer, Gate, Running, hosted, run_gateway
from tests.ledger.fake_agent import FakeAgent, failed, ok
from tests.ledger.fake_agent import hosted as ledger_hosted
from tests.waiting import until
from vramgate import AsyncClient
from vramgate.errors import InputError, InvalidInput

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x02\x00\x00\x00\x03\x08\x02\x00\x00\x00" + b"\0" * 64


async def inputs_of(store: Store, job: HandedJob) -> object:
    packed = job.inputs if job.inputs is not None else await jobs.payload(store, job.job_id)
    assert packed is not None
    return msgpack.unpackb(packed)


async def test_an_answer_is_the_contract_s_200(http: httpx.AsyncClient, answerer: Answerer) -> None:
    """The body has the members of the contract, and the header names the job."""
    response = await http.post("/v1/models/echo/infer", json={"inputs": {"x": 1}})
    assert response.status_code == 200, response.text
    body = response.json()
    assert body.keys() == {"id", "model", "version", "outputs", "card", "timing", "vram", "degraded"}
    assert (body["model"], body["version"], body["outputs"], body["card"]) == ("echo", "v1", "ok", "GPU-a")
    assert response.headers["x-job-id"] == body["id"] == answerer.seen[0].job_id
    assert response.headers["vary"] == "Accept, Prefer"
    assert body["vram"]["leased_bytes"] == 2**20 + 10


async def test_one_key_sent_fifty_times_at_once_runs_once(
    http: httpx.AsyncClient, answerer: Answerer
) -> None:
    """All fifty get the same answer of the same job; a later one gets it replayed, and says so."""
    headers = {"Idempotency-Key": "once"}
    calls = [
        http.post("/v1/models/echo/infer", json={"inputs": {"x": 1}}, headers=headers) for _ in range(50)
    ]
    answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert len(answerer.seen) == 1
    quoted = await http.post(
        "/v1/models/echo/infer", json={"inputs": {"x": 1}}, headers={"Idempotency-Key": '"once"'}
    )
    assert quoted.headers["idempotency-replayed"] == "true"
    assert quoted.content == answers[0].content and len(answerer.seen) == 1


async def test_a_key_with_other_inputs_is_refused(http: httpx.AsyncClient, answerer: Answerer) -> None:
    """422 key_reused; the order of members and the options are no part of the inputs."""
    headers = {"Idempotency-Key": "k"}
    first = await http.post("/v1/models/echo/infer", json={"inputs": {"a": 1, "b": 2}}, headers=headers)
    same = await http.post(
        "/v1/models/echo/infer",
        json={"options": {"priority": 9}, "inputs": {"b": 2, "a": 1}},
        headers=headers,
    )
    other = await http.post("/v1/models/echo/infer", json={"inputs": {"a": 1, "b": 3}}, headers=headers)
    assert first.json() == same.json()
    assert (other.status_code, other.json()["code"]) == (422, "key_reused")


async def test_bytes_are_the_same_inputs_in_every_encoding(
    http: httpx.AsyncClient, answerer: Answerer, store: Store
) -> None:
    """base64 in JSON, bin in msgpack, a part of a form and the raw body are one input under one key."""
    url, headers = "/v1/models/files/infer", {"Idempotency-Key": "forms"}
    raw = await http.post(url, content=PNG, headers=headers | {"Content-Type": "image/png"})
    assert raw.status_code == 200, raw.text
    encoded = await http.post(
        url, json={"inputs": {"image": base64.b64encode(PNG).decode()}}, headers=headers
    )
    packed = await http.post(
        url,
        content=msgpack.packb({"inputs": {"image": PNG}}),
        headers=headers | {"Content-Type": "application/msgpack"},
    )
    form = await http.post(url, files={"image": ("a.png", PNG, "image/png")}, headers=headers)
    for response in (encoded, packed, form):
        assert response.headers.get("idempotency-replayed") == "true", response.text
    assert len(answerer.seen) == 1
    assert await inputs_of(store, answerer.seen[0]) == {"image": PNG}


async def test_units_and_estimate_come_from_the_published_model(
    http: httpx.AsyncClient, answerer: Answerer
) -> None:
    """lease = c0_item + c1 x units; `vram` raises it and does not lower it; defaults count."""
    await http.post("/v1/models/squares/infer", json={"inputs": {"height": 20, "width": 30}})
    await http.post(
        "/v1/models/squares/infer",
        json={"inputs": {"height": 20, "width": 30}, "options": {"vram": "3MiB"}},
    )
    await http.post(
        "/v1/models/squares/infer", json={"inputs": {"height": 20, "width": 30}, "options": {"vram": 1}}
    )
    sizes = [(job.units, job.lease_bytes) for job in answerer.seen]
    assert sizes == [(600.0, 2**20 + 6000), (600.0, 3 * 2**20), (600.0, 2**20 + 6000)]


async def test_callers_are_held_to_what_is_published_now(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """One card alone changes what its version means, also where only the meaning of units in a batch does."""
    words = replace(hosted("echo", None, "len(text)"), c0_item=0)

    async def lease_bytes() -> int:
        answer = await http.post(
            "/v1/models/echo/infer", json={"inputs": {"text": "x" * 100}}, headers={"Prefer": "respond-async"}
        )
        return int(answer.json()["vram"]["leased_bytes"])

    async def is_leased(nbytes: int) -> bool:
        return await lease_bytes() == nbytes

    await agent.beat(models=(words,))
    await until("100 units are counted as 100", lambda: is_leased(1000))
    await agent.beat(models=(replace(words, batch_units="max_times_n"),))
    await until("100 units are counted as the end of their bucket", lambda: is_leased(1077))


async def test_options_reach_the_ledger(http: httpx.AsyncClient, answerer: Answerer, store: Store) -> None:
    """From the body as well as from the query of a raw body."""
    await http.post(
        "/v1/models/files/infer?priority=7&run_timeout_s=1.5",
        content=PNG,
        headers={"Content-Type": "application/octet-stream"},
    )
    await http.post(
        "/v1/models/echo/infer", json={"inputs": {}, "options": {"priority": 8, "run_timeout_s": 2}}
    )
    views = [await jobs.view(store, job.job_id) for job in answerer.seen]
    assert [view.priority for view in views] == [7, 8]
    assert [job.run_timeout_ms for job in answerer.seen] == [1500, 2000]


async def test_msgpack_in_and_out(http: httpx.AsyncClient, answerer: Answerer, store: Store) -> None:
    """Arrays come as {dtype, shape, data}, answers go out with bytes as bin, where Accept says so."""

    async def give_bytes(job: HandedJob) -> Report:
        return ok(job, msgpack.packb({"mask": b"\x00\xff"}))

    answerer.handler = give_bytes
    grid = {"dtype": "float32", "shape": [2, 2], "data": b"\0\0\x80?" * 4}
    response = await http.post(
        "/v1/models/squares/infer",
        content=msgpack.packb({"inputs": {"height": 2, "width": 2, "grid": grid}}),
        headers={"Content-Type": "application/msgpack", "Accept": "application/msgpack"},
    )
    assert response.headers["content-type"] == "application/msgpack"
    assert msgpack.unpackb(response.content)["outputs"] == {"mask": b"\x00\xff"}
    assert await inputs_of(store, answerer.seen[0]) == {
        "height": 2,
        "width": 2,
        "grid": [[1.0, 1.0], [1.0, 1.0]],
    }
    plain = await http.post("/v1/models/squares/infer", json={"inputs": {"height": 2, "width": 2}})
    assert plain.json()["outputs"] == {"mask": "AP8="}


async def test_respond_async(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """202 with the job, where to find it, and what was applied; the job lives on without its client."""
    response = await http.post(
        "/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"}
    )
    assert response.status_code == 202
    job = response.json()
    assert (job["object"], job["state"], job["model"]) == ("job", "leased", "echo")
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    assert response.headers["preference-applied"] == "respond-async"
    assert response.headers["vary"] == "Accept, Prefer" and response.headers["x-queue-position"] == "0"
    assert await agent.run_all() == 1
    done = await http.get(response.headers["location"])
    assert done.json()["state"] == "succeeded" and done.json()["result"] == "ok"


async def test_respond_async_waits_as_long_as_asked(http: httpx.AsyncClient, answerer: Answerer) -> None:
    """`respond-async, wait=10`: 200 where the job is done within the wait."""
    response = await http.post(
        "/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async, wait=10"}
    )
    assert response.status_code == 200
    assert response.headers["preference-applied"] == "respond-async, wait=10"


@pytest.mark.parametrize(
    ("code", "status"),
    [("model_error", 500), ("rejected_by_model", 422), ("non_finite", 500), ("output_too_large", 500)],
)
async def test_a_failed_run_is_a_problem(
    http: httpx.AsyncClient, answerer: Answerer, code: str, status: int
) -> None:
    """The problem names the job, and the same key gets the same problem without another run."""

    async def fail(job: HandedJob) -> Report:
        return failed(job, code)

    answerer.handler = fail
    headers = {"Idempotency-Key": "bad"}
    for _ in range(2):
        response = await http.post("/v1/models/echo/infer", json={"inputs": {}}, headers=headers)
        problem = response.json()
        assert (response.status_code, problem["code"], problem["detail"]) == (status, code, "it said no")
        assert response.headers["content-type"] == "application/problem+json"
        assert (
            problem["type"] == f"urn:vramgate:{code}"
            and problem["instance"] == f"/v1/jobs/{answerer.seen[0].job_id}"
        )
        assert response.headers["x-job-id"] == answerer.seen[0].job_id
    assert len(answerer.seen) == 1


async def test_a_refusal_by_the_model_names_the_field(
    http: httpx.AsyncClient, running: Running, answerer: Answerer
) -> None:
    """In the answer, in the job, and in what the client raises."""

    async def refuse(job: HandedJob) -> Report:
        return replace(failed(job, "rejected_by_model"), field="weights")

    answerer.handler = refuse
    answer = await http.post("/v1/models/echo/infer", json={"inputs": {}})
    assert (answer.status_code, answer.json()["field"]) == (422, "weights")
    job = (await http.get(answer.json()["instance"])).json()
    assert job["error"]["field"] == "weights"
    listed = (await http.get("/v1/jobs")).json()["data"]
    assert listed[0]["error"]["field"] == "weights"
    async with AsyncClient(running.url) as client:
        with pytest.raises(InputError) as caught:
            await client.infer("echo", {})
    assert caught.value.field == "weights"


async def test_a_job_that_is_done_when_it_is_accepted_has_its_result(
    http: httpx.AsyncClient, running: Running, answerer: Answerer, store: Store
) -> None:
    """A quick run may end before the 202 is written; that has the result then, as any look at the job."""
    submit = running.gateway.ledger.submit

    async def submit_and_wait(request: SubmitRequest) -> Submitted:
        submitted = await submit(request)

        async def is_settled() -> bool:
            return (await jobs.view(store, submitted.job_id)).state == "succeeded"

        await until("the job is settled", is_settled)
        return submitted

    running.gateway.ledger.submit = submit_and_wait  # type: ignore[method-assign]
    accepted = await http.post(
        "/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"}
    )
    assert (accepted.status_code, accepted.json()["state"]) == (202, "succeeded")
    assert accepted.json()["result"] == "ok"
    assert accepted.headers["location"] == f"/v1/jobs/{accepted.json()['id']}"


async def test_a_wait_over_its_limit_is_503_with_retry_after(
    http: httpx.AsyncClient, agent: FakeAgent
) -> None:
    """Nobody claims the job: wait_timeout, and a whole number of seconds to come back after."""
    await agent.beat()
    first = await http.post("/v1/models/echo/infer", json={"inputs": {}, "options": {"max_wait_s": 0.3}})
    assert (first.status_code, first.json()["code"]) == (503, "wait_timeout"), first.text
    assert int(first.headers["retry-after"]) >= 1


async def fill(http: httpx.AsyncClient, count: int) -> None:
    """So many jobs, accepted."""
    for _ in range(count):
        sent = await http.post(
            "/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"}
        )
        assert sent.status_code == 202, sent.text


async def test_a_wait_in_the_queue_over_its_limit_is_503_with_retry_after(
    http: httpx.AsyncClient, answerer: Answerer, gate: Gate
) -> None:
    """All slots of the model are taken by jobs that run on."""
    await fill(http, 8)
    await until("all slots are taken", lambda: len(answerer.seen) == 8)
    refused = await http.post("/v1/models/echo/infer", json={"inputs": {}, "options": {"max_wait_s": 0.2}})
    assert (refused.status_code, refused.json()["code"]) == (503, "wait_timeout"), refused.text
    assert int(refused.headers["retry-after"]) == refused.json()["retry_after_s"] >= 1
    gate.open()


async def test_a_full_queue_is_429(settings: Settings, answerer: Answerer, gate: Gate, store: Store) -> None:
    """One job may wait: the next is refused, told how many wait and when to come back, and not stored."""
    limits = settings.limits.model_copy(update={"queue_jobs": 1})
    async with (
        run_gateway(settings.model_copy(update={"limits": limits})) as started,
        httpx.AsyncClient(base_url=started.url, timeout=20) as http,
    ):
        await fill(http, 9)
        refused = await http.post("/v1/models/echo/infer", json={"inputs": {}})
    assert (refused.status_code, refused.json()["code"]) == (429, "queue_full"), refused.text
    assert int(refused.headers["retry-after"]) >= 1 and refused.json()["queue_length"] == 1
    assert len((await jobs.list_jobs(store)).data) == 9
    gate.open()


async def test_a_job_that_fits_no_card_is_422(
    http: httpx.AsyncClient, agent: FakeAgent, store: Store
) -> None:
    """At once, and it is not queued."""
    response = await http.post("/v1/models/echo/infer", json={"inputs": {}, "options": {"vram": "5GiB"}})
    assert (response.status_code, response.json()["code"]) == (422, "exceeds_every_card")
    assert await inventory.leases(store) == () and await inventory.queue(store) == ()


@pytest.mark.parametrize("protocol", [BoundedProtocol, HttpToolsProtocol], ids=["ours", "uvicorn"])
async def test_a_client_that_leaves_without_a_key_frees_its_bytes(
    settings: Settings,
    agent: FakeAgent,
    store: Store,
    caplog: pytest.LogCaptureFixture,
    protocol: type[HttpToolsProtocol],
) -> None:
    """Its job is cancelled and its lease is gone, though no agent got the job; it is logged as 499."""
    caplog.set_level("INFO", "gateway")
    async with run_gateway(settings, protocol=protocol) as running, httpx.AsyncClient() as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(f"{running.url}/v1/models/echo/infer", json={"inputs": {}}, timeout=0.3)

        async def is_free() -> bool:
            return not await inventory.leases(store)

        await until("the lease of the client that left is released", is_free)
    page = await jobs.list_jobs(store)
    assert [view.state for view in page.data] == ["cancelled"]
    left = [record for record in caplog.records if record.getMessage() == "client_left"]
    assert [record.__dict__["vramgate_fields"]["status"] for record in left] == [499]


async def test_a_client_that_leaves_with_a_key_keeps_its_place(
    http: httpx.AsyncClient, agent: FakeAgent, store: Store
) -> None:
    """The retry under the key joins the job that its first try left."""
    headers = {"Idempotency-Key": "impatient"}
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/models/echo/infer", json={"inputs": {}}, headers=headers, timeout=0.3)

    async def has_left() -> bool:
        return (await jobs.list_jobs(store)).data[0].clients == 0

    await until("the ledger was told that the client left", has_left)
    retry = asyncio.create_task(http.post("/v1/models/echo/infer", json={"inputs": {}}, headers=headers))

    async def is_back() -> bool:
        return (await jobs.list_jobs(store)).data[0].clients == 1

    await until("the retry joined", is_back)
    assert await agent.run_all() == 1
    assert (await retry).status_code == 200
    assert len((await jobs.list_jobs(store)).data) == 1


async def test_request_ids_are_echoed_and_go_with_the_job(
    http: httpx.AsyncClient, answerer: Answerer
) -> None:
    """X-Request-Id and traceparent come back on answers and refusals alike."""
    headers = {"X-Request-Id": "req-7", "traceparent": "00-abc-def-01"}
    answer = await http.post("/v1/models/echo/infer", json={"inputs": {}}, headers=headers)
    refusal = await http.post("/v1/models/nope/infer", json={"inputs": {}}, headers=headers)
    route = await http.get("/nowhere", headers=headers)
    for response in (answer, refusal, route):
        assert response.headers["x-request-id"] == "req-7"
        assert response.headers["traceparent"] == "00-abc-def-01"
    assert answerer.seen[0].request_id == "req-7"


async def test_a_version_can_be_named(http: httpx.AsyncClient, answerer: Answerer) -> None:
    """`model@version` runs that version; one that is not there is 404 and says which are."""
    named = await http.post("/v1/models/echo@v1/infer", json={"inputs": {}})
    assert named.status_code == 200 and named.json()["version"] == "v1"
    other = await http.post("/v1/models/echo@v9/infer", json={"inputs": {}})
    assert (other.status_code, other.json()["code"]) == (404, "unknown_model")
    assert "v1" in other.json()["detail"]


async def test_our_own_client_speaks_this_contract(
    running: Running, answerer: Answerer, store: Store
) -> None:
    """AsyncClient.infer, as JSON and as a raw body; a refusal is the exception of its code."""
    async with AsyncClient(running.url) as client:
        answer = await client.infer("files", {"image": PNG}, priority=6)
        raw = await client.infer("files", body=PNG, content_type="image/png", priority=6)
        assert answer.outputs == raw.outputs == "ok" and answer.tries == 1
        assert (await jobs.view(store, raw.id)).priority == 6
        with pytest.raises(InvalidInput, match="bytes"):
            await client.infer("files", {"image": b""})
        key = "a-key"
        first = await client.infer("files", {"image": PNG}, idempotency_key=key)
        again = await client.infer("files", {"image": PNG}, idempotency_key=key)
        assert again.replayed and again.id == first.id


async def test_a_model_that_fits_nowhere_says_why(http: httpx.AsyncClient, store: Store) -> None:
    """Who waited in vain for a card reads what the cards say of the model, not only that none came free."""
    await FakeAgent(store, models=(ledger_hosted("huge", ready=False),)).register()
    response = await http.post("/v1/models/huge/infer", json={"inputs": {}, "options": {"max_wait_s": 0.2}})
    problem = response.json()
    assert (response.status_code, problem["code"]) in ((503, "no_ready_card"), (503, "wait_timeout")), problem
    assert "does not fit" in problem["detail"], problem


async def test_nothing_is_stored_for_a_model_of_which_nothing_was_measured(
    http: httpx.AsyncClient, store: Store
) -> None:
    """Until a card has loaded a model, callers are told to come back and why; from then on at once, inputs
    are checked and memory is leased as the model was measured.
    """
    loaded = hosted("late", SQUARE, "height * width")
    agent = FakeAgent(store, models=(ledger_hosted("late", version="unknown", ready=False),))
    await agent.register()

    async def ask(inputs: dict[str, object]) -> httpx.Response:
        return await http.post(
            "/v1/models/late/infer", json={"inputs": inputs}, headers={"Prefer": "respond-async"}
        )

    early = await ask({"height": 100, "width": 100})
    assert (early.status_code, early.json()["code"]) == (503, "no_ready_card")
    assert "does not fit" in early.json()["detail"] and int(early.headers["retry-after"]) >= 1
    await agent.beat(models=(loaded,))
    assert (await ask({"height": "tall", "width": 100})).json()["code"] == "invalid_input"
    job = (await ask({"height": 100, "width": 100})).json()["id"]
    assert (await jobs.view(store, job)).lease_bytes == lease_bytes(loaded, 10_000)
