"""One card's supervisor: the order in which everything starts, goes on after a failure, and ends.

Owns: the life of the child, and what is done when something ends. Does not own: jobs (`intake`), calls
(`exchange`), sessions (`session`), beats (`heartbeat`), readings (`sampler`, `cardwatch`).

    lock the card -> take the session -> [ child -> models -> ready -> ... -> its end -> memory back ] ->
    leave
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_agent import budget
from gpu_agent.cardlock import CardLock
from gpu_agent.cardwatch import CardWatch, Consequences
from gpu_agent.child_process import ChildFailed, ChildProcess, Setup, describe_exit
from gpu_agent.clock import ServerClock
from gpu_agent.device.reading import CardUnreadable, DriverCard
from gpu_agent.heartbeat import Heartbeat, Word
from gpu_agent.held import Held
from gpu_agent.hosting import CardModels
from gpu_agent.intake import Intake, Surroundings
from gpu_agent.loading import Loader
from gpu_agent.release import Baseline, memory_back
from gpu_agent.sampler import Sampler
from gpu_agent.session import Session, Stopped
from gpu_agent.spares import Spares
from gpu_agent.voice import Voice
from scheduler import inventory
from scheduler.cards import WakeListener
from scheduler.logs import log_event
from scheduler.models import BeatAnswer, CardRegistration, HandedJob
from scheduler.settings import Settings
from scheduler.store import Store
from vramgate.errors import StoreUnavailable, VramgateError

_LOG = logging.getLogger(__name__)
CONNECT_PATIENCE_S = 15.0
CRASH_BACKOFF_S = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
SWIFT_S = 1.0


class CardGone(VramgateError):
    """The driver has not shown this card for longer than the bound: nothing more can be done from here."""


@dataclass(frozen=True, slots=True)
class CardPlace:
    """Where a card is: its host, whether it is simulated, and where its models are looked up."""

    host: str
    simulated: bool
    host_dir: Path
    directories: tuple[Path, ...]


class Supervisor:
    """Runs one card until it is told to stop."""

    def __init__(self, settings: Settings, card: DriverCard, place: CardPlace) -> None:
        self._settings, self._card, self._place = settings, card, place
        self._clock = ServerClock()
        self._sampler = Sampler(card, self._clock, timeout_s=settings.agent.nvml_timeout_s)
        self._headroom = budget.choose_headroom(
            settings.agent.headroom, total=card.total, simulated=place.simulated
        )
        self._models = CardModels(settings, uuid=card.uuid, name=f"{place.host}:{card.index}")
        self._held = Held(self._work_changed)
        self._voice = Voice(self._models, self._held)
        around = Surroundings(
            kill=self._want_kill,
            event=self._on_event,
            sample=lambda: self._sampler.last,
            is_silent=lambda: self._clock.silence_s() > settings.clocks.session_s / 2,
            cancel_grace_s=settings.agent.cancel_grace_s,
            headroom=self._headroom,
        )
        self._intake = Intake(self._models, self._held, around)
        self._loader = Loader(self._models, self._intake, timeout_s=settings.agent.load_timeout_s)
        self._watch = CardWatch(
            self._sampler,
            Consequences(self._cordon, self._card_lost, self._card_found, self._give_up),
            card=card.uuid,
            headroom=self._headroom,
            hangs_after_s=settings.agent.nvml_timeout_s,
        )
        setup = Setup(
            environment=card.child_environment(),
            directories=place.directories,
            watchdog_s=settings.agent.watchdog_s,
            output_limit=settings.limits.output_bytes,
        )
        self._spares = Spares(setup, card=card.uuid)
        self._child: ChildProcess | None = None
        self._kill_reason: str | None = None
        self._deaths = 0
        self._succeeded_before = 0
        self._wake_up = asyncio.Event()
        self._stopping = asyncio.Event()
        self._fatal: BaseException | None = None

    # -- from start to end

    async def run(self) -> None:
        """Serve the card until SIGTERM or SIGINT. Raises VramgateError in one line when that is not
        possible.
        """
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop)
        lock = CardLock.acquire(self._card.uuid, host_dir=self._place.host_dir)
        try:
            self._store = await self._connect()
            try:
                await self._serve()
            finally:
                await self._store.close()
        except Stopped:
            log_event(_LOG, "agent_stopped_early", card=self._card.uuid)
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
        is_told = False
        while not self._stopping.is_set():
            try:
                return await Store.connect(self._settings)
            except StoreUnavailable as error:
                if time.monotonic() > deadline:
                    raise
                if not is_told:
                    log_event(_LOG, "ledger_awaited", logging.WARNING, reason=error.detail)
                is_told = True
            await self._pause(0.5)
        raise Stopped

    async def _serve(self) -> None:
        self._session = Session(
            self._store,
            card=self._card.uuid,
            describe=self._registration,
            held=self._held,
            intake=self._intake,
            sampler=self._sampler,
            clock=self._clock,
            voice=self._voice,
            lost=self._wake_up.set,
            failed=self._fail,
        )
        await self._session.begin(self._stopping)
        if not self._models.all:
            log_event(
                _LOG, "no_models", logging.WARNING, card=self._card.uuid, remedy="name them in vramgate.toml"
            )
        heartbeat = self._heartbeat = Heartbeat(
            self._settings,
            card=self._card.uuid,
            sampler=self._sampler,
            clock=self._clock,
            source=self._voice.word,
            heard=lambda word, answer: self._call(self._on_beat, word, answer),
            lost=lambda session: self._call(self._session.lose, session),
        )
        self._voice.nudge = heartbeat.nudge
        heartbeat.start()
        tasks = [
            asyncio.create_task(self._guard(self._listen()), name="wake"),
            asyncio.create_task(self._guard(self._watch.run(self._settings.clocks.beat_s)), name="card"),
            asyncio.create_task(
                self._guard(self._spares.run(lambda: self._voice.state == "ready")), name="spare"
            ),
        ]
        try:
            while not self._stopping.is_set():
                await self._one_child()
            await self._drain()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._spares.close()
            self._voice.fall_silent()
            await heartbeat.stop()
            await self._session.leave(timeout_s=self._settings.redis.command_timeout_s * 2)
            if self._child is not None:
                await self._child.stop()
                self._child = None

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
        self._voice.say("starting", "the torch child is starting")
        try:
            baseline = Baseline.of(await self._sampler.read())
            child = await self._spares.take(self._on_message)
        except (ChildFailed, CardUnreadable) as error:
            log_event(_LOG, "child_failed", logging.ERROR, card=self._card.uuid, reason=str(error))
            self._voice.say("down", str(error))
            await self._back_off()
            return
        assert child.hello is not None
        self._child, self._kill_reason = child, None
        context = child.hello.context or self._settings.agent.context
        log_event(_LOG, "child_started", card=self._card.uuid, pid=child.pid, context_bytes=context)
        self._sampler.attach(child.memory, context=context)
        await self._watch.follow(child)
        ended = asyncio.create_task(child.ended(), name="child-ended")
        await self._loader.load_all(child, room=self._room, stopping=self._stopping)
        self._become_ready()
        while child.is_alive and self._kill_reason is None and not self._stopping.is_set():
            if self._session.is_lost:
                await self._live_on(child)
            else:
                await self._until_something(child, ended)
        ended.cancel()
        if not self._stopping.is_set() or not child.is_alive:
            await self._bury(child, baseline)

    def _become_ready(self) -> None:
        child = self._child
        if child is None or not child.is_alive or self._kill_reason is not None or self._stopping.is_set():
            return
        self._intake.open(child.send)
        self._voice.say("ready", None)
        self._session.hint()
        ready = ",".join(model.name for model in self._models.ready)
        log_event(_LOG, "card_ready", card=self._card.uuid, models=ready)

    async def _until_something(self, child: ChildProcess, ended: asyncio.Task[int]) -> None:
        """Until the child ends, or something happens that this loop has to deal with, or a load is due
        again.
        """
        woken = asyncio.create_task(self._wake_up.wait())
        await asyncio.wait(
            {ended, woken}, timeout=self._loader.next_retry_s(), return_when=asyncio.FIRST_COMPLETED
        )
        woken.cancel()
        self._wake_up.clear()
        if self._loader.next_retry_s() == 0 and child.is_alive and not self._session.is_lost:
            await self._loader.load_due(child, room=self._room, stopping=self._stopping)
            self._become_ready()

    async def _live_on(self, child: ChildProcess) -> None:
        """The ledger gave us up. That is no crash: end the work, keep the models, and register anew."""
        deadline = time.monotonic() + self._settings.agent.cancel_grace_s
        while not self._intake.is_idle and child.is_alive and self._kill_reason is None:
            if time.monotonic() > deadline:
                self._want_kill("the session was lost and the work did not stop")
                return
            await asyncio.sleep(0.01)
        if child.is_alive and self._kill_reason is None:
            await self._session.renew(self._stopping)
            self._become_ready()

    async def _bury(self, child: ChildProcess, baseline: Baseline) -> None:
        """A child that died, or has to: not ready first, then the kill, ready again when its memory is
        back.
        """
        began = time.monotonic()
        crashed = self._kill_reason is None
        reason = self._kill_reason or await self._cause_of_death(child)
        name = "child_lost" if crashed else "child_killed"
        log_event(_LOG, name, logging.WARNING, card=self._card.uuid, reason=reason)
        baseline = baseline.with_foreign(self._sampler.last)
        self._intake.child_ended("crashed" if crashed else "killed", detail=reason)
        self._voice.say("down", reason)
        # A beat on its way may still say "ready" with a sample from before.
        swift_s = min(SWIFT_S, self._settings.redis.command_timeout_s)
        await self._heartbeat.pause(timeout_s=swift_s)
        down = asyncio.create_task(self._session.card_down(reason, self._stopping), name="card-down")
        # Redis silent: the memory must come back all the same. By the time it hears of it the sample is
        # stale.
        await asyncio.wait({down}, timeout=swift_s)
        child.kill()
        await child.ended()
        self._child = None
        self._sampler.detach()
        await self._watch.follow(None)
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

    async def _wait_for_memory(self, baseline: Baseline, *, pid: int) -> None:
        bound_s = self._settings.agent.release_timeout_s
        is_cordoned = False
        while not await memory_back(
            self._sampler, baseline, pid=pid, timeout_s=bound_s, stopping=self._stopping
        ):
            if self._stopping.is_set():
                return
            if not is_cordoned:
                reason = f"the memory of a killed child (process {pid}) was not back within {bound_s:g} s"
                self._voice.say("down", reason)
                await self._cordon(reason)
            is_cordoned = True

    async def _back_off(self) -> None:
        """Deaths in a row, with no success between them, come slower and slower."""
        if self._intake.succeeded > self._succeeded_before:
            self._deaths, self._succeeded_before = 0, self._intake.succeeded
        delay = CRASH_BACKOFF_S[min(self._deaths, len(CRASH_BACKOFF_S) - 1)]
        self._deaths += 1
        if delay:
            log_event(_LOG, "child_backoff", card=self._card.uuid, seconds=delay, deaths=self._deaths)
        await self._pause(delay)

    async def _drain(self) -> None:
        """Stop taking work, give back what has not begun, finish what has."""
        self._voice.say("draining", "the agent is shutting down")
        log_event(_LOG, "agent_draining", card=self._card.uuid)
        self._intake.close()
        self._intake.give_back()
        deadline = time.monotonic() + self._settings.agent.drain_s
        child = self._child
        while child is not None and child.is_alive and not self._intake.is_idle:
            if time.monotonic() > deadline or self._kill_reason is not None:
                child.kill()
                break
            await asyncio.sleep(0.02)
        # What still ran goes elsewhere, without a crash count.
        self._intake.child_ended("killed", detail="the agent is shutting down")
        await self._session.settle(timeout_s=self._settings.redis.command_timeout_s * 2)

    # -- what is heard

    def _on_message(self, message: dict[str, Any]) -> None:
        match message["t"]:
            case "started":
                self._intake.on_started(int(message["batch"]))
            case "done":
                self._intake.on_done(message)
                self._voice.refresh_models()
            case "progress" | "output":
                self._intake.on_event(message)
            case "loaded" | "load_failed":
                self._loader.on_message(message)
                self._voice.refresh_models()
            case "log":
                log_event(_LOG, "model_log", model=message["model"], text=message["text"])

    def _on_event(self, job: HandedJob, kind: str, data: Mapping[str, Any]) -> None:
        if self._session.emitter is not None:
            self._session.emitter.add(job, kind, data)

    def _on_beat(self, word: Word, answer: BeatAnswer) -> None:
        if word.session != self._session.id or self._session.is_lost:
            return
        self._held.starts_are_known(word.beat.starts)
        self._intake.cancel(answer.cancels)
        self._intake.recall(answer.recalls)
        is_accepting = answer.operator_state == "ready"
        if is_accepting != self._intake.is_accepting:
            log_event(_LOG, "operator_state", card=self._card.uuid, state=answer.operator_state)
            self._intake.is_accepting = is_accepting
        if not is_accepting:
            self._intake.give_back()
        # Work that waited for the ledger's voice may begin now.
        self._intake.dispatch()
        # An idle card asks in any case: it may take over what waits behind another's work.
        if answer.has_work or (self._intake.is_open and self._intake.is_idle):
            self._session.hint()

    async def _listen(self) -> None:
        """Wait for hints. One means work, or a cancel: claim, and beat at once where there is what to
        cancel.
        """
        listener = WakeListener(self._store, self._card.uuid)
        try:
            while True:
                try:
                    if await listener.wait(self._settings.clocks.beat_s * 2):
                        self._session.hint()
                        if self._held.pairs:
                            self._heartbeat.nudge()
                except StoreUnavailable:
                    await asyncio.sleep(0.5)
        finally:
            await listener.close()

    # -- what happens to the card

    async def _cordon(self, reason: str) -> None:
        log_event(_LOG, "card_cordoned", logging.ERROR, card=self._card.uuid, reason=reason)
        try:
            await inventory.set_card_state(self._store, self._card.uuid, "cordoned", reason=reason)
        except VramgateError as error:
            log_event(_LOG, "cordon_failed", logging.ERROR, card=self._card.uuid, reason=error.detail)

    def _card_lost(self, reason: str) -> None:
        self._intake.close()
        self._voice.say("down", reason)

    def _card_found(self) -> None:
        self._become_ready()

    def _give_up(self, reason: str) -> None:
        self._fail(CardGone(reason))

    # -- small things

    def _work_changed(self) -> None:
        self._voice.refresh()
        self._session.kick()

    async def _room(self) -> int:
        """Bytes for one more model, beside those that are loaded."""
        sample = await self._sampler.take()
        if sample is None:
            return 0
        return budget.allocator_cap(sample, headroom=self._headroom) - self._models.resident

    def _want_kill(self, reason: str) -> None:
        if self._kill_reason is None:
            self._kill_reason = reason
            self._wake_up.set()

    def _stop(self) -> None:
        self._stopping.set()
        self._wake_up.set()

    def _fail(self, error: BaseException) -> None:
        """Something that must run has ended: better no agent than half of one. Whoever watches us starts
        another.
        """
        if self._fatal is None:
            if not isinstance(error, VramgateError):
                _LOG.error("agent_broken", exc_info=error)
            self._fatal = error
        self._stop()

    async def _guard(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            self._fail(error)

    def _call(self, function: Any, *args: Any) -> None:
        """From the heartbeat's thread into ours."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not longer than until the stop."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)
