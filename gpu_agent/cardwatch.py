"""Follows one card by its driver and its child: the allocator's cap, hardware events, a card that is gone, a
child that does not answer.

Owns: what the child's allocator was last bounded to, and since when the driver gives no reading. Does not
own what follows for the card: it says so, and the supervisor acts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gpu_agent import budget
from gpu_agent.child_process import ChildProcess
from gpu_agent.sampler import Sampler
from scheduler.logs import log_event

_LOG = logging.getLogger(__name__)
PATIENCE_S = 60.0
BLAMES_THE_JOB = frozenset({13, 31, 43, 45})
"""Xids that a program's own fault raises; any other speaks of the hardware or its driver."""


@dataclass(frozen=True, slots=True)
class Consequences:
    """What the supervisor does about a card."""

    cordon: Callable[[str], Awaitable[None]]
    lost: Callable[[str], None]
    found: Callable[[], None]
    give_up: Callable[[str], None]
    silent: Callable[[float], None]


class CardWatch:
    """One look every beat."""

    def __init__(
        self, sampler: Sampler, then: Consequences, *, card: str, headroom: int, hangs_after_s: float
    ) -> None:
        self._sampler = sampler
        self._then = then
        self._card = card
        self._headroom = headroom
        self._hangs_after_s = hangs_after_s
        self._child: ChildProcess | None = None
        self._cap: int | None = None
        self._unreadable_since: float | None = None
        self._is_lost = False

    async def run(self, interval_s: float) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.look()

    async def follow(self, child: ChildProcess | None) -> None:
        """Bound this child's allocator from now on."""
        self._child, self._cap = child, None
        await self._set_cap()

    async def look(self) -> None:
        if self._child is not None:
            # Also when there is nothing to say: the child ends itself when it hears nothing.
            self._child.send({"t": "ping"})
        for xid in await self._sampler.xids():
            log_event(_LOG, "xid", logging.WARNING, card=self._card, xid=xid)
            if xid not in BLAMES_THE_JOB:
                await self._then.cordon(f"the driver reported Xid {xid}")
        await self._set_cap()
        if self._child is not None and self._sampler.silence_s > 0:
            self._then.silent(self._sampler.silence_s)
        self._note_readability()

    async def _set_cap(self) -> None:
        sample = await self._sampler.take()
        child = self._child
        if sample is None or child is None:
            return
        cap = budget.allocator_cap(sample, headroom=self._headroom)
        if budget.has_moved(cap, self._cap, total=sample.total):
            self._cap = cap
            child.send({"t": "cap", "bytes": cap})

    def _note_readability(self) -> None:
        trouble, stuck_s = self._sampler.trouble, self._sampler.stuck_s
        if trouble is None and stuck_s <= self._hangs_after_s:
            self._unreadable_since = None
            if self._is_lost:
                self._is_lost = False
                log_event(_LOG, "card_found", card=self._card)
                self._then.found()
            return
        reason = trouble.reason if trouble is not None else f"the driver has hung for {stuck_s:.0f} s"
        if self._unreadable_since is None:
            self._unreadable_since = time.monotonic()
            log_event(_LOG, "card_unreadable", logging.ERROR, card=self._card, reason=reason)
        if trouble is not None and trouble.lost and not self._is_lost:
            self._is_lost = True
            self._then.lost(reason)
        if time.monotonic() - self._unreadable_since > PATIENCE_S:
            self._then.give_up(f"card {self._card}: {reason}; the agent gives up")
