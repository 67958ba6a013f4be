"""This agent's sessions on its card: begun, lost, begun anew, left.

Owns: registration with its patience, the exchange and the events of the current session, and their tasks.
Does not own: the work (`intake`), or what the loss of a session means for the child (`life`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gpu_agent.clock import ServerClock
from gpu_agent.ending import end_tasks, happens_within
from gpu_agent.events import Emitter
from gpu_agent.exchange import Exchange
from gpu_agent.held import Held
from gpu_agent.intake import Intake
from gpu_agent.sampler import Sampler
from gpu_agent.voice import Voice
from scheduler import cards
from scheduler.cards import CardTaken, SessionLost, StaleSeq
from scheduler.logs import log_event
from scheduler.registration import CardRegistration
from scheduler.store import Store
from vramgate.errors import StoreUnavailable, VramgateError

_LOG = logging.getLogger(__name__)


class Stopped(Exception):
    """The agent was told to stop before it held its card."""


class Session:
    """The current session, if there is one."""

    def __init__(
        self,
        store: Store,
        *,
        card: str,
        describe: Callable[[str], CardRegistration],
        held: Held,
        intake: Intake,
        sampler: Sampler,
        clock: ServerClock,
        voice: Voice,
        lost: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._store = store
        self._card = card
        self._describe = describe
        self._held = held
        self._intake = intake
        self._sampler = sampler
        self._clock = clock
        self._voice = voice
        self._lost = lost
        self._failed = failed
        self._tasks: list[asyncio.Task[None]] = []
        self.id = ""
        self.is_lost = False
        self.exchange: Exchange | None = None
        self.emitter: Emitter | None = None

    async def begin(self, stopping: asyncio.Event) -> None:
        """Take the card. One that another session holds is waited for: it may be our own of before, dying.

        Raises CardTaken when it lives on, Stopped.
        """
        session = secrets.token_hex(16)
        self._clock.hear(await self._register(session, stopping))
        self.id, self.is_lost = session, False
        emitter = self.emitter = Emitter(self._store, card=self._card, session=session)
        exchange = self.exchange = Exchange(
            self._store,
            card=self._card,
            session=session,
            held=self._held,
            intake=self._intake,
            sampler=self._sampler,
            clock=self._clock,
            emitter=emitter,
            applied_changed=self._voice.refresh,
        )
        self._tasks = [
            asyncio.create_task(self._guard(exchange.run()), name="exchange"),
            asyncio.create_task(self._guard(emitter.run()), name="events"),
        ]
        self._voice.speak_for(session, lambda: exchange.applied)
        log_event(_LOG, "card_registered", card=self._card, session=session)

    async def renew(self, stopping: asyncio.Event) -> None:
        """Begin anew after a loss, with a reading that was taken after the old work had ended."""
        await self._end_tasks()
        await self._sampler.take()
        await self.begin(stopping)

    async def leave(self, *, timeout_s: float) -> None:
        """The clean end. No beat may follow it."""
        await self._end_tasks()
        try:
            async with asyncio.timeout(timeout_s):
                await cards.leave(self._store, card=self._card, session=self.id)
        except (VramgateError, TimeoutError) as error:
            log_event(_LOG, "leave_failed", logging.WARNING, card=self._card, reason=str(error))

    async def card_down(self, reason: str, stopping: asyncio.Event) -> None:
        """Say that the card is not ready; when the session is lost meanwhile, a new one says so by its
        registration.
        """
        try:
            if self.exchange is not None and not self.is_lost:
                await self.exchange.card_down(reason)
        except (SessionLost, StaleSeq):
            self.lose(self.id)
        if self.is_lost:
            await self.renew(stopping)

    async def settle(self, *, timeout_s: float) -> None:
        """Deliver the reports at hand, as far as the time allows."""
        try:
            if self.exchange is not None and not self.is_lost:
                await self.exchange.settle(timeout_s=timeout_s)
        except (SessionLost, StaleSeq):
            self.lose(self.id)

    def lose(self, session: str) -> None:
        """The ledger gave this session up."""
        if session != self.id or self.is_lost:
            return
        self.is_lost = True
        log_event(_LOG, "session_lost", logging.WARNING, card=self._card, session=session)
        self._voice.fall_silent()
        self._intake.session_lost()
        self._lost()

    def hint(self) -> None:
        if self.exchange is not None:
            self.exchange.hint()

    def kick(self) -> None:
        if self.exchange is not None:
            self.exchange.kick()

    async def _register(self, session: str, stopping: asyncio.Event) -> int:
        session_s = self._store.settings.clocks.session_s
        deadline = time.monotonic() + 3 * session_s + 2
        is_told = False
        while True:
            try:
                return await cards.register(
                    self._store, self._describe(session), state=self._voice.state, reason=self._voice.reason
                )
            except CardTaken as error:
                if time.monotonic() > deadline:
                    raise
                reason = error.detail
            except StoreUnavailable as error:
                reason = error.detail
            if not is_told:
                log_event(_LOG, "card_awaited", logging.WARNING, card=self._card, reason=reason)
            is_told = True
            # Often: after a silence of half a session the ledger grants every session a grace, and ours
            # may be the only voice there is.
            if await happens_within(stopping, session_s / 10):
                raise Stopped

    async def _guard(self, work: Awaitable[Any]) -> None:
        try:
            await work
        except (SessionLost, StaleSeq):
            self.lose(self.id)
        except Exception as error:
            self._failed(error)

    async def _end_tasks(self) -> None:
        await end_tasks(self._tasks)
