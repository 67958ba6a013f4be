"""The life of one card's child: started, loaded, ready, lost or killed, buried, and its memory back.

Owns: the order of these steps and their pauses, and the drain. Does not own: the process
(`child_process`), what its jobs become (`intake`), or sessions (`session`).

    not ready first -> then the kill -> then the wait for its memory -> and only then another child
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gpu_agent import budget
from gpu_agent.cardwatch import CardWatch
from gpu_agent.child_process import ChildFailed, ChildProcess, describe_exit
from gpu_agent.device.reading import CardUnreadable
from gpu_agent.ending import end_tasks, happens_within
from gpu_agent.hosting import CardModels
from gpu_agent.intake import Intake
from gpu_agent.loading import Loader
from gpu_agent.release import Baseline, memory_back
from gpu_agent.sampler import Sampler
from gpu_agent.session import Session
from gpu_agent.spares import Spares
from gpu_agent.voice import Voice
from scheduler.logs import log_event
from scheduler.settings import Settings

_LOG = logging.getLogger(__name__)
CRASH_BACKOFF_S = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
SWIFT_S = 1.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What one card's agent is put together from. card: its id."""

    settings: Settings
    card: str
    headroom: int
    sampler: Sampler
    models: CardModels
    intake: Intake
    loader: Loader
    watch: CardWatch
    voice: Voice
    spares: Spares


@dataclass(frozen=True, slots=True)
class Around:
    """What the rest of the supervisor does for it. hush: wait for the beat in progress, at most so long."""

    on_message: Callable[[dict[str, Any]], None]
    cordon: Callable[[str], Awaitable[None]]
    hush: Callable[[float], Awaitable[None]]


