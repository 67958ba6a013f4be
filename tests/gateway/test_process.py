"""The gateway as a process: starting, refusing to start, several workers, and its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

from scheduler import inventory, jobs
from scheduler.settings import Settings
from scheduler.store import Store
from tests.conftest import TestServer
from tests.gateway.conftest import Answerer, Gate
from tests.gateway.process import REPOSITORY, Service, refused, run_service
from tests.ledger.fake_agent import FakeAgent
from tests.waiting import until


def options(settings: Settings, *, workers: int = 1, drain: str = "0.2", grace: str = "5") -> tuple[str, ...]:
    return (
        *("--port", "0", "--redis", settings.redis_url, "--pool", settings.pool),
        *("--workers", str(workers), "--drain", drain, "--grace", grace),
    )


async def infer(http: httpx.AsyncClient, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return await http.post("/v1/models/echo/infer", json={"inputs": {}}, headers=headers)


async def answers(service: Service) -> bool:
    try:
        async with httpx.AsyncClient(base_url=service.url, timeout=5) as http:
            return (await http.get("/readyz?scope=gateway")).status_code == 200
    except httpx.TransportError:
        return False


async def test_workers_share_a_port_and_their_counts(
    settings: Settings, store: Store, answerer: Answerer
) -> None:
    """Two workers answer on one address; /metrics counts all, whichever worker is asked; the end is clean."""
    async with run_service(*options(settings, workers=2)) as service:
        await until("a worker answers", lambda: answers(service))
        for _ in range(20):
            async with httpx.AsyncClient(base_url=service.url, timeout=10) as http:
                assert (await infer(http)).status_code == 200
        async with httpx.AsyncClient(base_url=service.url, timeout=10) as http:
            text = (await http.get("/metrics")).text
            assert 'vramgate_requests_total{route="infer",status="200"} 20.0' in text
            assert "vramgate_store_up 1.0" in text and "vramgate_card_bytes" in text
        workers = service.workers()
        assert len(workers) == 2
        assert await service.end() == 0
        assert service.said("gateway_ended")
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


async def test_a_worker_that_dies_is_replaced(settings: Settings, store: Store, agent: FakeAgent) -> None:
    """kill -9 of one worker: the other goes on, and a new one is started."""
    async with run_service(*options(settings, workers=2)) as service:
        await until("a worker answers", lambda: answers(service))
        await until("both workers are there", lambda: len(service.workers()) == 2)
        killed = service.workers()[0]
        os.kill(killed, signal.SIGKILL)
        await until(
            "a worker takes its place",
            lambda: killed not in service.workers() and len(service.workers()) == 2,
        )
        assert service.said("gateway_worker_died")
        await until("the gateway answers", lambda: answers(service))
        assert await service.end() == 0


async def test_workers_end_with_their_parent(settings: Settings, store: Store, agent: FakeAgent) -> None:
    """kill -9 of the parent: its workers close the port at once and end."""
    async with run_service(*options(settings, workers=2, grace="1")) as service:
        await until("a worker answers", lambda: answers(service))
        workers = service.workers()
        shared = _metrics_folder(workers[0])
        assert shared.is_dir()
        await service.end(signal.SIGKILL)

        def is_free() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", service.port)) != 0

        await until("the port is free", is_free)
        await until("the workers are gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        assert not shared.exists()


def _metrics_folder(pid: int) -> Path:
    """The folder that the worker counts in: one of the files that it has mapped lies there."""
    mapped = Path(f"/proc/{pid}/maps").read_text()
    found = re.search(r"(/\S*vramgate-metrics-\w+)/", mapped)
    assert found is not None
    return Path(found[1])


async def test_a_clean_end_says_so_first_and_finishes_what_waits(
    settings: Settings, store: Store, answerer: Answerer, gate: Gate
) -> None:
    """After SIGTERM it still listens and says draining; what waits is answered; then it is gone."""
    async with (
        run_service(*options(settings, drain="1", grace="10")) as service,
        httpx.AsyncClient(base_url=service.url, timeout=20) as http,
    ):
        await until("the gateway answers", lambda: answers(service))
        waiting = asyncio.create_task(infer(http))
        await until("the job runs", lambda: bool(answerer.seen))
        service.process.send_signal(signal.SIGTERM)
        await until("the gateway drains", lambda: bool(service.said("gateway_drains")))
        async with httpx.AsyncClient(base_url=service.url, timeout=5) as other:
            told = await other.get("/readyz?scope=gateway")
        assert (told.status_code, told.json()["code"]) == (503, "draining")

        await until("the port is closed", lambda: _refuses(service.port))
        assert not waiting.done()
        gate.open()
        assert (await waiting).json()["outputs"] == "ok"
        assert await asyncio.wait_for(service.process.wait(), 10) == 0


def _refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def test_what_a_grace_does_not_finish_is_joined_elsewhere(
    settings: Settings, store: Store, answerer: Answerer, gate: Gate
) -> None:
    """503 draining at the end of the grace; the retry under the key joins the same job at another gateway."""
    async with run_service(*options(settings, drain="0", grace="0.3")) as first:
        await until("the first gateway answers", lambda: answers(first))
        async with httpx.AsyncClient(base_url=first.url, timeout=20) as http:
            waiting = asyncio.create_task(infer(http, "k"))
            await until("the job runs", lambda: bool(answerer.seen))
            first.process.send_signal(signal.SIGTERM)
            told = await waiting
        assert (told.status_code, told.json()["code"]) == (503, "draining")
        assert await asyncio.wait_for(first.process.wait(), 10) == 0
    async with run_service(*options(settings)) as second:
        await until("the second gateway answers", lambda: answers(second))
        async with httpx.AsyncClient(base_url=second.url, timeout=20) as http:
            retry = asyncio.create_task(infer(http, "k"))

            async def has_joined() -> bool:
                return (await inventory.totals(store)).get("joined", 0) == 1

            await until("the retry joined", has_joined)
            gate.open()
            assert (await retry).json()["id"] == told.headers["x-job-id"]
    assert len((await jobs.list_jobs(store)).data) == 1


async def test_one_key_through_two_gateways_runs_once_though_one_is_killed(
    settings: Settings, store: Store, answerer: Answerer, gate: Gate
) -> None:
    """50 callers of one key at both; the one that took it is killed -9; all who retry get the one answer."""
    async with run_service(*options(settings)) as first, run_service(*options(settings)) as second:
        await until("the first gateway answers", lambda: answers(first))
        await until("the second gateway answers", lambda: answers(second))
        async with (
            httpx.AsyncClient(base_url=first.url, timeout=20) as one,
            httpx.AsyncClient(base_url=second.url, timeout=20) as other,
        ):
            taken = asyncio.create_task(infer(one, "k"))

            await until("the first gateway took the job", lambda: bool(answerer.seen))
            calls = [asyncio.create_task(infer((one, other)[at % 2], "k")) for at in range(50)]

            async def all_joined() -> bool:
                return (await jobs.list_jobs(store)).data[0].clients == 51

            await until("all callers wait for one job", all_joined)
            first.process.kill()
            cut = await asyncio.gather(taken, *calls[::2], return_exceptions=True)
            assert all(isinstance(answer, httpx.TransportError) for answer in cut)
            retries = [asyncio.create_task(infer(other, "k")) for _ in cut]
            gate.open()
            answered = await asyncio.gather(*calls[1::2], *retries)
            assert {answer.status_code for answer in answered} == {200}
            assert len({answer.json()["id"] for answer in answered}) == 1
    assert (await inventory.totals(store))["runs"] == 1


async def test_it_says_in_one_line_why_it_does_not_start(
    settings: Settings, own_server: TestServer, tmp_path: Path
) -> None:
    """An open address without keys, a port in use, a server that evicts, a typo, a bad value:

    no trace of a stack.
    """
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    typo = tmp_path / "vramgate.toml"
    typo.write_text("[gateway]\nprot = 8000\n")
    evicts = httpx.URL(own_server.url)
    _set_policy(own_server, "allkeys-lru")
    store = ("--redis", settings.redis_url)
    cases = [
        (await refused("--host", "0.0.0.0", *store), 2, "--insecure"),
        (await refused("--host", "192.0.2.1", "--port", "0", *store), 2, "192.0.2.1"),
        (await refused("--port", port, *store), 1, f"127.0.0.1:{port}"),
        (await refused("--port", "0", "--redis", str(evicts)), 1, "noeviction"),
        (await refused("--port", "0", "--config", str(typo)), 2, "gateway.port"),
        (await refused("--port", "0", "--config", str(tmp_path / "none.toml")), 2, "does not exist"),
        (await refused("--port", "0", "--workers", "0", *store), 2, "workers"),
        (await refused("--port", "0", "--redis", "http://x"), 2, "redis_url"),
    ]
    taken.close()
    for (code, said), expected, words in cases:
        assert (code, words in said) == (expected, True), said
        assert "Traceback" not in said and len(said.splitlines()) == 1, said


def _set_policy(server: TestServer, policy: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 2) as connection:
        connection.sendall(f"CONFIG SET maxmemory-policy {policy}\r\n".encode())
        assert connection.recv(64).startswith(b"+OK")


async def test_it_starts_without_a_server(own_server: TestServer, settings: Settings) -> None:
    """It listens, says 503, and logs that once and not every second."""
    own_server.kill()
    lonely = settings.model_copy(update={"redis_url": own_server.url})
    async with run_service(*options(lonely)) as service:
        await until("the gateway answers", lambda: answers(service))
        async with httpx.AsyncClient(base_url=service.url, timeout=10) as http:
            response = await infer(http)
            assert (response.status_code, response.json()["code"]) == (503, "store_unavailable")
            own_server.start()

            async def is_found() -> bool:
                return (await http.get("/v1/cards")).status_code == 200

            await until("the server is found", is_found)
        # The first call may come through a moment before the beat that found the server is over.
        await until("it says so", lambda: bool(service.said("store_answers")))
        assert len(service.said("store_unavailable")) == 1 and len(service.said("store_answers")) == 1
        assert await service.end() == 0


async def test_packages_that_shadow_ours_are_named(tmp_path: Path) -> None:
    """A scheduler.py in front of ours on the path: one line that says so, and what to do."""
    (tmp_path / "scheduler.py").write_text("raise SystemExit('the wrong one')\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import runpy; "
          "sys.argv = ['gateway']; runpy.run_module('gateway', run_name='__main__')", str(tmp_path)),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await process.communicate()
    assert process.returncode == 1
    assert re.search(rb"scheduler is taken from .*scheduler\.py", said), said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_second_signal_hurries(
    settings: Settings, store: Store, answerer: Answerer, gate: Gate, workers: int
) -> None:
    """It cuts the drain and the grace short; those who wait are still told draining."""
    async with run_service(*options(settings, workers=workers, drain="30", grace="30")) as service:
        await until("all workers are there", lambda: len(service.said("store_answers")) == workers)
        async with httpx.AsyncClient(base_url=service.url, timeout=20) as http:
            waiting = asyncio.create_task(infer(http, "k"))
            await until("the job runs", lambda: bool(answerer.seen))
            service.process.send_signal(signal.SIGTERM)
            await until("all workers drain", lambda: len(service.said("gateway_drains")) == workers)

            async def is_told() -> bool:
                service.process.send_signal(signal.SIGTERM)
                await asyncio.wait({waiting}, timeout=0.3)
                return waiting.done()

            await until("the one who waits is told", is_told)
            assert (await waiting).json()["code"] == "draining"
        assert await asyncio.wait_for(service.process.wait(), 10) == 0


END_AT_A_START = """
import os, signal, sys
from multiprocessing.context import ForkProcess
from gateway.__main__ import main

