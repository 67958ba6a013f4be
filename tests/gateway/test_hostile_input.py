"""Input made to break the service itself, not to be served: each is refused, none is a fault of ours."""

from __future__ import annotations

import httpx
import pytest

from gateway.events import parse_event_id
from tests.ledger.fake_agent import FakeAgent


@pytest.mark.parametrize("job_id", ["%00", "%0a", "%E2%82%AC", "0" * 32 + "%0a", "A" * 32, "0" * 31, ""])
async def test_what_is_no_job_id_is_no_job(http: httpx.AsyncClient, agent: FakeAgent, job_id: str) -> None:
    """404 on every route of a job, also for ids that no header could carry."""
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        response = await http.request(method, f"/v1/jobs/{job_id}{path}")
        assert (response.status_code, response.json()["code"]) == (404, "unknown_job"), response.text


@pytest.mark.parametrize("card", ["%00", "GPU-a%0a", "%E2%82%AC", ""])
async def test_what_is_no_card_id_is_no_card(http: httpx.AsyncClient, agent: FakeAgent, card: str) -> None:
    """404 for a card id that is not printable ASCII, or empty: it is a prefix of every id."""
    response = await http.patch(f"/v1/cards/{card}", json={"state": "ready"})
    assert (response.status_code, response.json()["code"]) == (404, "unknown_card"), response.text


ID = "0" * 32


@pytest.mark.parametrize(
    "cursor", ["\u00b2-" + ID, "1" * 26 + "-" + ID, "1-x", "1-", "-" + ID, "1-" + ID + "0", "\u0663-" + ID]
)
async def test_a_foreign_cursor_is_invalid(http: httpx.AsyncClient, agent: FakeAgent, cursor: str) -> None:
    """422 for digits that are none, for numbers no clock shows, and for what is no id."""
    response = await http.get("/v1/jobs", params={"cursor": cursor})
    assert (response.status_code, response.json()["code"]) == (422, "invalid_input"), response.text


async def test_an_event_id_beyond_the_store_is_malformed(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """The largest number that a stream id can hold is fine, the next one is 400 before the stream begins."""
    sent = await http.post("/v1/models/echo/infer", json={"inputs": {}}, headers={"Prefer": "respond-async"})
    path = f"/v1/jobs/{sent.json()['id']}/events"
    for beyond in ("1-99999999999999999999", f"1-{2**64}", f"1-1-{2**64}"):
        response = await http.get(path, headers={"Last-Event-ID": beyond})
        assert (response.status_code, response.json()["code"]) == (400, "malformed"), response.text
    assert parse_event_id(f"1-{2**64 - 1}-{2**64 - 1}") == (1, f"{2**64 - 1}-{2**64 - 1}")


def form(value: bytes, name: bytes = b"note") -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n--b--\r\n' % (name, value)


@pytest.mark.parametrize("charset", ["unicode_escape", "raw_unicode_escape", "utf-16", "latin-1", "none"])
async def test_a_form_is_utf_8(http: httpx.AsyncClient, agent: FakeAgent, charset: str) -> None:
    """400 for any other charset, of which some decode to what no text may hold."""
    response = await http.post(
        "/v1/models/echo/infer",
        content=form(rb"\ud800"),
        headers={"Content-Type": f"multipart/form-data; boundary=b; charset={charset}"},
    )
    assert (response.status_code, response.json()["code"]) == (400, "malformed"), response.text
    assert "charset" in response.json()["detail"]


@pytest.mark.parametrize("charset", ["", "; charset=utf-8", "; charset=UTF8", '; charset="us-ascii"'])
async def test_a_form_in_utf_8_is_read(http: httpx.AsyncClient, agent: FakeAgent, charset: str) -> None:
    """With and without saying so."""
    response = await http.post(
        "/v1/models/echo/infer",
        content=form(b'"x"'),
        headers={"Content-Type": f"multipart/form-data; boundary=b{charset}", "Prefer": "respond-async"},
    )
    assert response.status_code == 202, response.text


LONE = b"\xed\xa0\x80"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", rb'{"inputs": {"x": "\ud800"}}'),
        ("application/json", rb'{"inputs": {"\ud800": 1}}'),
        ("application/msgpack", b"\x81\xa6inputs\x81\xa1x\xa3" + LONE),
        ("application/msgpack", b"\x81\xa6inputs\x81\xa3" + LONE + b"\x01"),
        ("multipart/form-data; boundary=b", form(LONE)),
        ("multipart/form-data; boundary=b", form(rb'"\ud800"')),
    ],
)
@pytest.mark.parametrize("model", ["echo", "files"])
async def test_half_a_character_is_refused(
    http: httpx.AsyncClient, agent: FakeAgent, model: str, kind: str, body: bytes
) -> None:
    """A lone surrogate is the caller's mistake in every form of a body."""
    response = await http.post(f"/v1/models/{model}/infer", content=body, headers={"Content-Type": kind})
    assert response.status_code in (400, 422), response.text


async def test_a_missing_field_is_named(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """`field` of the problem is the field that is missing, not the object that lacks it."""
    response = await http.post("/v1/models/squares/infer", json={"inputs": {"height": 1}})
    assert (response.status_code, response.json()["field"]) == (422, "width"), response.text
