"""The end of background tasks: how long it is waited for. A task itself must look at its stop flag."""

from __future__ import annotations

import asyncio
import time
from typing import Any

AGAIN_S = 1.0
WITHIN_S = 5.0


async def end(*tasks: asyncio.Task[Any], within_s: float = WITHIN_S) -> bool:
    """Cancel `tasks` and wait for their end, within a bound; whether all ended.

    They are cancelled again while they run: on Python 3.11 `asyncio.wait_for`, which the client of the
    ledger uses, swallows a cancel that arrives together with its result.
    """
    deadline = time.monotonic() + within_s
    left = {task for task in tasks if not task.done()}
    while left and time.monotonic() < deadline:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=min(AGAIN_S, within_s))
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # an exception that nobody fetched would be logged by asyncio
    return not left
