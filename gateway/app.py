"""The application: create_app(settings).

Owns: how the parts of one worker are put together, started and ended. Does not own: what is common to every
route (`gateway.endpoint`); sockets, signals and worker processes (`gateway.serve`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.routing import Route

from gateway import openapi, paths, problems
from gateway.catalogue import Catalogue
from gateway.context import Gateway
from gateway.endpoint import Endpoint, Resource, ShortWay
from gateway.ledger import Ledger
from gateway.lifecycle import Lifecycle
from gateway.routes import OPERATIONS
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
    for path in dict.fromkeys(operation.path for operation in OPERATIONS):
        # One route for all methods of a path, so that a 405 names them all.
        endpoints = {each.method: Endpoint(gateway, each) for each in OPERATIONS if each.path == path}
        app.router.routes.append(Route(paths.of(path), Resource(endpoints), methods=list(endpoints)))
    app.openapi = lambda: openapi.document(title=TITLE, version=VERSION)  # type: ignore[method-assign]
    return app


def short_way(app: FastAPI) -> ShortWay:
    """The same application for a server of ours, which puts nothing before it."""
    ours = [route for route in app.routes if isinstance(route, Route) and isinstance(route.app, Resource)]
    return ShortWay(app, ours)
