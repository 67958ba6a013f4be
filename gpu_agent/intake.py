"""What this card has to do: jobs at hand, batches in the child, and what becomes of each.

Owns: which batch starts when, cancels and run clocks, and how a job ends when its batch, the child or the
session does. Does not own: what the ledger believes (`held`), the calls to it (`exchange`), or the life of
the child (`life`). Used from one thread; acts on the child through the `send` that it is given, and never
waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_agent import budget
from gpu_agent.batching import form_batch
from gpu_agent.held import Held
from gpu_agent.hosting import CardModel, CardModels
from scheduler.handover import Cancel, HandedJob, Handout, OutcomeKind, Report
from scheduler.logs import log_event
from scheduler.registration import Sample

_LOG = logging.getLogger(__name__)
WATCHDOG_SLACK_S = 5.0
MOST_WANTED = 16

Send = Callable[[Mapping[str, Any]], None]


@dataclass(slots=True)
class Batch:
    """One batch in the child. cancelled and overdue hold positions in `jobs`; results, by position, are those
    that came ahead of its end.
    """

    number: int
    model: CardModel
    jobs: Sequence[HandedJob]
    cancelled: set[int] = field(default_factory=set)
    overdue: set[int] = field(default_factory=set)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    results: dict[int, bytes] = field(default_factory=dict)

    @property
    def is_unwanted(self) -> bool:
        return len(self.cancelled | self.overdue) == len(self.jobs)

    def later(self, seconds: float, step: Callable[..., None], *args: Any) -> None:
        self.timers.append(asyncio.get_running_loop().call_later(seconds, step, *args))

    def forget_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the intake asks of, and tells, the rest of the supervisor."""

    kill: Callable[[str], None]
    event: Callable[[HandedJob, str, Mapping[str, Any]], None]
    sample: Callable[[], Sample | None]
    is_silent: Callable[[], bool]
    cancel_grace_s: float
    headroom: int


