"""One card's supervisor: the order in which everything starts, goes on after a failure, and ends.

Owns: how the parts are put together, and who hears what. Does not own: the child's life (`life`), jobs
(`intake`), calls (`exchange`), sessions (`session`), beats (`heartbeat`), readings (`sampler`, `cardwatch`).

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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_agent.cardlock import CardLock
from gpu_agent.cardwatch import CardWatch, Consequences
from gpu_agent.child_process import Setup
from gpu_agent.clock import ServerClock
from gpu_agent.device.reading import DriverCard
from gpu_agent.ending import end_tasks, happens_within
from gpu_agent.heartbeat import Heartbeat, Word
from gpu_agent.held import Held
from gpu_agent.hosting import CardModels
from gpu_agent.intake import Intake, Surroundings
from gpu_agent.life import Around, ChildLife, Parts
from gpu_agent.loading import Loader
from gpu_agent.sampler import Sampler
from gpu_agent.session import Session, Stopped
from gpu_agent.spares import Spares
from gpu_agent.voice import Voice
from scheduler import inventory
from scheduler.cards import WakeListener
from scheduler.handover import BeatAnswer, HandedJob
from scheduler.logs import log_event
from scheduler.registration import CardRegistration
from scheduler.settings import Settings
from scheduler.store import Store
from vramgate.errors import StoreUnavailable, VramgateError

_LOG = logging.getLogger(__name__)
CONNECT_PATIENCE_S = 15.0


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
        wished = settings.agent.headroom
        self._headroom = card.headroom if wished is None else wished
        self._models = CardModels(settings, uuid=card.uuid, name=f"{place.host}:{card.index}")
        self._held = Held(lambda: self._session.kick())
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
            Consequences(self._cordon, self._card_lost, self._card_found, self._give_up, self._child_silent),
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
        self._life: ChildLife | None = None
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
            if self._life is not None:
                await self._life.end(gently=False)
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
            await happens_within(self._stopping, 0.5)
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
            lost=self._wake_up,
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
        life = self._life = self._new_life()
        tasks = [
            asyncio.create_task(self._guard(self._listen()), name="wake"),
            asyncio.create_task(self._guard(self._watch.run(self._settings.clocks.beat_s)), name="card"),
            asyncio.create_task(
                self._guard(self._spares.run(lambda: self._voice.state == "ready")), name="spare"
            ),
        ]
        try:
            while not self._stopping.is_set():
                await life.run_child()
            await life.drain()
        finally:
            await end_tasks(tasks)
            await self._spares.close()
            self._voice.fall_silent()
            await heartbeat.stop()
            await self._session.leave(timeout_s=self._settings.redis.command_timeout_s * 2)
            await life.end(gently=True)

    def _new_life(self) -> ChildLife:
        parts = Parts(
            settings=self._settings,
            card=self._card.uuid,
            headroom=self._headroom,
            sampler=self._sampler,
            models=self._models,
            intake=self._intake,
            loader=self._loader,
            watch=self._watch,
            voice=self._voice,
            spares=self._spares,
        )
        around = Around(
            on_message=self._on_message,
            cordon=self._cordon,
            hush=lambda seconds: self._heartbeat.pause(timeout_s=seconds),
        )
        return ChildLife(parts, self._session, around, stopping=self._stopping)

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

    # -- what is heard

    def _on_message(self, message: dict[str, Any]) -> None:
        match message["t"]:
            case "result":
                self._intake.on_result(message)
            case "done":
                self._sampler.run_ended(allocated=message["allocated"], segments=message["segments"])
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
        self._models.hear_disputes(answer.disputed)
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
        """Wait for hints: claim, and beat at once where there is what to cancel."""
        listener = WakeListener(self._store, self._card.uuid)
        try:
            while True:
                try:
                    hint = await listener.wait(self._settings.clocks.beat_s * 2)
                    if hint is not None:
                        self._session.hint()
                    if hint == "look" and self._held.pairs:
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
        if self._life is not None:
            self._life.become_ready()

    def _child_silent(self, seconds: float) -> None:
        """A child that hangs at nothing would never serve again; one that runs or loads has a clock."""
        if seconds > self._settings.agent.watchdog_s and self._intake.is_open and self._intake.is_idle:
            self._want_kill(f"the child has not answered for {seconds:.0f} s and runs nothing")

    def _give_up(self, reason: str) -> None:
        self._fail(CardGone(reason))

    # -- small things

    def _want_kill(self, reason: str) -> None:
        if self._life is not None:
            self._life.want_kill(reason)

    def _wake_up(self) -> None:
        if self._life is not None:
            self._life.wake_up.set()

    def _stop(self) -> None:
        self._stopping.set()
        self._wake_up()

    def _fail(self, error: BaseException) -> None:
        """Something that must run has ended: better no agent than half of one. Whoever watches us starts
        another.
        """
        if self._fatal is None:
            if not isinstance(error, VramgateError):
                _LOG.error("agent_broken", exc_info=error)
            self._fatal = error
        self._stop()

    async def _guard(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            self._fail(error)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        """From the heartbeat's thread into ours."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)
