"""Bad input gets a clear answer, and nothing of it is stored."""

from __future__ import annotations

import asyncio
import base64
import logging
import struct
import zlib
from collections.abc import AsyncIterator

import httpx
import msgpack
import pytest

from scheduler import inventory, jobs
from scheduler.store import Store
from tests.gateway.conftest import Running
from tests.ledger.fake_agent import FakeAgent

JSON = {"Content-Type": "application/json"}
MSGPACK = {"Content-Type": "application/msgpack"}


def png(width: int, height: int) -> bytes:
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))


def deep(levels: int) -> bytes:
    return b'{"inputs": {"x": ' + b"[" * levels + b"]" * levels + b"}}"


BODIES = [
    ("echo", b'{"inputs": {"x": 1', 400, "malformed", "not JSON"),
    ("echo", b"", 400, "malformed", "empty"),
    ("echo", b'{"inputs": {"x": NaN}}', 400, "malformed", "not JSON"),
    ("echo", b'{"inputs": {"x": -Infinity}}', 400, "malformed", "not JSON"),
    ("echo", b'{"inputs": {"x": 1e999}}', 400, "malformed", "infinity"),
    ("echo", b'{"inputs": {"x": "\xff"}}', 400, "malformed", "UTF-8"),
    ("echo", deep(1000), 400, "malformed", "nested deeper than 64"),
    ("echo", deep(63), 400, "malformed", "nested deeper than 64"),
    ("echo", b"[" * 100_000, 400, "malformed", ""),
    ("echo", b'{"inputs": {"x": 1, "x": 2}}', 400, "malformed", "twice"),
    ("echo", b'{"inputs": {}, "inputs": {"x": 2}}', 400, "malformed", "twice"),
    ("echo", b"[1]", 422, "invalid_input", "must be an object"),
    ("echo", b"{}", 422, "invalid_input", "it is missing"),
    ("echo", b'{"inputs": null}', 422, "invalid_input", "got null"),
    ("echo", b'{"input": {}}', 422, "invalid_input", "did you mean inputs?"),
    ("echo", b'{"inputs": {}, "options": {"max_wait": 3}}', 422, "invalid_input", "did you mean max_wait_s?"),
    (
        "echo",
        b'{"inputs": {}, "options": {"priority": 10}}',
        422,
        "invalid_input",
        "a whole number from 0 to 9",
    ),
    ("echo", b'{"inputs": {}, "options": {"priority": -1}}', 422, "invalid_input", "got -1"),
    ("echo", b'{"inputs": {}, "options": {"priority": true}}', 422, "invalid_input", "got True"),
    ("echo", b'{"inputs": {}, "options": {"max_wait_s": -3}}', 422, "invalid_input", "max_wait_s"),
    ("echo", b'{"inputs": {}, "options": {"run_timeout_s": 1e300}}', 422, "invalid_input", "run_timeout_s"),
    ("echo", b'{"inputs": {}, "options": {"total_timeout_s": "x"}}', 422, "invalid_input", "total_timeout_s"),
    ("echo", b'{"inputs": {}, "options": {"vram": "lots"}}', 422, "invalid_input", "12GiB"),
    ("echo", b'{"inputs": {}, "options": {"vram": -5}}', 422, "invalid_input", "vram"),
    ("echo", b'{"inputs": {}, "options": [1]}', 422, "invalid_input", "options must be an object"),
    ("squares", b'{"inputs": {"height": 1}}', 422, "invalid_input", '"width" is a required property'),
    ("squares", b'{"inputs": {"height": "x", "width": 1}}', 422, "invalid_input", "inputs.height"),
    ("squares", b'{"inputs": {"height": 1, "width": 1, "z": 1}}', 422, "invalid_input", "'z'"),
    ("squares", b'{"inputs": {"height": 5000, "width": 1}}', 422, "invalid_input", "4096"),
    ("files", b'{"inputs": {"image": "no base64!"}}', 422, "invalid_input", "image must be base64"),
    ("files", b'{"inputs": {"image": ""}}', 422, "invalid_input", "1 to 1000000 bytes"),
    ("files", b'{"inputs": {"image": 3}}', 422, "invalid_input", "inputs.image"),
    ("pictures", b'{"inputs": {"image": "AAAA"}}', 422, "invalid_input", "no PNG"),
]


async def stored(store: Store) -> int:
    page = await jobs.list_jobs(store)
    return len(page.data) + len(await inventory.leases(store)) + len(await inventory.queue(store))