moment, last = sys.argv[1], int(sys.argv[2])
step, taken = getattr(ForkProcess, moment), []

def step_and_end(process, *args, **named):
    step(process, *args, **named)
    taken.append(process)
    if len(taken) == last:
        os.kill(os.getpid(), signal.SIGTERM)

setattr(ForkProcess, moment, step_and_end)
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize("moment", ["__init__", "start"])
@pytest.mark.parametrize("at", [1, 2])
async def test_an_end_that_comes_while_workers_start_is_the_end(
    settings: Settings, store: Store, moment: str, at: int
) -> None:
    """SIGTERM right before a worker's fork or right after it, before anything else happened: no worker misses
    it, and none begins with a socket that is closed.
    """
    command = (sys.executable, "-c", END_AT_A_START, moment, str(at), *options(settings, workers=2))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
    try:
        _, said = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0 and b"Traceback" not in said, said.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


LONG_PAUSE = """
import sys
from gateway import serve
from gateway.__main__ import main

serve.RESPAWN_S, serve.HEALTHY_S = 3600.0, 0.0
sys.exit(main(sys.argv[1:]))
"""


async def test_an_end_is_not_kept_waiting_by_the_pause_before_a_restart(
    settings: Settings, store: Store
) -> None:
    """While the parent waits before it replaces a worker that died, SIGTERM ends it all the same."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LONG_PAUSE, *options(settings, workers=2)),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=asyncio.subprocess.PIPE,
    )
    service = Service(process)
    service.reading = asyncio.create_task(service.collect())
    try:
        await until("all workers are there", lambda: len(service.said("store_answers")) == 2)
        os.kill(service.workers()[0], signal.SIGKILL)
        await until("its death is seen", lambda: bool(service.said("gateway_worker_died")))
        assert await service.end() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
