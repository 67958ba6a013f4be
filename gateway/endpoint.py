"""One operation as an ASGI application, those of one path together, and the short way to them.

Owns: what is common to every route: its query, refusals, echoed headers, counts. It reads the request itself,
so none of FastAPI's parsing runs. Does not own: which routes there are (`gateway.routes`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import Counter
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import headers, metrics, problems, query
from gateway.context import Gateway
from gateway.routes import Operation


class Endpoint:
    """Answers the requests of one operation; raises only where an answer could not be sent."""

    def __init__(self, gateway: Gateway, operation: Operation) -> None:
        self._gateway = gateway
        self._operation = operation
        self._seconds = metrics.SECONDS.labels(operation.name)
        self._answered: dict[int, Counter] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        began = time.perf_counter()
        try:
            if scope["query_string"] and not self._operation.reads_query:
                query.check_names(request, self._operation.query)
            response = await self._operation.run(self._gateway, request)
        except Exception as error:
            response = problems.respond(request, error)
        echo = headers.echoed(request)
        if echo:
            response.headers.update(echo)
        if self._gateway.lifecycle.is_draining:
            # The connection is about to be closed; a client that reuses it would lose its request.
            response.headers["Connection"] = "close"
        self._seconds.observe(time.perf_counter() - began)
        self._count(response.status_code)
        await response(scope, receive, send)

    def _count(self, status: int) -> None:
        counter = self._answered.get(status)
        if counter is None:
            counter = self._answered[status] = metrics.REQUESTS.labels(self._operation.name, str(status))
        counter.inc()


class Resource:
    """The operations of one path by their methods. HEAD is answered as GET; the server sends no body."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        await self._endpoints["GET" if method == "HEAD" else method](scope, receive, send)


class ShortWay:
    """The application for a server of ours, which puts nothing before it: a request that a route of ours
    matches goes there straight.

    The framework makes ten calls around each request, for dependencies, for errors of endpoints, for who
    watches. An endpoint here needs none of them, and they were a quarter of what Python did for a request.
    All else goes the framework's way (no such route, a wrong method, start and end), and so does every
    request of whoever mounts the application or puts middleware before it.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[Route]) -> None:
        self._app = app
        self._routes = tuple(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for route in self._routes:
                match, found = route.matches(scope)
                if match is Match.FULL:
                    scope["app"] = self._app
                    scope.update(found)
                    await self._answer(route.app, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _answer(self, endpoint: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await endpoint(scope, receive, send)
        except Exception as error:
            # Its answer has begun, so it is logged and counted here, and the server cuts the connection.
            problems.respond(Request(scope), error)
            raise
