"""What this card holds: jobs at hand, batches in the child, reports that the ledger has not acknowledged.

Owns: which batch starts when, cancels and run clocks, and what becomes of each job when its batch, the
child or the session ends. Does not own: the calls to the ledger (`exchange`) or the life of the child
(`supervisor`). Used from one thread; acts on the child through the `send` that it is given, and never waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_agent import budget
from gpu_agent.batching import form_batch
from gpu_agent.hosting import CardModel, CardModels
from scheduler.logs import log_event
from scheduler.models import Cancel, HandedJob, Handout, OutcomeKind, Report, Sample, Start

_LOG = logging.getLogger(__name__)
WATCHDOG_SLACK_S = 5.0
MOST_WANTED = 16

Send = Callable[[Mapping[str, Any]], None]


@dataclass(slots=True)
class Batch:
    """One batch in the child. cancelled and overdue hold positions in `jobs`."""

    number: int
    model: CardModel
    jobs: Sequence[HandedJob]
    started: float | None = None
    cancelled: set[int] = field(default_factory=set)
    overdue: set[int] = field(default_factory=set)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @property
    def is_unwanted(self) -> bool:
        return len(self.cancelled | self.overdue) == len(self.jobs)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the intake has to know of the configuration."""

    cancel_grace_s: float
    headroom: int