class ChildLife:
    """One child after the other, on one card."""

    def __init__(self, parts: Parts, session: Session, around: Around, *, stopping: asyncio.Event) -> None:
        self._parts = parts
        self._session = session
        self._around = around
        self._stopping = stopping
        self.wake_up = asyncio.Event()
        self._child: ChildProcess | None = None
        self._kill_reason: str | None = None
        self._deaths = 0
        self._succeeded_before = 0

    async def run_child(self) -> None:
        """From a clean card through one child to a clean card."""
        self._parts.voice.say("starting", "the torch child is starting")
        try:
            baseline = Baseline.of(await self._parts.sampler.read())
            child = await self._parts.spares.take(self._around.on_message)
        except (ChildFailed, CardUnreadable) as error:
            log_event(_LOG, "child_failed", logging.ERROR, card=self._parts.card, reason=str(error))
            self._parts.voice.say("down", str(error))
            await self._back_off()
            return
        assert child.hello is not None
        self._child, self._kill_reason = child, None
        context = child.hello.context or self._parts.settings.agent.context
        log_event(_LOG, "child_started", card=self._parts.card, pid=child.pid, context_bytes=context)
        self._parts.sampler.attach(child.memory, context=context)
        await self._parts.watch.follow(child)
        ended = asyncio.create_task(child.ended(), name="child-ended")
        await self._parts.loader.load_all(child, room=self._room, stopping=self._stopping)
        self.become_ready()
        while child.is_alive and self._kill_reason is None and not self._stopping.is_set():
            if self._session.is_lost:
                await self._live_on(child)
            else:
                await self._until_something(child, ended)
        ended.cancel()
        if not self._stopping.is_set() or not child.is_alive:
            await self._bury(child, baseline)

    def become_ready(self) -> None:
        """Take work, if there is a child to do it."""
        child = self._child
        if child is None or not child.is_alive or self._kill_reason is not None or self._stopping.is_set():
            return
        self._parts.intake.open(child.send)
        self._parts.voice.say("ready", None)
        self._session.hint()
        ready = ",".join(model.name for model in self._parts.models.ready)
        log_event(_LOG, "card_ready", card=self._parts.card, models=ready)

    async def _until_something(self, child: ChildProcess, ended: asyncio.Task[int]) -> None:
        """Until the child ends, or something happens that this loop has to deal with, or a load is due
        again.
        """
        woken = asyncio.create_task(self.wake_up.wait())
        await asyncio.wait(
            {ended, woken}, timeout=self._parts.loader.next_retry_s(), return_when=asyncio.FIRST_COMPLETED
        )
        woken.cancel()
        self.wake_up.clear()
        if self._parts.loader.next_retry_s() == 0 and child.is_alive and not self._session.is_lost:
            await self._parts.loader.load_due(child, room=self._room, stopping=self._stopping)
            self.become_ready()

    async def _live_on(self, child: ChildProcess) -> None:
        """The ledger gave us up. That is no crash: end the work, keep the models, and register anew."""
        deadline = time.monotonic() + self._parts.settings.agent.cancel_grace_s
        while not self._parts.intake.is_idle and child.is_alive and self._kill_reason is None:
            if time.monotonic() > deadline:
                self.want_kill("the session was lost and the work did not stop")
                return
            await asyncio.sleep(0.01)
        if child.is_alive and self._kill_reason is None:
            await self._session.renew(self._stopping)
            self.become_ready()

    async def _bury(self, child: ChildProcess, baseline: Baseline) -> None:
        """A child that died, or has to: not ready first, then the kill, ready again when its memory is
        back.
        """
        began = time.monotonic()
        crashed = self._kill_reason is None
        reason, is_of_load = (
            (self._kill_reason, False) if self._kill_reason else await self._cause_of_death(child)
        )
        name = "child_lost" if crashed else "child_killed"
        log_event(_LOG, name, logging.WARNING, card=self._parts.card, reason=reason)
        baseline = baseline.with_foreign(self._parts.sampler.last)
        had_work = not self._parts.intake.is_idle
        self._parts.intake.child_ended("crashed" if crashed else "killed", detail=reason)
        self._parts.voice.say("down", reason)
        # A beat on its way may still say "ready" with a sample from before.
        swift_s = min(SWIFT_S, self._parts.settings.redis.command_timeout_s)
        await self._around.hush(swift_s)
        down = asyncio.create_task(self._session.card_down(reason, self._stopping), name="card-down")
        # Redis silent: the memory must come back all the same. By the time it hears of it the sample is
        # stale.
        await asyncio.wait({down}, timeout=swift_s)
        child.kill()
        await child.ended()
        self._child = None
        self._parts.sampler.detach()
        await self._parts.watch.follow(None)
        self._parts.models.child_gone()
        await self._wait_for_memory(baseline, pid=child.pid)
        log_event(_LOG, "memory_back", card=self._parts.card, ms=round((time.monotonic() - began) * 1000))
        await self._acknowledged(down)
        # Jobs that kill their process are counted one by one and become dead letters, and loads that do are
        # tried three times; that others wait for them too would only spread the harm.
        if crashed and not had_work and not is_of_load:
            await self._back_off()

    async def _acknowledged(self, down: asyncio.Task[None]) -> None:
        """Wait until the ledger knows that the card was down, or the agent is to stop."""
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({down, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if down.done():
            await down
        else:
            await end_tasks([down])

    async def _cause_of_death(self, child: ChildProcess) -> tuple[str, bool]:
        """In words, and whether a load is to blame."""
        how = describe_exit(await child.ended())
        if child.poisoned is not None:
            return f"the child's context was broken: {child.poisoned}", False
        return f"the child died of {how}", self._parts.loader.blame_load(how)

    async def _wait_for_memory(self, baseline: Baseline, *, pid: int) -> None:
        bound_s = self._parts.settings.agent.release_timeout_s
        is_cordoned = False
        while not await memory_back(
            self._parts.sampler, baseline, pid=pid, timeout_s=bound_s, stopping=self._stopping
        ):
            if self._stopping.is_set():
                return
            if not is_cordoned:
                reason = f"the memory of a killed child (process {pid}) was not back within {bound_s:g} s"
                self._parts.voice.say("down", reason)
                await self._around.cordon(reason)
            is_cordoned = True

    async def _back_off(self) -> None:
        """Deaths in a row at nothing, with no success between them, come slower and slower."""
        if self._parts.intake.succeeded > self._succeeded_before:
            self._deaths, self._succeeded_before = 0, self._parts.intake.succeeded
        delay = CRASH_BACKOFF_S[min(self._deaths, len(CRASH_BACKOFF_S) - 1)]
        self._deaths += 1
        if delay:
            log_event(_LOG, "child_backoff", card=self._parts.card, seconds=delay, deaths=self._deaths)
        await self._pause(delay)

    async def drain(self) -> None:
        """Stop taking work, give back what has not begun, finish what has."""
        self._parts.voice.say("draining", "the agent is shutting down")
        log_event(_LOG, "agent_draining", card=self._parts.card)
        self._parts.intake.close()
        self._parts.intake.give_back()
        deadline = time.monotonic() + self._parts.settings.agent.drain_s
        child = self._child
        while child is not None and child.is_alive and not self._parts.intake.is_idle:
            if time.monotonic() > deadline or self._kill_reason is not None:
                child.kill()
                break
            await asyncio.sleep(0.02)
        # What still ran goes elsewhere, without a crash count.
        self._parts.intake.child_ended("killed", detail="the agent is shutting down")
        await self._session.settle(timeout_s=self._parts.settings.redis.command_timeout_s * 2)

    async def _room(self) -> int:
        """Bytes for one more model, beside those that are loaded."""
        sample = await self._parts.sampler.take()
        if sample is None:
            return 0
        return budget.allocator_cap(sample, headroom=self._parts.headroom) - self._parts.models.resident

    def want_kill(self, reason: str) -> None:
        """The child has to end; the first reason stands."""
        if self._kill_reason is None:
            self._kill_reason = reason
            self.wake_up.set()

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not longer than until the stop."""
        if seconds > 0:
            await happens_within(self._stopping, seconds)

    async def end(self, *, gently: bool) -> None:
        """However things went: no child is left."""
        child, self._child = self._child, None
        if child is None:
            return
        if gently:
            await child.stop()
        child.kill()
        await child.ended()
