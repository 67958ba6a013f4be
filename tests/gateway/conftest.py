"""A gateway worker in the test's loop, before a real server, and an agent that answers as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import httpx
import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.app import create_app, short_way
from gateway.context import Gateway
from gateway.protocol import BoundedProtocol
from scheduler.handover import HandedJob, Report
from scheduler.registration import HostedModel
from scheduler.settings import Settings
from scheduler.store import Store
from tests.ledger.fake_agent import FakeAgent, ok
from tests.waiting import until

MIB = 2**20
PICTURE: dict[str, object] = {
    "type": "object",
    "properties": {
        "image": {"type": "string", "format": "binary", "minLength": 1, "maxLength": 1_000_000},
        "note": {"type": "string", "default": ""},
    },
    "required": ["image"],
}
SQUARE: dict[str, object] = {
    "type": "object",
    "properties": {
        "height": {"type": "integer", "minimum": 1, "maximum": 4096},
        "width": {"type": "integer", "minimum": 1},
        "grid": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    },
    "required": ["height", "width"],
    "additionalProperties": False,
}


def hosted(name: str, schema: dict[str, object] | None, units: str, *, version: str = "v1") -> HostedModel:
    return HostedModel(
        name=name,
        version=version,
        ready=True,
        reason=None,
        slots=8,
        max_batch=8,
        lanes=1,
        resident_bytes=0,
        c0_item=MIB,
        c1=10.0,
        units=units,
        batch_units="sum",
        schema=schema,
        schema_hash="",
    )


MODELS = (
    hosted("echo", None, "1"),
    hosted("pictures", PICTURE, "pixels(image)"),
    hosted("files", PICTURE, "len(image)"),
    hosted("squares", SQUARE, "height * width"),
)

Handler = Callable[[HandedJob], Awaitable[Report]]


@dataclass
class Answerer:
    """A card whose jobs are answered by `handler`. `seen` are the jobs that were handed out."""

    agent: FakeAgent
    handler: Handler
    seen: list[HandedJob] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    is_stopping: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    _reports: list[Report] = field(default_factory=list)

    async def run(self) -> None:
        """One call to the ledger at a time, as an agent must."""
        while not self.is_stopping:
            await self._turn()
            await asyncio.sleep(0.005)
        for task in self._tasks:
            task.cancel()

    async def _turn(self) -> None:
        reports = [report for report in self._reports[:16] if report.lease_id in self.agent.held]
        del self._reports[:16]
        if reports:
            await self.agent.finish(*reports)
        for job in await self.agent.claim():
            self.seen.append(job)
            self.agent.start(job)
            task = asyncio.create_task(self._answer(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        answer = await self.agent.beat()
        for cancel in answer.cancels:
            self.cancelled.append(cancel.job_id)
            if cancel.lease_id in self.agent.held:
                await self.agent.finish(Report(cancel.job_id, cancel.lease_id, "ended"))

    async def _answer(self, job: HandedJob) -> None:
        self._reports.append(await self.handler(job))


class Gate:
    """A handler that answers once `open` was called; `answered` counts."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self.answered = 0

    def open(self) -> None:
        self._is_open.set()

    async def __call__(self, job: HandedJob) -> Report:
        await self._is_open.wait()
        self.answered += 1
        return ok(job)


async def answer_at_once(job: HandedJob) -> Report:
    return ok(job)


@dataclass(frozen=True)
class Running:
    """A worker that listens."""

    url: str
    port: int
    gateway: Gateway
    server: uvicorn.Server


@contextlib.asynccontextmanager
async def run_gateway(
    settings: Settings, *, protocol: type[HttpToolsProtocol] = BoundedProtocol
) -> AsyncIterator[Running]:
    app = create_app(settings)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            short_way(app),
            http=protocol,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    task = asyncio.create_task(server._serve([listener]))
    await until("the gateway listens", lambda: server.started)
    port = listener.getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", port, app.state.gateway, server)
    finally:
        app.state.gateway.lifecycle.close()
        server.should_exit = True
        await asyncio.wait_for(task, 10)


@pytest.fixture
async def running(settings: Settings, store: Store) -> AsyncIterator[Running]:
    async with run_gateway(settings) as started:
        yield started


@pytest.fixture
async def http(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
        yield client


@pytest.fixture
async def agent(store: Store) -> FakeAgent:
    """A ready card that hosts MODELS; nobody claims its jobs unless the test does."""
    registered = FakeAgent(store, total=1024 * MIB, models=MODELS)
    await registered.register()
    return registered


@pytest.fixture
async def answerer(agent: FakeAgent) -> AsyncIterator[Answerer]:
    """The card's jobs are answered, by default at once with "ok"; set `.handler` before sending."""
    answerer = Answerer(agent, answer_at_once)
    task = asyncio.create_task(answerer.run())
    yield answerer
    # Not cancelled: asyncio.wait_for of Python 3.11, which redis-py sends commands through, may swallow that.
    answerer.is_stopping = True
    await task


@pytest.fixture
def gate(answerer: Answerer) -> Gate:
    """Holds every job of `answerer` until it is opened."""
    answerer.handler = gate = Gate()
    return gate
