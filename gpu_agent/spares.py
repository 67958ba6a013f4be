"""One spare child per card: torch is imported, no card is opened, and it waits.

When the child that serves is lost, the imports would take longer than all the rest together. A spare costs
host memory and nothing of the card. Owns the spare until it is taken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from gpu_agent.child_process import ChildFailed, ChildProcess, Setup
from scheduler.logs import log_event

_LOG = logging.getLogger(__name__)
INTERVAL_S = 2.0
PATIENCE_S = 60.0


class Spares:
    """At most one child that waits."""

    def __init__(self, setup: Setup, *, card: str) -> None:
        self._setup = setup
        self._card = card
        self._spare: ChildProcess | None = None
        self._not_before = 0.0

    async def take(self, on_message: Callable[[dict[str, Any]], None]) -> ChildProcess:
        """A child that has opened the card: the spare, else a fresh one. Raises ChildFailed."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.is_alive:
            try:
                await spare.begin(on_message)
                return spare
            except ChildFailed as error:
                log_event(_LOG, "spare_failed", logging.WARNING, card=self._card, reason=error.detail)
        return await ChildProcess.start(self._setup, on_message=on_message)

    async def run(self, is_wanted: Callable[[], bool]) -> None:
        """Keep a spare alive while the card is ready, until cancelled."""
        while True:
            # Shorter than any watchdog, and late enough not to slow the first requests down.
            await asyncio.sleep(INTERVAL_S)
            if self._spare is not None and self._spare.is_alive:
                self._spare.send({"t": "ping"})
            elif is_wanted() and time.monotonic() >= self._not_before:
                # One that ended by itself will do so again: not every two seconds.
                self._not_before = time.monotonic() + (PATIENCE_S if self._spare is not None else 0.0)
                self._spare = await ChildProcess.spawn(self._setup)
                log_event(_LOG, "spare_started", card=self._card, pid=self._spare.pid)

    async def close(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()
            await spare.ended()
