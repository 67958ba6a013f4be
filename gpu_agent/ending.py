"""Waits and ends of tasks that a cancel cannot get lost in.

Python 3.11's `asyncio.wait_for` drops a cancel that comes in the same turn as what it waits for; libraries
use it too. Hence `happens_within` for our own waits, and `end_tasks`, which asks more than once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

from scheduler.logs import log_event

_LOG = logging.getLogger(__name__)
AGAIN_S = 0.5
BOUND_S = 5.0


async def happens_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most so long. True: it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def end_tasks(tasks: Collection[asyncio.Task[Any]], *, bound_s: float = BOUND_S) -> None:
    """Cancel tasks until they are over; one that is not within the bound is left behind, and named."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + bound_s
    left: set[asyncio.Task[Any]] = {task for task in tasks if not task.done()}
    while left and (rest_s := deadline - loop.time()) > 0:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=min(AGAIN_S, rest_s))
    for task in left:
        log_event(_LOG, "task_not_ended", logging.ERROR, task=task.get_name(), bound_s=bound_s)
