"""The application: create_app(settings).

Owns: how the parts of one worker are put together, started and ended, and what is common to every route
(problems, echoed headers, counts). Does not own: sockets, signals and worker processes (`gateway.serve`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway import headers, metrics, openapi, paths, problems
from gateway.catalogue import Catalogue
from gateway.context import Gateway
from gateway.ledger import Ledger
from gateway.lifecycle import Lifecycle
from gateway.routes import OPERATIONS, Operation
from scheduler.settings import Settings

TITLE = "vramgate"
VERSION = "0.1.0"


def create_app(
    settings: Settings, *, ledger: Ledger | None = None, lifecycle: Lifecycle | None = None
) -> FastAPI:
    """One worker's application. `ledger` and `lifecycle` are given by the process that drives it."""
    ledger = ledger or Ledger(settings)
    gateway = Gateway(settings, ledger, Catalogue(ledger), lifecycle or Lifecycle())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.ledger.start(gateway.catalogue.refresh)
        gateway.lifecycle.is_started = True
        try:
            yield
        finally:
            gateway.lifecycle.close()
            await gateway.ledger.close()

    # The usual pages of FastAPI load their scripts from elsewhere; a box with GPUs often has no way there.
    # And a redirect to the path without a last slash names the host that a proxy spoke to.
    app = FastAPI(
        title=TITLE, version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.gateway = gateway
    problems.install(app)
    for operation in OPERATIONS:
        methods = ["GET", "HEAD"] if operation.tag == "health" else [operation.method]
        app.router.routes.append(
            Route(
                paths.of(operation.path), _Endpoint(gateway, operation), methods=methods, name=operation.name
            )
        )
    app.openapi = lambda: openapi.document(title=TITLE, version=VERSION)  # type: ignore[method-assign]
    return app


class _Endpoint:
    """One route as an ASGI application: it reads the request itself, so none of FastAPI's parsing runs."""

    def __init__(self, gateway: Gateway, operation: Operation) -> None:
        self._gateway = gateway
        self._run = operation.run
        self._name = operation.name
        self._seconds = metrics.SECONDS.labels(operation.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        began = time.perf_counter()
        try:
            response = await self._run(self._gateway, request)
        except Exception as error:
            response = problems.respond(request, error)
        echo = headers.echoed(request)
        if echo:
            response.headers.update(echo)
        if self._gateway.lifecycle.is_draining:
            # The connection is about to be closed; a client that reuses it would lose its request.
            response.headers["Connection"] = "close"
        self._seconds.observe(time.perf_counter() - began)
        metrics.REQUESTS.labels(self._name, str(response.status_code)).inc()
        await response(scope, receive, send)
