"""The calls of one session that move jobs: claim, finish, card_down, one at a time and each with its number.

Owns: the sequence number, the rule that an unknown outcome is asked again under the same number, and the
order of large results, events and reports. Does not own what is reported (`held`), nor sessions (`session`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from gpu_agent.clock import ServerClock
from gpu_agent.events import Emitter
from gpu_agent.held import Held
from gpu_agent.intake import Intake
from gpu_agent.sampler import Sampler
from scheduler import cards, jobs, results
from scheduler.handover import HandedJob, Handout, Report, Start
from scheduler.logs import log_event
from scheduler.store import Store
from vramgate.errors import Internal, StoreUnavailable

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
FRESH_SAMPLE_S = 0.05
MOST_CARRIED_BYTES = 16 * 2**20
"""A server takes at most 1 GiB of arguments in one call."""
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
FAULT_BACKOFF_S = 5.0


class Exchange:
    """One session's line to the ledger. `run` until the session ends; `hint` when there may be work."""

    def __init__(
        self,
        store: Store,
        *,
        card: str,
        session: str,
        held: Held,
        intake: Intake,
        sampler: Sampler,
        clock: ServerClock,
        emitter: Emitter,
        applied_changed: Callable[[], None],
    ) -> None:
        self._store = store
        self._card = card
        self.session = session
        self._held = held
        self._intake = intake
        self._sampler = sampler
        self._clock = clock
        self._emitter = emitter
        self._sequence = 0
        self.applied = 0
        self._one_call = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._may_have_work = True
        self._applied_changed = applied_changed

    def hint(self) -> None:
        """There may be work on the ledger."""
        self._may_have_work = True
        self._wanted.set()

    def kick(self) -> None:
        """Something changed on our side: a report may be due."""
        self._wanted.set()

    async def run(self) -> None:
        """Report and claim until cancelled. Raises SessionLost or StaleSeq when the session is over."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            async with self._one_call:
                more = await self._turn()
            if more:
                self.hint()

    async def settle(self, *, timeout_s: float) -> bool:
        """Deliver what is in the outbox, as far as the time allows. True when it is empty."""
        try:
            async with asyncio.timeout(timeout_s), self._one_call:
                while self._held.outbox:
                    await self._turn()
        except TimeoutError:
            return False
        return True

    async def card_down(self, reason: str) -> None:
        """Say that the card is not ready, with the reports at hand; the rest of them follows in the usual
        way.
        """
        async with self._one_call:
            reports = await self._next_reports()
            starts = self._held.starts()
            await self._ask(
                lambda number: cards.card_down(
                    self._store,
                    card=self._card,
                    session=self.session,
                    seq=number,
                    reason=reason,
                    reports=reports,
                    starts=starts,
                ),
                reports,
                starts,
            )
        self.kick()

    async def _turn(self) -> bool:
        """One call, if one is due. True: call again at once."""
        reports = await self._next_reports()
        want = self._intake.want()
        if not reports and not (self._may_have_work and want):
            return False
        if want:
            self._may_have_work = False
        # What has just ended must not count as held: each finish brings a sample of its own. A claim changes
        # nothing on the card, and the beats' samples do.
        sample = await self._sampler.after_run(timeout_s=FRESH_SAMPLE_S) if reports else None
        starts = self._held.starts()
        if reports:
            handout = await self._ask(
                lambda number: cards.finish(
                    self._store,
                    card=self._card,
                    session=self.session,
                    seq=number,
                    reports=reports,
                    starts=starts,
                    sample=sample,
                    want=want,
                ),
                reports,
                starts,
            )
        else:
            handout = await self._ask(
                lambda number: cards.claim(
                    self._store, card=self._card, session=self.session, seq=number, want=want, starts=starts
                ),
                reports,
                starts,
            )
        return handout.more or bool(self._held.outbox)

    async def _next_reports(self) -> tuple[Report, ...]:
        """The oldest reports, with their large results stored and their events sent first. Of results that
        could not be stored so many go along as one call may carry.
        """
        # Chosen before the flush: what ends during it has events that the flush does not know.
        due = self._held.outbox[: cards.REPORTS_PER_CALL]
        if not due:
            return ()
        await self._emitter.flush()
        chosen: list[Report] = []
        carried = 0
        for report in due:
            sent = await self._stored(report)
            carried += len(sent.result or b"")
            if chosen and carried > MOST_CARRIED_BYTES:
                break
            chosen.append(sent)
        return tuple(chosen)

    async def _stored(self, report: Report) -> Report:
        result = report.result
        if result is None or len(result) <= cards.INLINE_RESULT_BYTES:
            return report
        try:
            await results.put(self._store, report.lease_id, result)
        except StoreUnavailable:
            # A full server refuses this and lets finish through, which is what frees its memory: send it
            # along.
            return report
        return dataclasses.replace(report, result=None, is_stored=True)

    async def _ask(
        self, call: Callable[[int], Awaitable[Handout]], reports: Sequence[Report], starts: Sequence[Start]
    ) -> Handout:
        """One numbered call, asked until it is answered; then everything that it says is taken in at once."""
        self._sequence += 1
        number = self._sequence
        handout = await self._repeat(lambda: call(number))
        self._clock.hear(handout.now_ms)
        if any(job.inputs is None for job in handout.jobs):
            complete = tuple([await self._with_inputs(job) for job in handout.jobs])
            handout = dataclasses.replace(handout, jobs=complete)
        for report, verdict in zip(reports, handout.verdicts, strict=False):
            if verdict == "stale":
                log_event(_LOG, "report_stale", logging.WARNING, job=report.job_id, lease=report.lease_id)
        self._held.starts_are_known(starts)
        self._intake.take(handout, reports)
        for report in reports:
            self._emitter.forget(report.lease_id)
        # Last: a beat that names this number and not yet all of its jobs would have them run elsewhere.
        self.applied = number
        self._applied_changed()
        return handout

    async def _with_inputs(self, job: HandedJob) -> HandedJob:
        if job.inputs is not None:
            return job
        return dataclasses.replace(
            job, inputs=await self._repeat(lambda: jobs.payload(self._store, job.job_id))
        )

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer: only the end of the session, or of this task, ends it."""
        tries = 0
        while True:
            try:
                return await call()
            except StoreUnavailable as error:
                if tries == 0:
                    log_event(_LOG, "ledger_silent", logging.WARNING, reason=error.detail)
                delay = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
            except Internal as error:
                log_event(_LOG, "ledger_fault", logging.ERROR, reason=error.detail)
                delay = FAULT_BACKOFF_S
            tries += 1
            await asyncio.sleep(delay * random.uniform(0.75, 1.25))