class Intake:
    """The jobs of one card."""

    def __init__(
        self,
        models: CardModels,
        limits: Limits,
        *,
        changed: Callable[[], None],
        kill: Callable[[str], None],
        event: Callable[[HandedJob, str, Mapping[str, Any]], None],
    ) -> None:
        self._models = models
        self._limits = limits
        self._changed = changed
        self._kill = kill
        self._event = event
        self._send: Send | None = None
        self._numbers = 0
        self._waiting: dict[str, HandedJob] = {}
        self._batches: dict[int, Batch] = {}
        self._held: dict[str, str] = {}
        self._starts: dict[str, tuple[str, float]] = {}
        self.outbox: list[Report] = []
        self.sample: Callable[[], Sample | None] = lambda: None
        self.is_silent: Callable[[], bool] = lambda: False
        self.is_open = False
        self.is_accepting = True
        self.succeeded = 0

    # -- what others ask

    @property
    def held(self) -> tuple[tuple[str, str], ...]:
        """(job, lease) of everything whose end the ledger has not acknowledged."""
        return tuple(self._held.items())

    @property
    def is_idle(self) -> bool:
        """Nothing runs in the child."""
        return not self._batches

    @property
    def is_empty(self) -> bool:
        """Nothing runs, waits or is unreported."""
        return not (self._batches or self._waiting or self.outbox)

    def want(self) -> int:
        """How many jobs the next call may hand out."""
        if not (self.is_open and self.is_accepting):
            return 0
        unreported = len(self._held) - len(self.outbox)
        return max(0, min(MOST_WANTED, self._models.slots - unreported))

    def starts(self) -> tuple[Start, ...]:
        """Runs that the ledger does not know to have begun, with their age by now."""
        now = time.monotonic()
        return tuple(
            Start(job, lease, round((now - since) * 1000))
            for job, (lease, since) in list(self._starts.items())
        )

    # -- the ledger's words

    def take(self, handout: Handout, reported: Sequence[Report]) -> None:
        """An answer came: these reports are acknowledged, and these jobs are ours."""
        for report in reported:
            if self._held.get(report.job_id) == report.lease_id:
                del self._held[report.job_id]
            self._starts.pop(report.job_id, None)
        gone = {(report.job_id, report.lease_id) for report in reported}
        self.outbox = [r for r in self.outbox if (r.job_id, r.lease_id) not in gone]
        for job in handout.jobs:
            if self._held.get(job.job_id) == job.lease_id:
                continue
            leased = self._leased_bytes()
            self._held[job.job_id] = job.lease_id
            if job.inputs is None:
                self._report(job, "failed", code="internal", detail=f"job {job.job_id}: its inputs are gone")
            elif self._must_refuse(job, leased):
                log_event(
                    _LOG, "job_handed_back", logging.WARNING, job=job.job_id, lease_bytes=job.lease_bytes
                )
                self._report(job, "give_back", detail="it would exceed what was measured on the card")
            else:
                self._waiting[job.job_id] = job
        self.dispatch()

    def started_known(self, starts: Sequence[Start]) -> None:
        """The ledger knows these starts."""
        for start in starts:
            known = self._starts.get(start.job_id)
            if known is not None and known[0] == start.lease_id:
                del self._starts[start.job_id]

    def cancel(self, cancels: Sequence[Cancel]) -> None:
        """End jobs that are settled for their callers already."""
        for cancel in cancels:
            waiting = self._waiting.get(cancel.job_id)
            if waiting is not None and waiting.lease_id == cancel.lease_id:
                del self._waiting[cancel.job_id]
                self._report(waiting, "ended")
                continue
            batch, index = self._find(cancel.job_id, cancel.lease_id)
            if batch is None:
                continue
            self._end_item(batch, index, batch.cancelled)
            if cancel.force:
                self._kill(f"job {cancel.job_id} was cancelled by force")
                return

    def recall(self, job_ids: Sequence[str]) -> None:
        """Give back jobs that an idle card wants, where they have not been started."""
        for job_id in job_ids:
            job = self._waiting.pop(job_id, None)
            if job is not None:
                self._report(job, "give_back")

    def give_back(self) -> None:
        """Give back everything that has not been started."""
        self.recall(list(self._waiting))

    # -- the child's words

    def open(self, send: Send) -> None:
        """A child is ready to run."""
        self._send, self.is_open = send, True
        self.dispatch()

    def close(self) -> None:
        """Start nothing more; what runs goes on."""
        self.is_open = False

    def dispatch(self) -> None:
        """Start what can be started now."""
        while self.is_open and self._waiting and not self.is_silent():
            chosen = self._next_batch()
            if chosen is None:
                return
            self._start(*chosen)

    def on_started(self, number: int) -> None:
        batch = self._batches.get(number)
        if batch is None:
            return
        batch.started = time.monotonic()
        loop = asyncio.get_running_loop()
        for index, job in enumerate(batch.jobs):
            self._starts[job.job_id] = (job.lease_id, batch.started)
            timer = loop.call_later(job.run_timeout_ms / 1000, self._run_out, batch, index)
            batch.timers.append(timer)
        self._changed()

    def on_done(self, message: Mapping[str, Any]) -> None:
        """A batch is over: one report per item."""
        batch = self._batches.pop(int(message["batch"]), None)
        if batch is None:
            return
        self._forget_timers(batch)
        batch.model.busy.discard(batch.number)
        self._learn(batch, message)
        peak, run_ms = int(message["peak"]), int(message["run_ms"])
        leased = sum(job.lease_bytes for job in batch.jobs)
        for index, (job, item) in enumerate(zip(batch.jobs, message["items"], strict=True)):
            # Shown, not learned from: what one item of a batch took cannot be told from outside.
            share = peak * job.lease_bytes // leased if leased else peak
            self._report_item(batch, index, job, item, peak=share, run_ms=run_ms)
        self.dispatch()

    def on_event(self, message: Mapping[str, Any]) -> None:
        """Progress or a piece of output of a running batch."""
        batch = self._batches.get(int(message["batch"]))
        if batch is None:
            return
        item = message["item"]
        for index in range(len(batch.jobs)) if item is None else (int(item),):
            if message["t"] == "progress":
                fields = {"done": message["done"], "total": message["total"]}
                self._event(batch.jobs[index], "progress", fields)
            else:
                self._event(batch.jobs[index], "output", {"data": message["data"]})

    # -- ends

    def child_ended(self, kind: OutcomeKind, *, detail: str) -> None:
        """The child is gone, or about to be killed. kind: `crashed` by itself, or `killed` because of some
        of its jobs.
        """
        self.close()
        self._send = None
        running = [
            (batch, index, job) for batch in self._batches.values() for index, job in enumerate(batch.jobs)
        ]
        for batch in self._batches.values():
            self._forget_timers(batch)
        self._batches.clear()
        for batch, index, job in running:
            if index in batch.cancelled:
                self._report(job, "ended")
            elif index in batch.overdue:
                self._report_overdue(job)
            else:
                self._report(job, kind, detail=detail, alone=len(running) == 1)
        self.give_back()

    def session_lost(self) -> None:
        """Another session owns what we held: nothing of it will be reported, and what runs is to end."""
        self.close()
        self._waiting.clear()
        self._held.clear()
        self._starts.clear()
        self.outbox.clear()
        for batch in self._batches.values():
            for index in range(len(batch.jobs)):
                self._end_item(batch, index, batch.cancelled)

    # -- inside

    def _next_batch(self) -> tuple[CardModel, list[HandedJob]] | None:
        waiting = list(self._waiting.values())
        lonely = next((job for job in waiting if job.alone), None)
        if any(job.alone for batch in self._batches.values() for job in batch.jobs):
            return None
        if lonely is not None:
            # It runs alone in the child: nothing starts before it, or it would never be alone.
            model = self._models.get(lonely.model)
            return (model, [lonely]) if model is not None and not self._batches else None
        for model in self._models.ready:
            mine = [job for job in waiting if job.model == model.name]
            if mine and len(model.busy) < model.lanes:
                known = model.known
                assert known is not None
                return model, form_batch(
                    mine,
                    max_batch=model.max_batch,
                    need=lambda units, m=model, k=known: k.batch_bytes(units, m.batch_units),  # type: ignore[misc]
                )
        return None

    def _start(self, model: CardModel, jobs: Sequence[HandedJob]) -> None:
        assert self._send is not None
        self._numbers += 1
        batch = Batch(self._numbers, model, jobs)
        for job in jobs:
            del self._waiting[job.job_id]
        self._batches[batch.number] = batch
        model.busy.add(batch.number)
        longest_s = max(job.run_timeout_ms for job in jobs) / 1000
        self._send(
            {
                "t": "run",
                "batch": batch.number,
                "model": model.name,
                "jobs": [[job.job_id, job.inputs, job.units] for job in jobs],
                "busy_s": longest_s + self._limits.cancel_grace_s + WATCHDOG_SLACK_S,
            }
        )

    def _run_out(self, batch: Batch, index: int) -> None:
        log_event(_LOG, "run_timeout", job=batch.jobs[index].job_id, model=batch.model.name)
        self._end_item(batch, index, batch.overdue)

    def _end_item(self, batch: Batch, index: int, why: set[int]) -> None:
        """Tell the model; when it does not end within the grace and nobody else is there to be hurt, kill."""
        if index in batch.cancelled or index in batch.overdue:
            why.add(index)
            return
        why.add(index)
        if self._send is not None:
            self._send({"t": "cancel", "batch": batch.number, "item": index})
        loop = asyncio.get_running_loop()
        batch.timers.append(loop.call_later(self._limits.cancel_grace_s, self._grace_over, batch))

    def _grace_over(self, batch: Batch) -> None:
        if batch.number not in self._batches:
            return
        if batch.overdue:
            self._kill(f"job {batch.jobs[min(batch.overdue)].job_id} ran past its clock")
        elif all(other.is_unwanted for other in self._batches.values()):
            self._kill("all work in the child is cancelled and it did not stop")
        else:
            loop = asyncio.get_running_loop()
            batch.timers.append(loop.call_later(self._limits.cancel_grace_s, self._grace_over, batch))

    def _report_item(
        self, batch: Batch, index: int, job: HandedJob, item: Sequence[Any], *, peak: int, run_ms: int
    ) -> None:
        kind, result, code, detail = item
        if index in batch.cancelled:
            self._report(job, "ended", peak=peak, run_ms=run_ms)
        elif index in batch.overdue:
            self._report_overdue(job, peak=peak, run_ms=run_ms)
        elif kind == "ok":
            self.succeeded += 1
            self._report(job, "succeeded", result=result, peak=peak, run_ms=run_ms)
        elif kind == "oom":
            self._report(job, "oom", code=code, detail=detail, peak=peak, run_ms=run_ms, alone=job.alone)
        elif kind == "cancelled":
            text = "the model raised vramgate.Cancelled although nobody had cancelled the job"
            self._report(job, "failed", code="model_error", detail=text, peak=peak, run_ms=run_ms)
        else:
            self._report(job, "failed", code=code, detail=detail, peak=peak, run_ms=run_ms)

    def _report_overdue(self, job: HandedJob, *, peak: int = 0, run_ms: int | None = None) -> None:
        text = f"job {job.job_id}: the run passed its limit of {job.run_timeout_ms / 1000:g} s"
        spent = job.run_timeout_ms if run_ms is None else run_ms
        self._report(job, "failed", code="run_timeout", detail=text, peak=peak, run_ms=spent)

    def _report(
        self,
        job: HandedJob,
        kind: OutcomeKind,
        *,
        result: bytes | None = None,
        code: str | None = None,
        detail: str | None = None,
        peak: int = 0,
        run_ms: int = 0,
        alone: bool = False,
    ) -> None:
        if self._held.get(job.job_id) != job.lease_id:
            return
        self.outbox.append(
            Report(
                job.job_id,
                job.lease_id,
                kind,
                result=result,
                result_bytes=len(result) if result is not None else 0,
                code=code,
                detail=detail,
                peak_bytes=peak,
                run_ms=run_ms,
                alone=alone,
            )
        )
        self._changed()

    def _learn(self, batch: Batch, message: Mapping[str, Any]) -> None:
        known = batch.model.known
        if known is None:
            return
        known = known.with_buffers(int(message["buffers"]))
        if not message["shared"]:
            units = [job.units for job in batch.jobs]
            need = max(units) * len(units) if batch.model.batch_units == "max_times_n" else sum(units)
            known = known.raised(items=len(units), units=need, peak=int(message["peak"]))
        if known != batch.model.known:
            batch.model.known = known

    def _must_refuse(self, job: HandedJob, leased: int) -> bool:
        # An exclusive lease is all that was grantable: it fits by its making, and it comes to an empty card.
        if job.alone or self._models.get(job.model) is None:
            return not job.alone
        return budget.exceeds_budget(
            job.lease_bytes,
            held=leased,
            resident=self._models.resident,
            sample=self.sample(),
            headroom=self._limits.headroom,
        )

    def _leased_bytes(self) -> int:
        running = (job.lease_bytes for batch in self._batches.values() for job in batch.jobs)
        return sum(running) + sum(job.lease_bytes for job in self._waiting.values())

    def _find(self, job_id: str, lease_id: str) -> tuple[Batch | None, int]:
        for batch in self._batches.values():
            for index, job in enumerate(batch.jobs):
                if job.job_id == job_id and job.lease_id == lease_id:
                    return batch, index
        return None, 0

    def _forget_timers(self, batch: Batch) -> None:
        for timer in batch.timers:
            timer.cancel()
        batch.timers.clear()
