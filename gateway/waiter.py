"""Waiting for an outcome while the client is still there.

Owns: the first of four ends of a wait: the outcome, the client's disconnect, the last moment, or this
worker's own end. Does not own: what is done then.
"""

from __future__ import annotations

import asyncio
import enum

from starlette.requests import Request
from starlette.types import Receive

from gateway import metrics
from gateway.lifecycle import Lifecycle
from scheduler.submissions import Outcome


class Ended(enum.Enum):
    """Why a wait ended without an outcome."""

    LEFT = "the client left"
    LATE = "the last moment passed"
    CLOSING = "this worker ends"


async def wait_for_outcome(
    future: asyncio.Future[Outcome],
    request: Request,
    *,
    timeout_s: float,
    lifecycle: Lifecycle,
    is_listener: bool = False,
) -> Outcome | Ended:
    """The outcome, or why there is none. The shared `future` is neither cancelled nor awaited.

    is_listener: the caller can ask again elsewhere, so a worker that ends does not wait for this.
    The body must have been read: what else the client may send is its disconnect.
    """
    if future.done():
        return future.result()
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Ended | None] = loop.create_future()

    def end(how: Ended | None) -> None:
        if not ended.done():
            ended.set_result(how)

    def settled(_: asyncio.Future[Outcome]) -> None:
        end(None)

    def send_away() -> None:
        end(Ended.CLOSING)

    watch = loop.create_task(until_disconnect(request.receive), name="disconnect")
    watch.add_done_callback(lambda task: None if task.cancelled() else end(Ended.LEFT))
    future.add_done_callback(settled)
    timer = loop.call_later(timeout_s, end, Ended.LATE)
    ticket = lifecycle.wait_here(send_away, is_listener=is_listener)
    metrics.WAITING.inc()
    try:
        how = await ended
    finally:
        metrics.WAITING.dec()
        lifecycle.leave(ticket)
        timer.cancel()
        future.remove_done_callback(settled)
        watch.cancel()
    return future.result() if how is None else how


async def until_disconnect(receive: Receive) -> None:
    """Return when the client is gone. What it sends before, beyond the body that was read, is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
