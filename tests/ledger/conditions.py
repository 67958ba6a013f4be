"""Waiting for what a test expects, by a condition with a name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(
    holds: Callable[[], Awaitable[bool]], what: str, *, timeout_s: float = 10.0, pause_s: float = 0.02
) -> None:
    """Until `holds`; AssertionError that names `what` after the time-out."""
    deadline = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < deadline, f"still waiting after {timeout_s} s until {what}"
        await asyncio.sleep(pause_s)
