"""Input made to break the service itself, not to be served: each is refused, none is a fault of ours."""

from __future__ import annotations

import httpx
import pytest

from tests.ledger.fake_agent import FakeAgent


@pytest.mark.parametrize("job_id", ["%00", "%0a", "%E2%82%AC", "0" * 32 + "%0a", "A" * 32, "0" * 31])
async def test_what_is_no_job_id_is_no_job(http: httpx.AsyncClient, agent: FakeAgent, job_id: str) -> None:
    """404 on every route of a job, also for ids that no header could carry."""
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        response = await http.request(method, f"/v1/jobs/{job_id}{path}")
        assert (response.status_code, response.json()["code"]) == (404, "unknown_job"), response.text


@pytest.mark.parametrize("card", ["%00", "GPU-a%0a", "%E2%82%AC"])
async def test_what_is_no_card_id_is_no_card(http: httpx.AsyncClient, agent: FakeAgent, card: str) -> None:
    """404 for a card id that is not printable ASCII."""
    response = await http.patch(f"/v1/cards/{card}", json={"state": "ready"})
    assert (response.status_code, response.json()["code"]) == (404, "unknown_card"), response.text
