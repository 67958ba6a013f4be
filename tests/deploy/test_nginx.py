"""deploy/nginx.conf, run by nginx itself before two stand-ins for gateways."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from scheduler.settings import Settings
from tests.deploy.nginx import CONFIGURATION, Proxy, free_port, render, run_nginx
from tests.deploy.standin import StandIn
from tests.waiting import until
from vramgate import client as sdk
from vramgate import errors

MIB = 2**20
WAIT_S = 10.0


@pytest.fixture
async def gateways() -> AsyncIterator[tuple[StandIn, StandIn]]:
    pair = (StandIn("first"), StandIn("second"))
    for gateway in pair:
        await gateway.start()
    yield pair
    for gateway in pair:
        await gateway.stop()


@pytest.fixture
async def proxy(tmp_path: Path, gateways: tuple[StandIn, StandIn]) -> AsyncIterator[Proxy]:
    async with run_nginx(tmp_path, (gateways[0].port, gateways[1].port)) as running:
        yield running


@pytest.fixture
async def http(proxy: Proxy) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=proxy.url, timeout=WAIT_S) as client:
        yield client


def problem(response: httpx.Response) -> dict[str, object]:
    assert response.headers["Content-Type"] == "application/problem+json"
    document = response.json()
    assert isinstance(document, dict)
    assert document["status"] == response.status_code
    return document


def test_a_replacement_that_the_file_lacks_is_an_error() -> None:
    """A test cannot run another configuration than the one that is shipped without noticing."""
    with pytest.raises(ValueError, match=r"10\.0\.0\.1"):
        render("server 10.213.77.11:8000;", {"10.0.0.1": "127.0.0.1"})
    assert render("a b a", {"a": "c"}) == "c b c"


def test_the_read_timeout_is_the_clients_own() -> None:
    """Proxy and client give up total_timeout_s + 10 s after a request: the gateway's answer comes first."""
    expected = Settings.model_fields["clocks"].default.total_timeout_s + 10
    text = CONFIGURATION.read_text()
    assert [float(seconds) for seconds in re.findall(r"proxy_(?:read|send)_timeout (\d+)s;", text)] == [
        expected,
        expected,
    ]
    assert sdk.DEFAULT_TOTAL_TIMEOUT_S + sdk.READ_MARGIN_S == expected


def test_the_body_limit_is_the_gateways_own() -> None:
    """nginx refuses the bodies that a gateway would refuse, and no others."""
    found = re.findall(r"client_max_body_size (\d+)m;", CONFIGURATION.read_text())
    assert [int(size) * MIB for size in found] == [Settings.model_fields["limits"].default.body_bytes]


async def test_both_gateways_get_work_and_learn_who_asked(
    http: httpx.AsyncClient, gateways: tuple[StandIn, StandIn]
) -> None:
    """Requests go to both gateways, with the caller's headers and the marks of a forwarded request."""
    headers = {"Idempotency-Key": '"k1"', "X-Request-Id": "r1", "traceparent": "00-ab-cd-01"}
    answers = [
        (await http.post("/v1/models/m/echo?priority=7", json={"inputs": {}}, headers=headers)).json()[
            "gateway"
        ]
        for _ in range(12)
    ]
    assert set(answers) == {"first", "second"}
    for request in gateways[0].received + gateways[1].received:
        assert request.target == "/v1/models/m/echo?priority=7"
        assert request.headers["idempotency-key"] == '"k1"'
        assert request.headers["x-request-id"] == "r1"
        assert request.headers["traceparent"] == "00-ab-cd-01"
        assert request.headers["x-forwarded-for"] == "127.0.0.1"
        assert "connection" not in request.headers


async def test_health_of_a_gateway_is_seen_through_the_proxy(
    http: httpx.AsyncClient, gateways: tuple[StandIn, StandIn]
) -> None:
    """A balancer above this one asks /readyz?scope=gateway and gets a gateway's own answer."""
    response = await http.get("/readyz?scope=gateway")
    assert response.status_code == 200
    assert [r.target for r in gateways[0].received + gateways[1].received] == ["/readyz?scope=gateway"]


async def test_a_gateway_that_is_down_costs_no_request(
    http: httpx.AsyncClient, gateways: tuple[StandIn, StandIn]
) -> None:
    """A POST that met a refused connection is given to the other gateway, and its caller never knows."""
    await gateways[0].stop()
    statuses = [(await http.post("/v1/models/m/echo", json={})).status_code for _ in range(20)]
    assert statuses == [200] * 20
    assert gateways[1].count("echo") == 20


async def test_a_gateway_that_comes_back_gets_work_again(
    http: httpx.AsyncClient, gateways: tuple[StandIn, StandIn]
) -> None:
    """A gateway is passed over only while it refuses connections and for two seconds more."""
    await gateways[0].stop()
    for _ in range(4):
        await http.post("/v1/models/m/echo", json={})
    await gateways[0].start()
    async with asyncio.timeout(WAIT_S):
        while not gateways[0].count("echo"):
            assert (await http.post("/v1/models/m/echo", json={})).status_code == 200
            await asyncio.sleep(0.05)


async def test_a_post_that_was_sent_is_sent_to_nobody_else(
    http: httpx.AsyncClient, gateways: tuple[StandIn, StandIn]
) -> None:
    """A gateway that ends with a POST in hand: 502 at once, one gateway saw it, and the caller is told."""
    for method in ("POST", "PATCH"):
        response = await http.request(method, "/v1/models/m/dies", json={})
        assert response.status_code == 502
        assert response.headers["Retry-After"] == "2"
        assert "Idempotency-Key" in str(problem(response)["detail"])
    assert gateways[0].count("dies") + gateways[1].count("dies") == 2


