"""One card's supervisor: the order in which everything starts, goes on after a failure, and ends.

Owns: the life of the child, the session, and what the card is said to be (starting, ready, down,
draining). Does not own: jobs (`intake`), calls (`exchange`), beats (`heartbeat`), readings (`sampler`).

    lock the card -> take the session -> [ child -> models -> ready -> ... -> child's end -> memory back ]
    -> leave
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpu_agent import budget
from gpu_agent.cardlock import CardLock
from gpu_agent.child_process import ChildFailed, ChildProcess, Setup, describe_exit
from gpu_agent.clock import ServerClock
from gpu_agent.device.reading import CardUnreadable, DriverCard
from gpu_agent.events import Emitter
from gpu_agent.exchange import Exchange
from gpu_agent.heartbeat import Heartbeat, Word
from gpu_agent.hosting import CardModels
from gpu_agent.intake import Intake, Limits
from gpu_agent.loading import Loader
from gpu_agent.release import Baseline, memory_back
from gpu_agent.sampler import Sampler
from scheduler import cards, inventory
from scheduler.cards import CardTaken, SessionLost, StaleSeq, WakeListener
from scheduler.logs import log_event
from scheduler.models import Beat, BeatAnswer, CardRegistration, HandedJob, HostedModel
from scheduler.settings import Settings
from scheduler.store import Store
from vramgate.errors import StoreUnavailable, VramgateError

_LOG = logging.getLogger(__name__)
CONNECT_PATIENCE_S = 15.0
UNREADABLE_PATIENCE_S = 60.0
CRASH_BACKOFF_S = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
SWIFT_S = 1.0
BLAMES_THE_JOB = frozenset({13, 31, 43, 45})
"""Xids that a program's own fault raises; any other speaks of the hardware or its driver."""

CardState = Literal["starting", "ready", "down", "draining"]


class CardGone(VramgateError):
    """The driver has not shown this card for longer than the bound: nothing more can be done from here."""


@dataclass(frozen=True, slots=True)
class CardPlace:
    """Where a card is: its host, and whether it is simulated."""

    host: str
    simulated: bool
    host_dir: Path
    directories: tuple[Path, ...]


