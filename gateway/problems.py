"""Refusals on their way out: problem documents (RFC 9457), their headers, one log event and one count each.

Owns: how any exception becomes an answer, also those that Starlette raises by itself. Does not own: the table
of codes (`vramgate.errors`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import headers, metrics, rendering
from scheduler.logs import log_event
from vramgate.errors import (
    ClientLeft,
    Internal,
    InvalidInput,
    Malformed,
    MethodNotAllowed,
    Refused,
    TooLarge,
    UnknownRoute,
    UnsupportedMediaType,
    VramgateError,
)

logger = logging.getLogger("gateway")

LINGER_S = 5.0
SILENCE_S = 0.5
PROBLEM_JSON = "application/problem+json"
BODY_BYTES = "vramgate.body_bytes"
"""Key in the scope under which `gateway.body` leaves how much of the body it read."""

BODY_READ = "vramgate.body_read"
"""Key in the scope that `gateway.body` sets to True once it has read the body to its end."""


def as_refused(error: Exception) -> Refused:
    """The refusal that an exception stands for; `internal` where it is a fault of ours."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, ClientDisconnect):
        return ClientLeft()
    if isinstance(error, RequestValidationError):
        return InvalidInput(str(error.errors()[0].get("msg", "the request is not valid")))
    if isinstance(error, HTTPException):
        return _from_starlette(error)
    return Internal("vramgate failed at this request; the gateway's log names the cause")


def _from_starlette(error: HTTPException) -> Refused:
    match error.status_code:
        case 404:
            return UnknownRoute()
        case 405:
            return MethodNotAllowed()
        case 413:
            return TooLarge()
        case 415:
            return UnsupportedMediaType()
        case status if 400 <= status < 500:
            return Malformed(error.detail)
    return Internal()


def respond(request: Request, error: Exception) -> Response:
    """The answer to a request that raised `error`, logged and counted."""
    refused = as_refused(error)
    _record(request, refused, error)
    is_unread = refused.code == "too_large" and not request.scope.get(BODY_READ, False)
    response = problem_response(refused, is_unread=is_unread)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


def problem_response(refused: Refused, *, is_unread: bool = False) -> Response:
    """The problem document. Whoever is told to come back is told when, at least 1 s from now.

    is_unread: the client may still be sending a body that nobody will read.
    """
    if refused.retry == "after":
        refused.retry_after_s = max(1, refused.retry_after_s or 1)
    extra = {}
    if refused.retry_after_s is not None:
        extra["Retry-After"] = str(refused.retry_after_s)
    # A value that no header can carry would end the connection in place of the answer.
    if refused.job_id is not None and refused.job_id.isascii() and refused.job_id.isprintable():
        extra["X-Job-Id"] = refused.job_id
    # The rest of the body is not read, so its connection cannot carry another request.
    if is_unread:
        extra["Connection"] = "close"
    kind = LastWords if is_unread else Response
    return kind(
        rendering.dumps(refused.problem()),
        status_code=refused.status,
        headers=extra,
        media_type=PROBLEM_JSON,
    )


class LastWords(Response):
    """An answer to a client that is still sending: sent at once, and the rest is heard out for a moment.

    Closing with unread bytes resets the connection, and then the client never reads why.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    while True:
        async with asyncio.timeout(SILENCE_S):
            message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def _record(request: Request, refused: Refused, error: Exception) -> None:
    is_ours = refused.code == "internal" and not isinstance(error, VramgateError)
    if is_ours:
        logger.error("request_failed", exc_info=error)
    read = request.scope.get(BODY_BYTES)
    log_event(
        logger,
        "client_left" if refused.code == "client_left" else "request_refused",
        logging.ERROR if is_ours else logging.INFO,
        code=refused.code,
        status=refused.status,
        peer=request.client.host if request.client else None,
        bytes=read if read is not None else (headers.get(request, b"content-length") or "0")[:20],
        path=request.url.path[:200],
        job=refused.job_id,
        request_id=headers.request_id(request),
        detail=refused.detail[:300],
    )
    metrics.REFUSED.labels(refused.code).inc()


async def _handle(request: Request, error: Exception) -> Response:
    response = respond(request, error)
    response.headers.update(headers.echoed(request))
    return response


def install(app: FastAPI) -> None:
    """Answer what no route of ours has seen (no such route, wrong method, a fault in the framework) alike."""
    for kind in (HTTPException, RequestValidationError, Refused, Exception):
        app.add_exception_handler(kind, _handle)
