"""The application: create_app(settings).

Owns: how the parts of one worker are put together, started and ended, and what is common to every route
(problems, echoed headers, counts). Does not own: sockets, signals and worker processes (`gateway.serve`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from gateway import headers, metrics, openapi, problems
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
    app = FastAPI(title=TITLE, version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    app.router.route_class = LeanRoute
    problems.install(app)
    for operation in OPERATIONS:
        methods = ["GET", "HEAD"] if operation.tag == "health" else [operation.method]
        app.add_api_route(
            operation.path,
            _bind(gateway, operation),
            methods=methods,
            name=operation.name,
            include_in_schema=False,
        )
    app.openapi = lambda: openapi.document(title=TITLE, version=VERSION)  # type: ignore[method-assign]
    return app


class LeanRoute(APIRoute):
    """A route whose endpoint reads the request itself: nothing of FastAPI's parsing runs for it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


def _bind(gateway: Gateway, operation: Operation) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    run, name = operation.run, operation.name
    seconds = metrics.SECONDS.labels(name)

    async def endpoint(request: Request) -> Response:
        began = time.perf_counter()
        try:
            response = await run(gateway, request)
        except Exception as error:
            response = problems.respond(request, error)
        echo = headers.echoed(request)
        if echo:
            response.headers.update(echo)
        if gateway.lifecycle.is_draining:
            # The connection is about to be closed; a client that reuses it would lose its request.
            response.headers["Connection"] = "close"
        seconds.observe(time.perf_counter() - began)
        metrics.REQUESTS.labels(name, str(response.status_code)).inc()
        return response

    return endpoint
