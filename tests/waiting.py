"""Waiting for what a test expects: for a claim to become true, never for a duration."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar, overload

T = TypeVar("T")
PATIENCE_S = 60.0
"""Far more than any claim needs on a machine that has other things to do."""

PAUSE_S = 0.02


@overload
async def until(
    claim: str, check: Callable[[], Awaitable[T | None]], *, patience_s: float = ..., pause_s: float = ...
) -> T: ...


@overload
async def until(
    claim: str, check: Callable[[], bool], *, patience_s: float = ..., pause_s: float = ...
) -> bool: ...


async def until(
    claim: str,
    check: Callable[[], object],
    *,
    patience_s: float = PATIENCE_S,
    pause_s: float = PAUSE_S,
) -> object:
    """What `check` gives once that is true; AssertionError that names the claim when it does not come."""
    deadline = time.monotonic() + patience_s
    while True:
        found = check()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {claim}"
        await asyncio.sleep(pause_s)


def wait_for(claim: str, check: Callable[[], T], *, patience_s: float = PATIENCE_S) -> T:
    """`until` for tests without an event loop."""
    deadline = time.monotonic() + patience_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {claim}"
        time.sleep(PAUSE_S)
    return found


def is_running(pid: int) -> bool:
    """Whether a process lives; one that is dead and not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
