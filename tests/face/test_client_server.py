"""vramgate.AsyncClient over real sockets: impatience, dropped connections, gateways that are down."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from vramgate import AsyncClient, errors

Behaviour = Callable[[int, Request], Awaitable[Response]]


class Stub:
    """A gateway's infer route that does as the test says, for each request by its number."""

    def __init__(self, behave: Behaviour) -> None:
        self.keys: list[str] = []
        self.bodies: list[bytes] = []
        self.app = FastAPI()

        @self.app.post("/v1/models/{model}/infer")
        async def infer(model: str, request: Request) -> Response:
            self.keys.append(request.headers["idempotency-key"])
            self.bodies.append(await request.body())
            return await behave(len(self.keys), request)


def answer(**headers: str) -> Response:
    body = {
        "id": "1" * 32,
        "model": "m",
        "version": "1",
        "outputs": 1,
        "card": "SIM-00000000-0",
        "timing": {"wait_ms": 0, "run_ms": 0, "total_ms": 0},
        "vram": {"leased_bytes": 1, "peak_bytes": 1},
        "degraded": None,
    }
    return JSONResponse(body, headers=headers)


@asynccontextmanager
async def serving(stub: Stub) -> AsyncIterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(stub.app, log_level="warning", timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        async with asyncio.timeout(20):
            while not server.started:
                await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@pytest.fixture
def closed_url() -> str:
    """An address of this machine at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


async def test_an_impatient_client_gets_the_answer_of_its_key() -> None:
    """A try that times out is sent again under its key; the answer that is there by then is the caller's."""
    released = asyncio.Event()

    async def behave(number: int, request: Request) -> Response:
        if number < 3:
            await released.wait()
        released.set()
        return answer(**{"Idempotency-Replayed": "true"})

    stub = Stub(behave)
    async with serving(stub) as url, AsyncClient(url, timeout_s=0.3) as client:
        got = await client.infer("m", {"blob": b"x" * 100_000}, deadline_s=30)
    assert (got.tries, got.replayed) == (3, True)
    assert len(set(stub.keys)) == 1
    assert len(set(stub.bodies)) == 1


async def test_a_connection_that_is_cut_is_tried_again() -> None:
    """A gateway that dies within its answer costs a try, not the request."""

    class Cut(Response):
        async def __call__(
            self, scope: object, receive: object, send: Callable[..., Awaitable[None]]
        ) -> None:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"500")]}
            )
            await send({"type": "http.response.body", "body": b'{"id": ', "more_body": True})
            raise ConnectionResetError("the gateway was killed")

    async def behave(number: int, request: Request) -> Response:
        return Cut() if number == 1 else answer()

    stub = Stub(behave)
    async with serving(stub) as url, AsyncClient(url) as client:
        assert (await client.infer("m", {}, deadline_s=30)).tries == 2
    assert len(set(stub.keys)) == 1


async def test_the_other_gateway_takes_over(closed_url: str) -> None:
    """With one of two gateways down, every request is answered by the other."""

    async def behave(number: int, request: Request) -> Response:
        return answer()

    async with serving(Stub(behave)) as url, AsyncClient([closed_url, url]) as client:
        answers = await asyncio.gather(*(client.infer("m", body=b"x", deadline_s=30) for _ in range(20)))
    assert {got.tries for got in answers} <= {1, 2}


async def test_nobody_there(closed_url: str) -> None:
    """With no gateway up, the caller hears so at its deadline, with the address."""
    async with AsyncClient(closed_url) as client:
        with pytest.raises(errors.Unreachable, match=closed_url):
            await client.infer("m", {}, deadline_s=0.5)


async def test_the_deadline_ends_a_silent_try() -> None:
    """The deadline cuts a try that would otherwise wait for the job's total limit; the server sees the client
    go."""
    gone = asyncio.Event()

    async def behave(number: int, request: Request) -> Response:
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        gone.set()
        return answer()

    async with serving(Stub(behave)) as url, AsyncClient(url) as client:
        with pytest.raises(errors.Unreachable):
            await client.infer("m", {}, deadline_s=0.3)
        async with asyncio.timeout(20):
            await gone.wait()


async def test_a_cancelled_call_closes_its_connection() -> None:
    """Cancelling the task ends the request at the server and goes on to the caller."""
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def behave(number: int, request: Request) -> Response:
        arrived.set()
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        gone.set()
        return answer()

    stub = Stub(behave)
    async with serving(stub) as url, AsyncClient(url) as client:
        call = asyncio.create_task(client.infer("m", {}))
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(20):
            await gone.wait()
    assert len(stub.keys) == 1
