"""Query parameters: what a route does not know is refused and not ignored."""

from __future__ import annotations

import re

import httpx
import pytest

from gateway.routes import OPERATIONS, Operation

STRICT = [operation for operation in OPERATIONS if not operation.reads_query]


async def refusal(http: httpx.AsyncClient, method: str, target: str) -> tuple[str, str]:
    """The detail of a 422 `invalid_input`, and the parameter that it names."""
    response = await http.request(method, target)
    problem = response.json()
    assert (response.status_code, problem["code"]) == (422, "invalid_input"), problem
    return problem["detail"], problem["field"]


@pytest.mark.parametrize("operation", STRICT, ids=lambda operation: operation.name)
async def test_an_unknown_parameter_is_named(http: httpx.AsyncClient, operation: Operation) -> None:
    """On every route of the table, with the parameters that there are."""
    target = re.sub(r"{\w+}", "0" * 32, operation.path)
    detail, field = await refusal(http, operation.method, f"{target}?nonsense=1")
    known = f"there are {', '.join(operation.query)}" if operation.query else "this route has none"
    assert detail == f"unknown query parameter 'nonsense'; {known}"
    assert field == "nonsense"


@pytest.mark.parametrize(
    ("target", "detail"),
    [
        ("/v1/jobs?limt=1", "unknown query parameter 'limt'; did you mean limit?"),
        ("/v1/jobs?limit=1&stat=queued", "unknown query parameter 'stat'; did you mean state?"),
        ("/v1/jobs?Limit=1", "unknown query parameter 'Limit'; did you mean limit?"),
        ("/v1/jobs?limit=1&limit=2", "query parameter 'limit' is given 2 times"),
        ("/readyz?scop=gateway", "unknown query parameter 'scop'; did you mean scope?"),
        ("/livez?" + "x" * 200, f"unknown query parameter '{'x' * 80}'; this route has none"),
        ("/v1/cards?%00%ff", "unknown query parameter '\\x00\ufffd'; this route has none"),
    ],
)
async def test_a_slip_is_told_with_what_was_meant(http: httpx.AsyncClient, target: str, detail: str) -> None:
    """Also one beside parameters that are known, and one given twice, of which only one could count."""
    assert (await refusal(http, "GET", target))[0] == detail


async def test_an_empty_query_is_none(http: httpx.AsyncClient) -> None:
    """A question mark with nothing behind it asks for nothing."""
    assert (await http.get("/livez?")).status_code == 200
