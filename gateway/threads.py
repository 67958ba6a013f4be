"""Work that would hold the event loop for too long: parsing, checking and encoding of large bodies.

A thread does not make it faster. It lets the loop go on answering others, and keep the session, in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE_BYTES = 256 * 1024
"""Below this the work takes a few milliseconds at most, and the way to a thread and back would cost more."""

VALUE_BYTES = 32
"""A value of a document is as much work as so many bytes of a file, or more."""

_THREADS = ThreadPoolExecutor(2, thread_name_prefix="gateway-heavy")
"""Few: all of them share one interpreter with the loop, and each holds a large body several times over."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread where it is about `size` bytes and those are many."""
    if size < LARGE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