class Intake:
    """The jobs of one card."""

    def __init__(self, models: CardModels, held: Held, around: Surroundings) -> None:
        self._models = models
        self._held = held
        self._around = around
        self._send: Send | None = None
        self._numbers = 0
        self._waiting: dict[str, HandedJob] = {}
        self._batches: dict[int, Batch] = {}
        self.is_open = False
        self.is_accepting = True
        self.succeeded = 0

    @property
    def is_idle(self) -> bool:
        """Nothing runs in the child."""
        return not self._batches

    def want(self) -> int:
        """How many jobs the next call may hand out."""
        if not (self.is_open and self.is_accepting):
            return 0
        return max(0, min(MOST_WANTED, self._models.slots - self._held.unreported))

    # -- the ledger's words

    def take(self, handout: Handout, reported: Sequence[Report]) -> None:
        """An answer came: these reports are acknowledged, and these jobs are ours."""
        self._held.acknowledge(reported)
        leased = self._leased_bytes() if handout.jobs else 0
        for job in handout.jobs:
            if self._held.has(job.job_id, job.lease_id):
                continue
            self._held.take(job)
            if job.inputs is None:
                self._held.report(
                    job, "failed", code="internal", detail=f"job {job.job_id}: its inputs are gone"
                )
            elif self._send is None or self._must_refuse(job, leased):
                log_event(
                    _LOG, "job_handed_back", logging.WARNING, job=job.job_id, lease_bytes=job.lease_bytes
                )
                self._held.report(job, "give_back")
            else:
                self._waiting[job.job_id] = job
                leased += job.lease_bytes
        self.dispatch()

    def cancel(self, cancels: Sequence[Cancel]) -> None:
        """End jobs that are settled for their callers already."""
        for cancel in cancels:
            waiting = self._waiting.get(cancel.job_id)
            if waiting is not None and waiting.lease_id == cancel.lease_id:
                del self._waiting[cancel.job_id]
                self._held.report(waiting, "ended")
                continue
            batch, index = self._find(cancel.job_id, cancel.lease_id)
            if batch is None:
                continue
            self._end_item(batch, index, batch.cancelled)
            # A run past its clock has the grace as well: most models stop at their next step, and a kill
            # costs all.
            if cancel.force and cancel.reason != "run_timeout":
                self._around.kill(f"job {cancel.job_id} was cancelled by force")
                return

    def recall(self, job_ids: Sequence[str]) -> None:
        """Give back jobs that an idle card wants, where they have not been started."""
        for job_id in job_ids:
            job = self._waiting.pop(job_id, None)
            if job is not None:
                self._held.report(job, "give_back")

    def give_back(self) -> None:
        """Give back everything that has not been started."""
        self.recall(list(self._waiting))

    # -- the child's words

    def open(self, send: Send) -> None:
        """A child is ready to run."""
        self._send, self.is_open = send, True
        ready = {model.name for model in self._models.ready}
        self.recall([job.job_id for job in self._waiting.values() if job.model not in ready])
        self.dispatch()

    def close(self) -> None:
        """Start nothing more; what runs goes on."""
        self.is_open = False

    def dispatch(self) -> None:
        """Start what can be started now."""
        while self.is_open and self._waiting and not self._around.is_silent():
            chosen = self._next_batch()
            if chosen is None:
                return
            self._start(*chosen)

    def on_result(self, message: Mapping[str, Any]) -> None:
        """A large result of a batch whose end follows."""
        batch = self._batches.get(int(message["batch"]))
        if batch is not None:
            batch.results[int(message["item"])] = message["data"]

    def on_done(self, message: Mapping[str, Any]) -> None:
        """A batch is over: one report per item. Raises ValueError where it says less or more than that."""
        batch = self._batches.get(int(message["batch"]))
        if batch is None:
            return
        # Read before the batch is taken out: one whose end cannot be understood is left to its clocks.
        ended = list(zip(batch.jobs, message["items"], strict=True))
        run_ms = int(message["run_ms"])
        # 0: not known. What others allocated meanwhile must not be shown as this batch's own.
        peak = 0 if message["shared"] else int(message["peak"])
        self._learn(batch, message)
        del self._batches[batch.number]
        batch.forget_timers()
        batch.model.busy.discard(batch.number)
        leased = sum(job.lease_bytes for job in batch.jobs)
        for index, (job, item) in enumerate(ended):
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
            else:
                fields = {"data": message["data"]}
            self._around.event(batch.jobs[index], str(message["t"]), fields)

    # -- ends

    def child_ended(self, kind: OutcomeKind, *, detail: str) -> None:
        """The child is gone, or about to be. kind: `crashed` by itself, `killed` because of some of its
        jobs.
        """
        self.close()
        self._send = None
        batches, self._batches = list(self._batches.values()), {}
        was_alone = sum(len(batch.jobs) for batch in batches) == 1
        for batch in batches:
            batch.forget_timers()
            for index, job in enumerate(batch.jobs):
                if index in batch.cancelled:
                    self._held.report(job, "ended")
                elif index in batch.overdue:
                    self._report_overdue(job, run_ms=job.run_timeout_ms)
                else:
                    self._held.report(job, kind, detail=detail, alone=was_alone)
        self.give_back()

    def session_lost(self) -> None:
        """Another session owns what we held: nothing of it will be reported, and what runs is to end."""
        self.close()
        self._waiting.clear()
        self._held.forget()
        for batch in self._batches.values():
            for index in range(len(batch.jobs)):
                self._end_item(batch, index, batch.cancelled)

    # -- inside

    def _next_batch(self) -> tuple[CardModel, list[HandedJob]] | None:
        waiting = list(self._waiting.values())
        if any(job.alone for batch in self._batches.values() for job in batch.jobs):
            return None
        lonely = next((job for job in waiting if job.alone), None)
        if lonely is not None:
            # It runs alone in the child: nothing starts before it, or it would never be alone.
            model = self._models.get(lonely.model)
            return (model, [lonely]) if model is not None and not self._batches else None
        for model in self._models.ready:
            mine = [job for job in waiting if job.model == model.name]
            if mine and len(model.busy) < model.lanes:
                return model, form_batch(mine, max_batch=model.max_batch, need=model.batch_bytes)
        return None

    def _start(self, model: CardModel, jobs: Sequence[HandedJob]) -> None:
        assert self._send is not None
        self._numbers += 1
        batch = Batch(self._numbers, model, jobs)
        for job in jobs:
            del self._waiting[job.job_id]
        self._batches[batch.number] = batch
        model.busy.add(batch.number)
        limits_ms = {job.run_timeout_ms for job in jobs}
        self._send(
            {
                "t": "run",
                "batch": batch.number,
                "model": model.name,
                "jobs": [[job.job_id, job.inputs, job.units, job.wants_events] for job in jobs],
                "busy_s": max(limits_ms) / 1000 + self._around.cancel_grace_s + WATCHDOG_SLACK_S,
            }
        )
        # A lane is free for it and nobody can take it back: that it began need not be heard from the child.
        for job in jobs:
            self._held.start(job)
        for limit_ms in limits_ms:
            batch.later(limit_ms / 1000, self._run_out, batch, limit_ms)

    def _run_out(self, batch: Batch, limit_ms: int) -> None:
        """The clock of those of its jobs that have this limit has passed."""
        for index, job in enumerate(batch.jobs):
            if job.run_timeout_ms == limit_ms:
                log_event(_LOG, "run_timeout", job=job.job_id, model=batch.model.name)
                self._end_item(batch, index, batch.overdue)

    def _end_item(self, batch: Batch, index: int, why: set[int]) -> None:
        """Tell the model; when it does not end within the grace and nobody else is there to be hurt, kill."""
        was_told = index in batch.cancelled or index in batch.overdue
        why.add(index)
        if was_told:
            return
        if self._send is not None:
            self._send({"t": "cancel", "batch": batch.number, "item": index})
        batch.later(self._around.cancel_grace_s, self._grace_over, batch)

    def _grace_over(self, batch: Batch) -> None:
        if batch.number not in self._batches:
            return
        if batch.overdue:
            self._around.kill(f"job {batch.jobs[min(batch.overdue)].job_id} ran past its clock")
        elif all(other.is_unwanted for other in self._batches.values()):
            self._around.kill("all work in the child is cancelled and it did not stop")
        else:
            batch.later(self._around.cancel_grace_s, self._grace_over, batch)

    def _report_item(
        self, batch: Batch, index: int, job: HandedJob, item: Sequence[Any], *, peak: int, run_ms: int
    ) -> None:
        kind, result, code, detail, field = item
        result = batch.results.pop(index, result)
        if index in batch.cancelled:
            self._held.report(job, "ended", peak=peak, run_ms=run_ms)
        elif index in batch.overdue:
            self._report_overdue(job, peak=peak, run_ms=run_ms)
        elif kind == "ok":
            self.succeeded += 1
            self._held.report(job, "succeeded", result=result, peak=peak, run_ms=run_ms)
        elif kind == "oom":
            self._held.report(job, "oom", code=code, detail=detail, peak=peak, run_ms=run_ms, alone=job.alone)
        elif kind == "cancelled":
            text = "the model raised vramgate.Cancelled although nobody had cancelled the job"
            self._held.report(job, "failed", code="model_error", detail=text, peak=peak, run_ms=run_ms)
        else:
            self._held.report(job, "failed", code=code, detail=detail, field=field, peak=peak, run_ms=run_ms)

    def _report_overdue(self, job: HandedJob, *, run_ms: int, peak: int = 0) -> None:
        text = f"job {job.job_id}: the run passed its limit of {job.run_timeout_ms / 1000:g} s"
        self._held.report(job, "failed", code="run_timeout", detail=text, peak=peak, run_ms=run_ms)

    def _learn(self, batch: Batch, message: Mapping[str, Any]) -> None:
        # A peak that others had a part in says nothing of this batch.
        peak = None if message["shared"] else int(message["peak"])
        batch.model.learn([job.units for job in batch.jobs], peak=peak, buffers=int(message["buffers"]))

    def _must_refuse(self, job: HandedJob, leased: int) -> bool:
        if self._models.get(job.model) is None:
            return True
        # An exclusive lease is all that was grantable: it fits by its making, and it comes to an empty card.
        return not job.alone and budget.exceeds_budget(
            job.lease_bytes,
            held=leased,
            resident=self._models.resident,
            sample=self._around.sample(),
            headroom=self._around.headroom,
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