async def test_a_bad_body_is_refused_in_words(
    http: httpx.AsyncClient, agent: FakeAgent, store: Store
) -> None:
    """The right status, a problem that names the place, and nothing stored."""
    for model, body, status, code, said in BODIES:
        response = await http.post(f"/v1/models/{model}/infer", content=body, headers=JSON)
        problem = response.json()
        assert (response.status_code, problem["code"]) == (status, code), (body[:80], problem)
        assert response.headers["content-type"] == "application/problem+json"
        assert said in problem["detail"] and "\n" not in problem["detail"], (body[:80], problem)
        assert len(problem["detail"]) < 500 and "Traceback" not in response.text
    assert await stored(store) == 0


async def test_nesting_up_to_the_limit_is_read(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """62 levels of arrays under inputs are 64 levels in all."""
    response = await http.post(
        "/v1/models/echo/infer", content=deep(62), headers=JSON | {"Prefer": "respond-async"}
    )
    assert response.status_code == 202, response.text


def grid(dtype: str, shape: list[int], data: bytes) -> bytes:
    array = {"dtype": dtype, "shape": shape, "data": data}
    packed: bytes = msgpack.packb({"inputs": {"height": 1, "width": 1, "grid": array}})
    return packed


PACKED = [
    (b"\x81\xa6inputs", 400, "not msgpack"),
    (b"\xc1", 400, "not msgpack"),
    (msgpack.packb({"inputs": {"x": float("nan")}}), 400, "NaN"),
    (msgpack.packb({"inputs": {1: 2}}), 400, "msgpack"),
    (msgpack.packb({"inputs": {"x": msgpack.ExtType(5, b"")}}), 400, "ExtType"),
    (b"\x91" * 100_000, 400, ""),
    (grid("x", [1], b""), 422, "dtype"),
    (grid("int8", [9**15], b""), 422, "data"),
    (grid("int8", [9**15, 0], b""), 422, "shape"),
    (grid("float32", [1], b"\0\0\x80\x7f"), 422, "infinity"),
    (msgpack.packb({"inputs": {"height": b"1", "width": 1}}), 422, "height"),
]  # fmt: skip


async def test_bad_msgpack_is_refused_in_words(
    http: httpx.AsyncClient, agent: FakeAgent, store: Store
) -> None:
    """As for JSON; sizes in a header are believed only after they were held against the data."""
    for body, status, said in PACKED:
        response = await http.post("/v1/models/squares/infer", content=body, headers=MSGPACK)
        assert response.status_code == status, (body[:80], response.text)
        assert said in response.json()["detail"], (body[:80], response.text)
    assert await stored(store) == 0


async def test_an_absurd_image_is_refused(http: httpx.AsyncClient, agent: FakeAgent, store: Store) -> None:
    """99999999 x 1 pixels, and a small file that promises gigapixels."""
    for width, height in ((99_999_999, 1), (60_000, 60_000), (0, 1)):
        for response in (
            await http.post("/v1/models/pictures/infer", content=png(width, height)),
            await http.post(
                "/v1/models/pictures/infer",
                json={"inputs": {"image": base64.b64encode(png(width, height)).decode()}},
            ),
        ):
            assert (response.status_code, response.json()["code"]) == (422, "invalid_input")
            assert response.json()["field"] == "image" and "pixels" in response.json()["detail"]
    assert await stored(store) == 0


async def test_a_body_of_one_gigabyte_is_refused_before_it_is_read(
    running: Running, agent: FakeAgent
) -> None:
    """By Content-Length alone: the answer comes although no byte of the body was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(
        b"POST /v1/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1073741824\r\n\r\n"
    )
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413") and b'"code":"too_large"' in answer
    assert b"connection: close" in answer.lower()


async def test_a_body_without_a_length_is_cut_at_the_limit(
    http: httpx.AsyncClient, agent: FakeAgent, store: Store
) -> None:
    """A chunked body is refused once it passed 32 MiB, and the client that went on sending can read why."""
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 2**26:
            sent += 2**20
            yield b" " * 2**20

    response = await http.post("/v1/models/echo/infer", content=chunks(), headers=JSON)
    assert (response.status_code, response.json()["code"]) == (413, "too_large")
    assert await stored(store) == 0


@pytest.mark.parametrize(
    "key",
    [b"", b'""', b"k" * 256, "sch\u00f6n".encode(), b"tab\there"],
    ids=["empty", "quoted", "long", "accent", "tab"],
)
async def test_a_bad_key_is_400(http: httpx.AsyncClient, agent: FakeAgent, store: Store, key: bytes) -> None:
    """Empty, too long, not ASCII, not printable."""
    response = await http.post(
        "/v1/models/echo/infer", json={"inputs": {}}, headers=[(b"Idempotency-Key", key)]
    )
    assert (response.status_code, response.json()["code"]) == (400, "malformed"), response.text
    assert "Idempotency-Key" in response.json()["detail"]
    assert await stored(store) == 0


async def test_what_is_not_there_is_a_problem_too(http: httpx.AsyncClient, agent: FakeAgent) -> None:
    """404, 405, 406 and 415 have problem documents as every refusal has."""
    cases = [
        (await http.get("/v2/health"), 404, "unknown_route"),
        (await http.post("/v1/models/ecko/infer", json={"inputs": {}}), 404, "unknown_model"),
        (await http.get("/v1/models/nope"), 404, "unknown_model"),
        (await http.get("/v1/models/"), 404, "unknown_model"),
        (await http.get("/livez/"), 404, "unknown_route"),
        (await http.get("/v1/jobs/" + "0" * 32), 404, "unknown_job"),
        (await http.delete("/v1/jobs/" + "0" * 32), 404, "unknown_job"),
        (await http.get("/v1/jobs/" + "0" * 32 + "/events"), 404, "unknown_job"),
        (await http.patch("/v1/cards/nope", json={"state": "ready"}), 404, "unknown_card"),
        (await http.get("/v1/models/echo/infer"), 405, "method_not_allowed"),
        (await http.delete("/livez"), 405, "method_not_allowed"),
        (
            await http.post("/v1/models/echo/infer", json={"inputs": {}}, headers={"Accept": "text/html"}),
            406,
            "not_acceptable",
        ),
        (await http.post("/v1/models/echo/infer", content=b"x=1"), 415, "unsupported_media_type"),
        (
            await http.post(
                "/v1/models/echo/infer", content=b"x", headers=JSON | {"Content-Encoding": "gzip"}
            ),
            415,
            "unsupported_media_type",
        ),
        (await http.post("/v1/models/files/infer?prioritty=3", content=b"x"), 422, "invalid_input"),
        (await http.post("/v1/models/files/infer?priority=3&priority=4", content=b"x"), 422, "invalid_input"),
        (await http.post("/v1/models/echo/infer?priority=3", json={"inputs": {}}), 422, "invalid_input"),
        (await http.get("/v1/jobs?limit=0"), 422, "invalid_input"),
        (await http.get("/v1/jobs?state=asleep"), 422, "invalid_input"),
        (await http.get("/v1/jobs?cursor=%00"), 422, "invalid_input"),
        (await http.patch("/v1/cards/GPU-a", json={"state": "off"}), 422, "invalid_input"),
    ]
    for response, status, code in cases:
        problem = response.json()
        assert (response.status_code, problem["code"]) == (status, code), problem
        assert response.headers["content-type"] == "application/problem+json"
        assert problem["type"] == f"urn:vramgate:{code}" and problem["status"] == status
    assert "did you mean echo?" in cases[1][0].json()["detail"]
    assert "GET" in cases[10][0].headers["allow"]


@pytest.mark.parametrize(
    ("method", "path", "content_type", "detail"),
    [
        (
            "POST",
            "/v1/models/echo/infer",
            "text/plain; charset=utf-8",
            "model echo does not read a body of 'text/plain'; "
            "send application/json, application/msgpack or multipart/form-data",
        ),
        (
            "POST",
            "/v1/models/echo/infer",
            "",
            "model echo does not read a body without Content-Type; "
            "send application/json, application/msgpack or multipart/form-data",
        ),
        (
            "PATCH",
            "/v1/cards/GPU-a",
            "application/msgpack",
            "this route does not read a body of 'application/msgpack'; send application/json",
        ),
    ],
    ids=["text", "none", "card"],
)
async def test_a_media_type_that_is_not_read_is_named(
    http: httpx.AsyncClient, agent: FakeAgent, method: str, path: str, content_type: str, detail: str
) -> None:
    """415 with what came and what is taken."""
    response = await http.request(method, path, content=b"x", headers={"Content-Type": content_type})
    assert (response.status_code, response.json()["detail"]) == (415, detail)


async def test_every_refusal_is_one_log_event(
    http: httpx.AsyncClient, agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """`request_refused` with code, peer and bytes."""
    with caplog.at_level(logging.INFO, "gateway"):
        await http.post("/v1/models/echo/infer", content=b'{"inputs":', headers=JSON)
    refused = [record for record in caplog.records if record.getMessage() == "request_refused"]
    assert len(refused) == 1
    fields = refused[0].__dict__["vramgate_fields"]
    assert (fields["code"], fields["peer"], fields["bytes"]) == ("malformed", "127.0.0.1", 10)


async def test_a_fault_of_ours_is_a_problem_without_a_trace(
    http: httpx.AsyncClient, running: Running, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 internal; the cause is in the log and not in the answer."""

    async def broken(*_: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(running.gateway.ledger.__class__, "submit", broken)
    response = await http.post("/v1/models/echo/infer", json={"inputs": {}})
    assert (response.status_code, response.json()["code"]) == (500, "internal")
    assert "secret" not in response.text
