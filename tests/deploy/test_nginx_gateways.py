"""deploy/nginx.conf before two real gateways on a real ledger."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from gateway.serve import KEEP_ALIVE_S
from scheduler.settings import Settings
from tests.deploy.nginx import CONFIGURATION, REPOSITORY, Proxy, free_port, run_nginx

START_TIMEOUT_S = 30.0
MIB = 2**20


@dataclass(slots=True)
class GatewayProcess:
    """One `python -m gateway` of two workers."""

    port: int
    log: Path
    process: asyncio.subprocess.Process

    async def end(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(START_TIMEOUT_S):
            await self.process.wait()
            # The workers of a killed gateway see that it is gone, and stop listening by themselves.
            while await is_listening(self.port):
                await asyncio.sleep(0.02)


async def start_gateway(settings: Settings, directory: Path) -> GatewayProcess:
    port = free_port()
    log = directory / f"gateway-{port}.log"
    where = ("--port", str(port), "--redis", settings.redis_url, "--pool", settings.pool)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "gateway", *where),
            *("--workers", "2", "--drain", "1s", "--grace", "5s"),
            cwd=REPOSITORY,
            stdout=output,
            stderr=output,
        )
    started = GatewayProcess(port, log, process)
    async with httpx.AsyncClient() as http, asyncio.timeout(START_TIMEOUT_S):
        while not await is_ready(http, port):
            assert process.returncode is None, log.read_text()
            await asyncio.sleep(0.05)
    return started


async def is_listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def is_ready(http: httpx.AsyncClient, port: int) -> bool:
    try:
        response = await http.get(f"http://127.0.0.1:{port}/readyz?scope=gateway")
    except httpx.TransportError:
        return False
    return response.status_code == 200


@pytest.fixture
async def gateways(
    settings: Settings, tmp_path: Path
) -> AsyncIterator[tuple[GatewayProcess, GatewayProcess]]:
    first, second = await asyncio.gather(*(start_gateway(settings, tmp_path) for _ in range(2)))
    yield first, second
    await asyncio.gather(*(gateway.end(signal.SIGTERM) for gateway in (first, second)))


@pytest.fixture
async def proxy(tmp_path: Path, gateways: tuple[GatewayProcess, GatewayProcess]) -> AsyncIterator[Proxy]:
    async with run_nginx(tmp_path, (gateways[0].port, gateways[1].port)) as running:
        yield running


@pytest.fixture
async def http(proxy: Proxy) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=proxy.url, timeout=10) as client:
        yield client


def test_nginx_closes_idle_connections_before_a_gateway_does() -> None:
    """A gateway keeps an idle connection longer than nginx uses it: no POST meets a closed one."""
    found = re.findall(r"keepalive_timeout (\d+)s;", CONFIGURATION.read_text())
    assert [int(seconds) < KEEP_ALIVE_S for seconds in found] == [True]


async def test_a_gateways_refusals_come_through_untouched(
    http: httpx.AsyncClient, gateways: tuple[GatewayProcess, GatewayProcess]
) -> None:
    """Status, headers and problem document of a refusal are the same through the proxy and past it."""
    path = f"/v1/jobs/{'0' * 32}"
    through = await http.get(path)
    async with httpx.AsyncClient() as direct:
        past = await direct.get(f"http://127.0.0.1:{gateways[0].port}{path}")
    assert through.status_code == past.status_code == 404
    assert through.headers["Content-Type"] == past.headers["Content-Type"] == "application/problem+json"
    assert through.json()["code"] == past.json()["code"] == "unknown_job"


async def test_a_body_over_the_limit_gets_one_answer_from_both(
    http: httpx.AsyncClient, gateways: tuple[GatewayProcess, GatewayProcess]
) -> None:
    """33 MiB: the proxy's 413 and the gateway's own differ in nothing but their detail."""
    through = await http.post("/v1/models/nobody/infer", content=bytes(33 * MIB))
    reader, writer = await asyncio.open_connection("127.0.0.1", gateways[0].port)
    writer.write(
        b"POST /v1/models/nobody/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (33 * MIB)
    )
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = re.search(r"content-length: (\d+)", head)
    assert length is not None
    past = json.loads(await reader.readexactly(int(length[1])))
    writer.close()
    own = through.json()
    assert through.status_code == own["status"] == past["status"] == 413
    assert own.pop("detail")
    assert past.pop("detail")
    assert own == past


async def test_operating_is_for_callers_on_the_gateways_host(http: httpx.AsyncClient) -> None:
    """Through the proxy every caller is a stranger, also one on loopback: nobody cordons cards there."""
    response = await http.patch("/v1/cards/any", json={"state": "cordoned"})
    assert response.status_code == 403
    assert response.json()["code"] == "forbidden"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_gateway_that_ends_costs_no_caller_an_answer(
    http: httpx.AsyncClient, gateways: tuple[GatewayProcess, GatewayProcess], number: signal.Signals
) -> None:
    """Kill or stop one of two gateways between requests: each request still gets a gateway's own answer."""
    statuses: list[int] = []
    ending = asyncio.create_task(gateways[0].end(number))
    while not ending.done() or len(statuses) < 40:
        statuses.append((await http.get("/v1/jobs/00000000000000000000000000000000")).status_code)
        await asyncio.sleep(0.01)
    await ending
    assert set(statuses) == {404}
    refused = await http.post("/v1/models/nobody/infer", json={"inputs": {}})
    assert refused.json()["code"] == "no_ready_card"


async def test_all_gateways_gone_is_told_by_the_proxy(
    http: httpx.AsyncClient, gateways: tuple[GatewayProcess, GatewayProcess]
) -> None:
    """Without a gateway the answer is 502 with a time to come back, and health says the same."""
    await asyncio.gather(*(gateway.end(signal.SIGKILL) for gateway in gateways))
    async with asyncio.timeout(START_TIMEOUT_S):
        # What was connected before may still be answered by a worker that has not ended yet.
        while (response := await http.get("/v1/models")).status_code != 502:
            await asyncio.sleep(0.02)
    assert response.headers["Retry-After"] == "2"
    assert (await http.get("/readyz?scope=gateway")).status_code == 502