class Supervisor:
    """Runs one card until it is told to stop."""

    def __init__(self, settings: Settings, card: DriverCard, place: CardPlace) -> None:
        self._settings = settings
        self._card = card
        self._place = place
        self._clock = ServerClock()
        self._sampler = Sampler(card, self._clock, timeout_s=settings.agent.nvml_timeout_s)
        self._headroom = budget.choose_headroom(
            settings.agent.headroom, total=card.total, simulated=place.simulated
        )
        self._models = CardModels(settings, uuid=card.uuid, name=f"{place.host}:{card.index}")
        self._intake = Intake(
            self._models,
            Limits(cancel_grace_s=settings.agent.cancel_grace_s, headroom=self._headroom),
            changed=self._work_changed,
            kill=self._want_kill,
            event=self._on_event,
        )
        self._intake.sample = lambda: self._sampler.last
        self._intake.is_silent = self._is_silent
        self._loader = Loader(self._models, self._intake, timeout_s=settings.agent.load_timeout_s)
        self._state: CardState = "starting"
        self._reason: str | None = "the agent is starting"
        self._published: tuple[HostedModel, ...] = ()
        self._models_number = 0
        self._word: Word | None = None
        self._child: ChildProcess | None = None
        self._kill_reason: str | None = None
        self._cap: int | None = None
        self._deaths = 0
        self._succeeded_before = 0
        self._wake_up = asyncio.Event()
        self._stopping = asyncio.Event()
        self._lost_session: str | None = None
        self._unreadable_since: float | None = None
        self._is_accepting = True
        self._is_registered = False
        self._is_beating = False
        self._fatal: VramgateError | None = None

    # -- from start to end

    async def run(self) -> None:
        """Serve the card until SIGTERM or SIGINT. Raises VramgateError in one line when that is not
        possible.
        """
        loop = asyncio.get_running_loop()
        self._loop = loop
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        lock = CardLock.acquire(self._card.uuid, host_dir=self._place.host_dir)
        try:
            self._store = await self._connect()
            try:
                await self._serve_session()
            finally:
                await self._store.close()
        finally:
            if self._child is not None:
                self._child.kill()
                await self._child.ended()
            lock.release()
        if self._fatal is not None:
            raise self._fatal

    async def _connect(self) -> Store:
        """A ledger that is not there yet is waited for: boxes start in any order."""
        deadline = time.monotonic() + CONNECT_PATIENCE_S
        told = False
        while True:
            try:
                return await Store.connect(self._settings)
            except StoreUnavailable as error:
                if time.monotonic() > deadline or self._stopping.is_set():
                    raise
                if not told:
                    log_event(_LOG, "ledger_awaited", logging.WARNING, reason=error.detail)
                told = True
            await self._pause(0.5)

    async def _serve_session(self) -> None:
        await self._begin_session()
        self._heartbeat = Heartbeat(
            self._settings,
            card=self._card.uuid,
            sampler=self._sampler,
            clock=self._clock,
            source=self._say,
            heard=lambda word, answer: self._call(self._on_beat, word, answer),
            lost=lambda session: self._call(self._on_lost, session),
        )
        self._heartbeat.start()
        self._is_beating = True
        tasks = [
            asyncio.create_task(self._listen(), name="wake"),
            asyncio.create_task(self._watch_card(), name="card"),
        ]
        try:
            while not self._stopping.is_set():
                await self._one_child()
            await self._drain()
        finally:
            for task in (*tasks, *self._session_tasks):
                task.cancel()
            await asyncio.gather(*tasks, *self._session_tasks, return_exceptions=True)
            self._word = None
            await self._heartbeat.stop()
            await self._leave()
            if self._child is not None:
                await self._child.stop()
                self._child = None

    async def _begin_session(self) -> None:
        """Take the card with a new session. One that another agent holds is waited for: ours of before may
        be dying.
        """
        session = secrets.token_hex(16)
        session_s = self._settings.clocks.session_s
        patience_s = 3 * session_s + 2
        deadline = time.monotonic() + patience_s
        now_ms, is_told = 0, False
        while not now_ms:
            try:
                now_ms = await cards.register(
                    self._store, self._registration(session), state=self._state, reason=self._reason
                )
                continue
            except CardTaken:
                if time.monotonic() > deadline:
                    raise
                if not is_told:
                    log_event(_LOG, "card_awaited", logging.WARNING, card=self._card.uuid)
            except StoreUnavailable as error:
                if not is_told:
                    log_event(_LOG, "ledger_awaited", logging.WARNING, reason=error.detail)
            is_told = True
            # Often: after a silence of half a session the ledger grants sessions a grace, and ours would
            # be the only voice.
            await self._pause(session_s / 10)
            if self._stopping.is_set():
                raise SessionLost("stopped before the card was taken")
        self._clock.hear(now_ms)
        self._lost_session = None
        self._emitter = Emitter(self._store, card=self._card.uuid, session=session)
        self._exchange = Exchange(
            self._store,
            card=self._card.uuid,
            session=session,
            intake=self._intake,
            sampler=self._sampler,
            clock=self._clock,
            emitter=self._emitter,
        )
        self._exchange.applied_changed = self._publish
        self._is_registered = True
        self._session_tasks = [
            asyncio.create_task(self._exchange_until_lost(self._exchange), name="exchange"),
            asyncio.create_task(self._emitter.run(), name="events"),
        ]
        self._publish()
        log_event(_LOG, "card_registered", card=self._card.uuid, session=session)

    def _registration(self, session: str) -> CardRegistration:
        return CardRegistration(
            card=self._card.uuid,
            session=session,
            host=self._place.host,
            name=f"{self._place.host}:{self._card.index}",
            index=self._card.index,
            product=self._card.product,
            pid=os.getpid(),
            headroom=self._headroom,
            slots=self._models.slots,
            models=self._models.published(),
            sample=self._sampler.last,
            simulated=self._place.simulated,
        )

    # -- the child's life

    async def _one_child(self) -> None:
        """From a clean card through one child to a clean card."""
        self._say_state("starting", "the torch child is starting")
        try:
            baseline = await self._baseline()
            child = await ChildProcess.start(self._setup(), on_message=self._on_message)
        except (ChildFailed, CardUnreadable) as error:
            reason = str(error)
            log_event(_LOG, "child_failed", logging.ERROR, card=self._card.uuid, reason=reason)
            self._say_state("down", reason)
            await self._back_off()
            return
        assert child.hello is not None
        self._child, self._kill_reason, self._cap = child, None, None
        log_event(
            _LOG, "child_started", card=self._card.uuid, pid=child.pid, context_bytes=child.hello.context
        )
        context = child.hello.context or self._settings.agent.context
        self._sampler.attach(child.memory, context=context, pid=child.pid)
        await self._set_cap()
        ended = asyncio.create_task(child.ended(), name="child-ended")
        try:
            await self._loader.load_all(child, room=self._room, stopping=self._stopping)
            if child.is_alive and not self._stopping.is_set():
                self._become_ready(child)
            while child.is_alive and self._kill_reason is None and not self._stopping.is_set():
                await self._until_something(ended)
                if self._lost_session is not None:
                    await self._live_on(child)
        finally:
            ended.cancel()
        if not self._stopping.is_set() or not child.is_alive:
            await self._bury(child, baseline)

    def _setup(self) -> Setup:
        return Setup(
            environment=self._card.child_environment(),
            directories=self._place.directories,
            watchdog_s=self._settings.agent.watchdog_s,
            output_limit=self._settings.limits.output_bytes,
        )

    def _become_ready(self, child: ChildProcess) -> None:
        self._intake.open(child.send)
        self._say_state("ready", None)
        self._exchange.hint()
        log_event(
            _LOG, "card_ready", card=self._card.uuid, models=",".join(m.name for m in self._models.ready)
        )

    async def _until_something(self, ended: asyncio.Task[int]) -> None:
        woken = asyncio.create_task(self._wake_up.wait())
        retry_in = self._loader.next_retry_s()
        await asyncio.wait({ended, woken}, timeout=retry_in, return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        self._wake_up.clear()
        child = self._child
        if child is not None and self._loader.next_retry_s() == 0 and self._lost_session is None:
            await self._loader.load_due(child, room=self._room, stopping=self._stopping)
            self._intake.open(child.send)
            self._publish(models_changed=True)

    async def _bury(self, child: ChildProcess, baseline: Baseline) -> None:
        """A child that died, or that has to: not ready first, then the kill, ready again when its memory
        is back.
        """
        began = time.monotonic()
        reason = self._kill_reason or await self._cause_of_death(child)
        crashed = self._kill_reason is None
        log_event(
            _LOG,
            "child_lost" if crashed else "child_killed",
            logging.WARNING,
            card=self._card.uuid,
            reason=reason,
        )
        baseline = baseline.with_foreign(self._sampler.last)
        self._intake.child_ended("crashed" if crashed else "killed", detail=reason)
        self._say_state("down", reason)
        # A beat on its way may still say "ready" with a sample from before.
        swift_s = min(SWIFT_S, self._settings.redis.command_timeout_s)
        await self._heartbeat.pause(timeout_s=swift_s)
        down = asyncio.create_task(self._card_down(reason), name="card-down")
        # Redis silent: the memory must come back all the same. By the time it hears of it the sample is
        # stale.
        await asyncio.wait({down}, timeout=swift_s)
        child.kill()
        await child.ended()
        self._child = None
        self._sampler.detach()
        self._models.child_gone()
        await self._wait_for_memory(baseline, pid=child.pid)
        await down
        log_event(_LOG, "memory_back", card=self._card.uuid, ms=round((time.monotonic() - began) * 1000))
        if crashed:
            await self._back_off()

    async def _cause_of_death(self, child: ChildProcess) -> str:
        code = await child.ended()
        if child.poisoned is not None:
            return f"the child's context was broken: {child.poisoned}"
        self._loader.blame_load(describe_exit(code))
        return f"the child died of {describe_exit(code)}"

    async def _card_down(self, reason: str) -> None:
        try:
            await self._exchange.card_down(reason)
        except (SessionLost, StaleSeq):
            self._on_lost(self._exchange.session)
        if self._lost_session is not None:
            await self._renew_session()

    async def _baseline(self) -> Baseline:
        return Baseline.of(await self._sampler.read())

    async def _wait_for_memory(self, baseline: Baseline, *, pid: int) -> None:
        bound_s = self._settings.agent.release_timeout_s
        if await memory_back(self._sampler, baseline, pid=pid, timeout_s=bound_s, stopping=self._stopping):
            return
        if self._stopping.is_set():
            return
        reason = f"the memory of a killed child (process {pid}) was not back within {bound_s:g} s"
        await self._cordon(reason)
        self._say_state("down", reason)
        while not self._stopping.is_set():
            if await memory_back(
                self._sampler, baseline, pid=pid, timeout_s=bound_s, stopping=self._stopping
            ):
                return

    async def _back_off(self) -> None:
        """Deaths in a row, with no success between them, come slower and slower."""
        if self._intake.succeeded > self._succeeded_before:
            self._deaths, self._succeeded_before = 0, self._intake.succeeded
        delay = CRASH_BACKOFF_S[min(self._deaths, len(CRASH_BACKOFF_S) - 1)]
        self._deaths += 1
        if delay:
            log_event(_LOG, "child_backoff", card=self._card.uuid, seconds=delay, deaths=self._deaths)
        await self._pause(delay)

    # -- sessions

    async def _exchange_until_lost(self, exchange: Exchange) -> None:
        try:
            await exchange.run()
        except (SessionLost, StaleSeq) as error:
            log_event(_LOG, "session_lost", logging.WARNING, card=self._card.uuid, reason=error.detail)
            self._on_lost(exchange.session)

    def _on_lost(self, session: str) -> None:
        if session == self._exchange.session and self._lost_session is None:
            self._lost_session = session
            self._word = None
            self._intake.session_lost()
            self._wake_up.set()

    async def _live_on(self, child: ChildProcess) -> None:
        """The ledger gave us up. That is no crash: end the work, keep the models, and register anew."""
        deadline = time.monotonic() + self._settings.agent.cancel_grace_s
        while not self._intake.is_idle and child.is_alive and self._kill_reason is None:
            if time.monotonic() > deadline:
                self._want_kill("the session was lost and the work did not stop")
                return
            await asyncio.sleep(0.01)
        if child.is_alive and self._kill_reason is None:
            await self._renew_session()
            self._become_ready(child)

    async def _renew_session(self) -> None:
        for task in self._session_tasks:
            task.cancel()
        await asyncio.gather(*self._session_tasks, return_exceptions=True)
        await self._sampler.take()
        await self._begin_session()

    async def _drain(self) -> None:
        """Stop taking work, give back what has not begun, finish what has."""
        self._say_state("draining", "the agent is shutting down")
        log_event(_LOG, "agent_draining", card=self._card.uuid)
        self._intake.close()
        self._intake.give_back()
        deadline = time.monotonic() + self._settings.agent.drain_s
        while not self._intake.is_idle and time.monotonic() < deadline and self._kill_reason is None:
            if self._child is None or not self._child.is_alive:
                break
            await asyncio.sleep(0.02)
        if self._child is not None and not (self._intake.is_idle and self._child.is_alive):
            self._intake.child_ended("killed", detail="the agent is shutting down")
            self._child.kill()
        await self._exchange.settle(timeout_s=self._settings.redis.command_timeout_s * 2)

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(self._settings.redis.command_timeout_s * 2):
                await cards.leave(self._store, card=self._card.uuid, session=self._exchange.session)
        except (VramgateError, TimeoutError) as error:
            log_event(_LOG, "leave_failed", logging.WARNING, card=self._card.uuid, reason=str(error))

    # -- what is heard

    def _on_message(self, message: dict[str, Any]) -> None:
        match message["t"]:
            case "started":
                self._intake.on_started(int(message["batch"]))
            case "done":
                self._intake.on_done(message)
                self._publish(models_changed=True)
            case "progress" | "output":
                self._intake.on_event(message)
            case "loaded" | "load_failed":
                self._loader.on_message(message)
                self._publish(models_changed=True)
            case "log":
                log_event(_LOG, "model_log", model=message["model"], text=message["text"])

    def _on_event(self, job: HandedJob, kind: str, data: Mapping[str, Any]) -> None:
        self._emitter.add(job, kind, data)

    def _on_beat(self, word: Word, answer: BeatAnswer) -> None:
        if word.session != self._exchange.session or self._lost_session is not None:
            return
        self._intake.started_known(word.beat.starts)
        self._intake.cancel(answer.cancels)
        self._intake.recall(answer.recalls)
        is_accepting = answer.operator_state == "ready"
        if is_accepting != self._is_accepting:
            log_event(_LOG, "operator_state", card=self._card.uuid, state=answer.operator_state)
            self._is_accepting = self._intake.is_accepting = is_accepting
        if not is_accepting:
            self._intake.give_back()
        # Work that waited for the ledger's voice may begin now.
        self._intake.dispatch()
        if answer.has_work:
            self._exchange.hint()

    async def _listen(self) -> None:
        """Wait for hints. A hint means work, or a cancel: claim, and beat at once where there is something
        to cancel.
        """
        listener = WakeListener(self._store, self._card.uuid)
        try:
            while True:
                try:
                    if await listener.wait(self._settings.clocks.beat_s * 2):
                        self._exchange.hint()
                        if self._intake.held:
                            self._heartbeat.nudge()
                except StoreUnavailable:
                    await asyncio.sleep(0.5)
        finally:
            await listener.close()

    async def _watch_card(self) -> None:
        """Follow the driver: keep the cap, cordon on hardware events, and give up a card that is gone."""
        while True:
            await asyncio.sleep(self._settings.clocks.beat_s)
            for xid in await self._sampler.xids():
                log_event(_LOG, "xid", logging.WARNING, card=self._card.uuid, xid=xid)
                if xid not in BLAMES_THE_JOB:
                    await self._cordon(f"the driver reported Xid {xid}")
            await self._set_cap()
            self._note_readability()

    def _note_readability(self) -> None:
        trouble = self._sampler.trouble
        is_hanging = self._sampler.stuck_s > self._settings.agent.nvml_timeout_s
        if trouble is None and not is_hanging:
            if self._unreadable_since is not None and self._state == "down" and self._child is not None:
                self._become_ready(self._child)
            self._unreadable_since = None
            return
        reason = (
            trouble.reason
            if trouble is not None
            else f"the driver has hung for {self._sampler.stuck_s:.0f} s"
        )
        if self._unreadable_since is None:
            self._unreadable_since = time.monotonic()
            log_event(_LOG, "card_unreadable", logging.ERROR, card=self._card.uuid, reason=reason)
        if trouble is not None and trouble.lost and self._state == "ready":
            self._intake.close()
            self._say_state("down", reason)
        if time.monotonic() - self._unreadable_since > UNREADABLE_PATIENCE_S:
            self._fatal = CardGone(f"card {self._card.uuid}: {reason}; the agent gives up")
            self._stop()

    async def _cordon(self, reason: str) -> None:
        log_event(_LOG, "card_cordoned", logging.ERROR, card=self._card.uuid, reason=reason)
        try:
            await inventory.set_card_state(self._store, self._card.uuid, "cordoned", reason=reason)
        except VramgateError as error:
            log_event(_LOG, "cordon_failed", logging.ERROR, card=self._card.uuid, reason=error.detail)

    # -- what is said

    def _say_state(self, state: CardState, reason: str | None) -> None:
        self._state, self._reason = state, reason
        self._publish(models_changed=True)
        if self._is_beating:
            self._heartbeat.nudge()

    def _work_changed(self) -> None:
        self._publish()
        self._exchange.kick()

    def _publish(self, *, models_changed: bool = False) -> None:
        """Replace the word that the heartbeat says: held jobs and applied number always belong together."""
        if self._lost_session is not None or not self._is_registered:
            return
        if models_changed:
            published = self._models.published()
            if published != self._published:
                self._published = published
                self._models_number += 1
        self._word = Word(
            session=self._exchange.session,
            beat=Beat(
                state=self._state,
                reason=self._reason,
                applied_seq=self._exchange.applied,
                held=self._intake.held,
                starts=(),
                sample=None,
                models=self._published,
            ),
            slots=self._models.slots,
            models_number=self._models_number,
        )

    def _say(self) -> Word | None:
        """For the heartbeat's thread: the word, with the starts as old as they are now."""
        word = self._word
        if word is None:
            return None
        return dataclasses.replace(word, beat=dataclasses.replace(word.beat, starts=self._intake.starts()))

    # -- small things

    async def _set_cap(self) -> None:
        sample = await self._sampler.take()
        child = self._child
        if sample is None or child is None:
            return
        cap = budget.allocator_cap(sample, headroom=self._headroom)
        if budget.has_moved(cap, self._cap, total=sample.total):
            self._cap = cap
            child.send({"t": "cap", "bytes": cap})
        else:
            child.send({"t": "ping"})

    async def _room(self) -> int:
        """Bytes for one more model, beside those that are loaded."""
        sample = await self._sampler.take()
        if sample is None:
            return 0
        return budget.allocator_cap(sample, headroom=self._headroom) - self._models.resident

    def _is_silent(self) -> bool:
        return self._clock.silence_s() > self._settings.clocks.session_s / 2

    def _want_kill(self, reason: str) -> None:
        if self._kill_reason is None:
            self._kill_reason = reason
            self._wake_up.set()

    def _stop(self) -> None:
        self._stopping.set()
        self._wake_up.set()

    def _call(self, function: Any, *args: Any) -> None:
        """From the heartbeat's thread into ours."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not longer than until the stop."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)
