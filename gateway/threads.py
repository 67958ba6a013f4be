"""Work that would hold the event loop for too long: parsing, checking and encoding of large bodies.

A thread does not make it faster. It lets the loop go on answering others, and keep the session, in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LARGE_BYTES = 256 * 1024
"""Below this the work takes a few milliseconds at most, and the way to a thread and back would cost more."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread where it is about `size` bytes and those are many."""
    return work() if size < LARGE_BYTES else await asyncio.to_thread(work)