async def test_a_read_that_was_cut_off_is_tried_elsewhere(
    http: httpx.AsyncClient, gateways: tuple[StandIn, StandIn]
) -> None:
    """A GET may be repeated: it reaches both gateways before its caller hears that none answers."""
    assert (await http.get("/v1/jobs/dies")).status_code == 502
    assert gateways[0].count("dies") == gateways[1].count("dies") == 1


async def test_no_gateway_at_all_is_a_problem_document(
    http: httpx.AsyncClient, gateways: tuple[StandIn, StandIn]
) -> None:
    """With every gateway down the proxy says so in the contract's form; to the client that is unreachable."""
    for gateway in gateways:
        await gateway.stop()
    response = await http.post("/v1/models/m/echo", json={})
    assert response.status_code == 502
    assert response.headers["Retry-After"] == "2"
    assert "type" not in problem(response)
    async with sdk.AsyncClient(str(http.base_url)) as client:
        with pytest.raises(errors.Unreachable):
            await client.infer("m", {}, deadline_s=1.0)


async def test_a_silent_gateway_is_a_504(tmp_path: Path, gateways: tuple[StandIn, StandIn]) -> None:
    """A gateway that says nothing until the read timeout: 504 as a problem document, nobody else is asked."""
    ports = (gateways[0].port, gateways[1].port)
    async with run_nginx(
        tmp_path, ports, changes={"proxy_read_timeout 110s": "proxy_read_timeout 1s"}
    ) as proxy:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=WAIT_S) as http:
            response = await http.post("/v1/models/m/silent", json={})
    assert response.status_code == 504
    assert response.headers["Retry-After"] == "2"
    problem(response)
    assert gateways[0].count("silent") + gateways[1].count("silent") == 1


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused_as_a_gateway_would(
    http: httpx.AsyncClient, gateways: tuple[StandIn, StandIn], chunked: bool
) -> None:
    """33 MiB: 413 with the gateways' own problem document, whether the length was announced or not."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(33):
            yield bytes(MIB)

    content = pieces() if chunked else bytes(33 * MIB)
    response = await http.post("/v1/models/m/echo", content=content)
    assert response.status_code == 413
    document = problem(response)
    assert document == errors.TooLarge(str(document["detail"]), limit_bytes=32 * MIB).problem()
    assert gateways[0].received == gateways[1].received == []


async def test_a_body_at_the_limit_passes_whole(
    http: httpx.AsyncClient, gateways: tuple[StandIn, StandIn]
) -> None:
    """32 MiB exactly is the gateway's to judge."""
    assert (await http.post("/v1/models/m/echo", content=bytes(32 * MIB))).status_code == 200
    assert [r.body_bytes for r in gateways[0].received + gateways[1].received] == [32 * MIB]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/jobs/j/streams"), ("POST", "/v1/models/m/streams")]
)
async def test_events_leave_as_they_come(
    http: httpx.AsyncClient, gateways: tuple[StandIn, StandIn], method: str, path: str
) -> None:
    """An event reaches the caller while the stream is open, of a job or of an infer; no buffer holds it."""
    async with http.stream(method, path) as response:
        chunks = response.aiter_text()
        assert "event: queued" in await asyncio.wait_for(anext(chunks), WAIT_S)
        for gateway in gateways:
            gateway.release.set()
        assert "event: done" in "".join([chunk async for chunk in chunks])


async def test_a_caller_who_leaves_is_seen_by_the_gateway(
    proxy: Proxy, gateways: tuple[StandIn, StandIn]
) -> None:
    """A closed connection reaches the gateway, which alone can free what the caller waited for."""
    _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"POST /v1/models/m/silent HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
    await writer.drain()
    await until("the request arrived", lambda: gateways[0].count("silent") + gateways[1].count("silent") == 1)
    writer.close()
    await until("the gateway saw its caller leave", lambda: gateways[0].left + gateways[1].left == 1)


async def test_figures_are_not_those_of_a_random_gateway(
    http: httpx.AsyncClient, gateways: tuple[StandIn, StandIn]
) -> None:
    """/metrics is each gateway's own; through the proxy it is no route."""
    response = await http.get("/metrics")
    document = problem(response)
    assert document == errors.UnknownRoute(str(document["detail"])).problem()
    assert gateways[0].received == gateways[1].received == []


async def test_a_request_is_one_line_of_fields(http: httpx.AsyncClient, proxy: Proxy) -> None:
    """The access log is JSON, one object a line, whatever the caller puts into its headers."""
    await http.get("/v1/cards", headers={"X-Request-Id": 'a"b\\c'})
    await until("the access log was written", lambda: '"proxied"' in proxy.log.read_text())
    lines = [json.loads(line) for line in proxy.log.read_text().splitlines() if '"proxied"' in line]
    assert [(line["status"], line["uri"], line["request_id"]) for line in lines] == [
        (200, "/v1/cards", 'a"b\\c')
    ]


async def test_a_port_nobody_listens_on_is_not_a_gateway(tmp_path: Path) -> None:
    """nginx starts while no gateway is there yet: the order of start does not matter."""
    async with run_nginx(tmp_path, (free_port(), free_port())) as proxy:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=WAIT_S) as http:
            assert (await http.get("/livez")).status_code == 502
