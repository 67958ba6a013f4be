"""What a body may hold, and that a large one is no burden to others."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import AsyncIterator

import httpx
import msgpack
import pytest

from gateway.body import weigh
from gateway.decoding import from_binary
from gateway.parsing import Allowance
from gateway.shapes import shape_of
from gateway.threads import LARGE_BYTES
from scheduler import inventory, jobs
from scheduler.fingerprint import canonical
from scheduler.settings import Settings
from scheduler.store import Store
from tests.gateway.conftest import run_gateway
from tests.ledger.fake_agent import FakeAgent
from tests.waiting import until
from vramgate.errors import TooLarge

JSON = "application/json"
MSGPACK = "application/msgpack"
FORM = "multipart/form-data; boundary=b"


@pytest.fixture
async def narrow(settings: Settings, store: Store) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that takes 1000 values."""
    limits = settings.limits.model_copy(update={"values": 1000})
    async with (
        run_gateway(settings.model_copy(update={"limits": limits})) as started,
        httpx.AsyncClient(base_url=started.url, timeout=20) as client,
    ):
        yield client


def grid(dtype: str, shape: list[int], data: bytes) -> bytes:
    array = {"dtype": dtype, "shape": shape, "data": data}
    packed: bytes = msgpack.packb({"inputs": {"height": 1, "width": 1, "grid": array}})
    return packed


def form(*parts: bytes) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n'
    return b"".join(head + part + b"\r\n" for part in parts) + b"--b--\r\n"


def numbers(count: int) -> bytes:
    return b"[" + b"1," * (count - 1) + b"1]"


TOO_MANY = [
    ("echo", JSON, b'{"inputs": {"x": %s}}' % numbers(1001)),
    ("echo", JSON, b'{"inputs": {"x": [%s]}}' % b",".join([b"[]"] * 1001)),
    ("echo", MSGPACK, msgpack.packb({"inputs": {"x": [{}] * 1001}})),
    ("echo", MSGPACK, msgpack.packb({"inputs": {"x": [[[]] * 501] * 2}})),
    ("echo", FORM, form(numbers(501), numbers(501))),
    ("squares", MSGPACK, grid("int8", [1, 1000], bytes(1000))),
    ("squares", MSGPACK, grid("int8", [900, 1], bytes(900))),
]


@pytest.mark.parametrize(("model", "kind", "content"), TOO_MANY)
async def test_more_values_than_the_bound_are_too_large(
    narrow: httpx.AsyncClient, agent: FakeAgent, store: Store, model: str, kind: str, content: bytes
) -> None:
    """413 that names the bound, in every form of a body; the connection lives on, and nothing is stored."""
    response = await narrow.post(f"/v1/models/{model}/infer", content=content, headers={"Content-Type": kind})
    problem = response.json()
    assert (response.status_code, problem["code"]) == (413, "too_large"), problem
    assert problem["limit_values"] == 1000 and "limits.values" in problem["detail"]
    assert "connection" not in response.headers
    assert not (await jobs.list_jobs(store)).data and not await inventory.leases(store)


WITHIN = [
    ("echo", JSON, b'{"inputs": {"x": %s}}' % numbers(985)),
    ("echo", JSON, json.dumps({"inputs": {"x": ', ": [" {' * 1000}}).encode()),
    ("echo", MSGPACK, msgpack.packb({"inputs": {"x": [0.5] * 985, "y": b"\x90" * 5000}})),
    ("echo", FORM, form(numbers(498), numbers(498))),
    ("files", FORM, form(b"[[[," * 5000).replace(b'"x"', b'"image"')),
    ("squares", MSGPACK, grid("int8", [1, 950], bytes(950))),
]


@pytest.mark.parametrize(("model", "kind", "content"), WITHIN)
async def test_as_many_values_as_the_bound_are_read(
    narrow: httpx.AsyncClient, agent: FakeAgent, model: str, kind: str, content: bytes
) -> None:
    """What stands in texts and files counts for nothing."""
    headers = {"Content-Type": kind, "Prefer": "respond-async"}
    response = await narrow.post(f"/v1/models/{model}/infer", content=content, headers=headers)
    assert response.status_code == 202, response.text


def test_packed_arrays_are_counted_before_they_are_unpacked() -> None:
    """The lists around the elements too, and all arrays of a body together."""
    shape = shape_of({"type": "object", "additionalProperties": {"type": "array"}})
    array = {"dtype": "float16", "shape": [2, 3, 2], "data": struct.pack("<12e", *range(12))}
    unpacked = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    both = {"a": array, "b": array}
    allowance = Allowance(40)
    assert from_binary(shape, both, "x", allowance) == {"a": unpacked, "b": unpacked}
    assert allowance.left == 0
    with pytest.raises(TooLarge):
        from_binary(shape, both, "x", Allowance(39))


def test_what_is_large_already_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting the values of 32 MiB takes as long as a hundred small requests, and it is done on the loop."""

    def count(content: bytes) -> int:
        pytest.fail("the values were counted")

    monkeypatch.setattr("gateway.body.count_values", count)
    assert weigh("json", b" " * LARGE_BYTES) >= LARGE_BYTES


HEAVY = [
    ("echo", JSON, b'{"inputs": {"x": %s}}' % numbers(10_000)),
    ("echo", JSON, b'{"inputs": {"x": "%s"}}' % (b"a" * 300_000)),
    ("echo", MSGPACK, msgpack.packb({"inputs": {"x": [{}] * 10_000}})),
    ("echo", FORM, form(numbers(10_000))),
    ("files", "image/png", bytes(300_000)),
    ("squares", MSGPACK, grid("int8", [10_000, 1], bytes(10_000))),
]


@pytest.mark.parametrize(("model", "kind", "content"), HEAVY)
async def test_others_are_answered_while_a_large_body_is_read(
    http: httpx.AsyncClient,
    agent: FakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    kind: str,
    content: bytes,
) -> None:
    """Large in bytes or in values: the same worker says that it is alive before the work is done."""
    begun, was_answered = threading.Event(), threading.Event()

    def slow(inputs: dict[str, object]) -> bytes:
        begun.set()
        assert was_answered.wait(30), "the loop was held up"
        return canonical(inputs)

    monkeypatch.setattr("gateway.infer.canonical", slow)
    headers = {"Content-Type": kind, "Prefer": "respond-async"}
    large = asyncio.create_task(http.post(f"/v1/models/{model}/infer", content=content, headers=headers))
    await until("the large body is read", begun.is_set)
    assert (await http.get("/livez")).status_code == 200
    was_answered.set()
    assert (await large).status_code == 202
