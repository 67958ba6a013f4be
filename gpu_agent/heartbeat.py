"""The heartbeat: on a thread, an event loop and a connection of its own, so that nothing else can hold it up.

Owns: the pace, the deadline of each beat, and that no error ends the loop. Does not own what is said
(`source`) or what follows from the answer (`heard`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import uvloop

from gpu_agent.clock import ServerClock
from gpu_agent.ending import happens_within
from gpu_agent.sampler import Sampler
from scheduler import cards
from scheduler.cards import SessionLost
from scheduler.handover import Beat, BeatAnswer
from scheduler.logs import log_event
from scheduler.settings import Settings
from scheduler.silence import Silence
from scheduler.store import Store
from vramgate.errors import VramgateError

_LOG = logging.getLogger(__name__)
JITTER = 0.1
SHORTEST_PAUSE_S = 0.04
"""Cancels that come together are told in one beat, and none waits long for it."""


@dataclass(frozen=True, slots=True)
class Word:
    """One consistent view of the agent to say in a beat; replaced as a whole. The sample is added when it
    is said.
    """

    session: str
    beat: Beat
    slots: int
    models_number: int = 0


class Heartbeat:
    """Beats while there is a word to say. Callbacks come in the heartbeat's thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        card: str,
        sampler: Sampler,
        clock: ServerClock,
        source: Callable[[], Word | None],
        heard: Callable[[Word, BeatAnswer], None],
        lost: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._card = card
        self._sampler = sampler
        self._clock = clock
        self._source = source
        self._heard = heard
        self._lost = lost
        self._thread = threading.Thread(target=self._main, name="heartbeat", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nudged: asyncio.Event | None = None
        self._stopping = False
        self._silence = Silence()
        self._models_told: tuple[str, int] | None = None
        self._quiet = threading.Event()
        self._quiet.set()

    def start(self) -> None:
        self._thread.start()

    def nudge(self) -> None:
        """Beat now. From any thread."""
        loop, nudged = self._loop, self._nudged
        if loop is not None and nudged is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(nudged.set)
            except RuntimeError:
                # It closed between the check and the call: it is stopping, and has nothing more to say.
                return

    async def pause(self, *, timeout_s: float) -> None:
        """Wait for the beat in progress, so that none with an older word arrives after what the caller
        does next.
        """
        await asyncio.to_thread(self._quiet.wait, timeout_s)

    async def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopping = True
        self.nudge()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, self._settings.clocks.session_s)

    def _main(self) -> None:
        uvloop.run(self._beat_for_ever())

    async def _beat_for_ever(self) -> None:
        self._loop, self._nudged = asyncio.get_running_loop(), asyncio.Event()
        store = Store(self._settings, max_connections=2)
        try:
            while not self._stopping:
                began = time.monotonic()
                self._nudged.clear()
                more = await self._beat(store)
                pause = 0.0 if more else self._settings.clocks.beat_s * random.uniform(1 - JITTER, 1)
                await self._rest(max(SHORTEST_PAUSE_S, pause - (time.monotonic() - began)))
        finally:
            await store.close()

    async def _rest(self, seconds: float) -> None:
        assert self._nudged is not None
        await asyncio.sleep(SHORTEST_PAUSE_S)
        await happens_within(self._nudged, max(0.0, seconds - SHORTEST_PAUSE_S))

    async def _beat(self, store: Store) -> bool:
        """One beat. True: the ledger has more to do for this card."""
        # A reading that takes longer than a beat must not make the beat late.
        sample = await self._sampler.take(timeout_s=self._settings.clocks.beat_s / 2)
        self._quiet.clear()
        word = self._source()
        try:
            if word is None:
                return False
            async with asyncio.timeout(self._settings.clocks.session_s / 3):
                models_are_told = self._models_told == (word.session, word.models_number)
                beat = replace(word.beat, sample=sample, models=None if models_are_told else word.beat.models)
                answer = await cards.heartbeat(
                    store, card=self._card, session=word.session, beat=beat, slots=word.slots
                )
            # A version in dispute is asked for again: whoever holds it may have left meanwhile.
            self._models_told = None if answer.disputed else (word.session, word.models_number)
            self._clock.hear(answer.now_ms)
            self._said(None)
            self._heard(word, answer)
            return answer.more
        except SessionLost:
            if word is not None:
                self._lost(word.session)
        except (VramgateError, TimeoutError, OSError) as error:
            self._said(str(error) or type(error).__name__)
        except Exception:
            # A beat that fails in a way nobody foresaw must not end the beats: the next one may succeed.
            _LOG.exception("beat_failed")
        finally:
            self._quiet.set()
        return False

    def _said(self, trouble: str | None) -> None:
        """Log the changes between hearing and silence, and a silence that lasts; not each beat."""
        silent_s = self._silence.ended() if trouble is None else self._silence.lasts()
        if silent_s is not None:
            name = "heartbeat_answered" if trouble is None else "heartbeat_unanswered"
            level = logging.INFO if trouble is None else logging.WARNING
            log_event(_LOG, name, level, card=self._card, silent_s=silent_s, reason=trouble)
