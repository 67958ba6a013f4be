"""Waiting for an outcome while the client is still there.

Owns: the first of four ends of a wait: the outcome, the client's disconnect, the last moment, or this
worker's own end. Does not own: what is done then.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import Receive

from gateway import metrics
from gateway.context import Gateway
from gateway.protocol import WATCH, Watch
from scheduler.submissions import Outcome


class Ended(enum.Enum):
    """Why a wait ended without an outcome."""

    LEFT = "the client left"
    LATE = "the last moment passed"
    CLOSING = "this worker ends"


async def wait_for_outcome(
    gateway: Gateway, job_id: str, request: Request, *, timeout_s: float, is_listener: bool = False
) -> Outcome | Ended:
    """The outcome, or why there is none.

    is_listener: the caller can ask again elsewhere, so a worker that ends does not wait for this.
    The body must have been read: what else the client may send is its disconnect.
    """
    ended = gateway.ledger.expect(job_id)

    def end(how: Ended) -> None:
        if not ended.done():
            ended.set_result(how)

    stop_watching = _watch(request, lambda: end(Ended.LEFT))
    timer = asyncio.get_running_loop().call_later(timeout_s, end, Ended.LATE)
    ticket = gateway.lifecycle.wait_here(lambda: end(Ended.CLOSING), is_listener=is_listener)
    metrics.WAITING.inc()
    try:
        how: Outcome | Ended = await ended
        return how
    finally:
        metrics.WAITING.dec()
        gateway.lifecycle.leave(ticket)
        timer.cancel()
        stop_watching()
        gateway.ledger.forget(job_id, ended)


def _watch(request: Request, left: Callable[[], None]) -> Callable[[], object]:
    """Call `left` when the client is gone; the end of that is returned."""
    watch: Watch | None = request.scope.get(WATCH)
    if watch is not None:
        return watch(left)
    task = asyncio.get_running_loop().create_task(until_disconnect(request.receive), name="disconnect")
    task.add_done_callback(lambda done: None if done.cancelled() else left())
    return task.cancel


async def until_disconnect(receive: Receive) -> None:
    """Return when the client is gone. What it sends before, beyond the body that was read, is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
