"""The OpenAPI document: complete, and true to what the service takes and answers."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

from gateway import components, openapi
from gateway.routes import OPERATIONS
from scheduler.handover import HandedJob, Report
from scheduler.settings import Settings
from scheduler.store import Store
from tests.gateway.conftest import Answerer, Gate
from tests.gateway.process import run_service
from tests.gateway.test_process import options
from tests.ledger.fake_agent import failed
from tests.waiting import until
from vramgate.errors import TABLE


async def test_openapi_documents_every_status(http: httpx.AsyncClient) -> None:
    """Each route lists the statuses of its refusals, as the table of errors has them;

    no other route exists.
    """
    document = (await http.get("/openapi.json")).json()
    assert document == openapi.document(title="vramgate", version="0.1.0")
    documented = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert documented == {(operation.method, operation.path) for operation in OPERATIONS}
    for operation in OPERATIONS:
        responses = document["paths"][operation.path][operation.method.lower()]["responses"]
        for code in operation.refusals:
            assert code in responses[str(TABLE[code].status)]["x-codes"]
        statuses = {str(status) for status in operation.success} | {
            str(TABLE[code].status) for code in operation.refusals
        }
        assert responses.keys() == statuses
    codes = document["components"]["schemas"]["Problem"]["properties"]["code"]["enum"]
    assert set(codes) == TABLE.keys() - set(components.NOT_ANSWERED)
    of_leases = {"unknown_lease", "lease_fenced", "unknown_route", "client_left"}
    assert {code for operation in OPERATIONS for code in operation.refusals} == TABLE.keys() - of_leases


def _exactly(schema: Any) -> Any:
    """The schema with no room for members that it does not name, except where it names none or some."""
    if isinstance(schema, list):
        return [_exactly(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: _exactly(value) for name, value in schema.items()}
    return inner | ({"additionalProperties": False} if "properties" in schema else {})


def check_object(name: str, shown: Any) -> None:
    """`shown` has the members of the component `name`, all that are required, and no other."""
    schemas = {each: _exactly(schema) for each, schema in components.schemas().items()}
    whole = {**components.ref(name), "components": {"schemas": schemas}}
    errors = [
        f"{list(error.instance_path)}: {error.message}"
        for error in jsonschema_rs.Draft202012Validator(whole).iter_errors(shown)
    ]
    assert not errors, f"{name}: {errors}"


async def test_every_object_is_shown_as_documented(
    http: httpx.AsyncClient, answerer: Answerer, gate: Gate
) -> None:
    """Jobs that wait, run, succeeded and failed, models, cards, leases, classes that wait, and answers have
    the members that the document names, and no others.
    """

    async def shown(path: str) -> Any:
        return (await http.get(path)).json()

    async def fail(job: HandedJob) -> Report:
        return failed(job)

    asking = [asyncio.create_task(http.post("/v1/models/echo/infer", json={"inputs": {}})) for _ in range(12)]
    await until("eight run", lambda: len(answerer.seen) == 8)
    check_object("ModelList", await shown("/v1/models"))
    check_object("Model", await shown("/v1/models/squares"))

    async def some_wait_and_run() -> bool:
        return bool((await shown("/v1/queue"))["data"] and (await shown("/v1/jobs?state=running"))["data"])

    await until("some wait and some run", some_wait_and_run)
    for path, name in (("cards", "Card"), ("leases", "Lease"), ("queue", "Queue"), ("jobs", "Job")):
        listed = await shown(f"/v1/{path}")
        assert listed["data"], f"{path} shows nothing"
        check_object(f"{name}List", listed)
    gate.open()
    for answer in await asyncio.gather(*asking):
        check_object("Answer", answer.json())
    check_object("Job", await shown(f"/v1/jobs/{answer.json()['id']}"))
    answerer.handler = fail
    problem = await http.post("/v1/models/echo/infer", json={"inputs": {}})
    check_object("Problem", problem.json())
    check_object("Job", await shown(problem.json()["instance"]))
    check_object("Health", await shown("/livez"))


KNOWN = """
# Any refusal will do, also that of a body which is too large besides.
checks.negative_data_rejection.expected-statuses = ["4xx", "503"]

[parameters]
"path.model" = "echo"
# A card of the test that it cordons answers nobody any more.
"path.card" = "GPU-b"
# It makes up ids of events that are no events of this stream.
"header.Last-Event-ID" = "1-0-0"

[[operations]]
include-name = "POST /v1/models/{model}/infer"
# What a raw body or a form may be is for the model's schema to say, and this model has none.
checks.positive_data_acceptance.expected-statuses = ["2xx", "409", "415", "422", "429", "503"]
"""


async def test_a_generator_of_requests_finds_no_contradiction(
    settings: Settings, store: Store, answerer: Answerer, tmp_path: Path
) -> None:
    """Requests made from the document, valid ones and broken ones: the valid are taken, the broken refused;
    no answer is a fault of ours; each has a status, a media type and a shape that the document names.
    """
    known = tmp_path / "schemathesis.toml"
    known.write_text(KNOWN)
    async with run_service(*options(settings)) as service:
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(known), "run"]
        process = await asyncio.create_subprocess_exec(
            *(*command, f"{service.url}/openapi.json", "--checks", "all", "--phases", "coverage,fuzzing"),
            *("--max-examples", "25", "--continue-on-failure", "--generation-deterministic"),
            cwd=tmp_path,
            env={**os.environ, "NO_COLOR": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said.decode()
        assert await service.end() == 0
