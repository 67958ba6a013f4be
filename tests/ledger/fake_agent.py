"""An agent without torch and without a process: it speaks to the ledger as a real one does."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from scheduler import cards
from scheduler.fingerprint import canonical, fingerprint
from scheduler.handover import Beat, BeatAnswer, HandedJob, Handout, OutcomeKind, Report, Start
from scheduler.registration import CardRegistration, HostedModel, Sample
from scheduler.store import Store
from scheduler.submissions import SubmitRequest

GIB = 2**30
MIB = 2**20


def hosted(
    name: str = "echo",
    *,
    version: str = "v1",
    slots: int = 4,
    ready: bool = True,
    resident: int = 0,
    takes: str | None = None,
) -> HostedModel:
    """takes: the name of the only field of its inputs, which is required; None takes anything."""
    schema = None if takes is None else {"type": "object", "required": [takes], "properties": {takes: {}}}
    return HostedModel(
        name=name,
        version=version,
        ready=ready,
        reason=None if ready else "does not fit",
        slots=slots,
        max_batch=slots,
        lanes=1,
        resident_bytes=resident,
        c0_item=MIB,
        c1=0.0,
        units="1",
        batch_units="sum",
        schema=schema,
        schema_hash=takes or "",
    )


def request(
    model: str = "echo",
    *,
    nbytes: int = GIB,
    key: str | None = None,
    worker: str = "w1",
    inputs: object = 1,
    **given: object,
) -> SubmitRequest:
    packed = canonical({"x": inputs})
    return SubmitRequest(
        job_id=secrets.token_hex(16),
        model=model,
        inputs=packed,
        lease_bytes=nbytes,
        units=1.0,
        worker=worker,
        key=key,
        fingerprint=fingerprint(model, packed) if key is not None else None,
        **given,  # type: ignore[arg-type]
    )


BeatState = Literal["ready", "starting", "down", "draining"]


class FakeAgent:
    """Holds a card with `total` bytes. `used_by_strangers` appears in its samples."""

    def __init__(
        self,
        store: Store,
        card: str = "GPU-a",
        *,
        total: int = 10 * GIB,
        models: Sequence[HostedModel] = (),
        slots: int = 16,
    ) -> None:
        self.store = store
        self.card = card
        self.name = f"host:{card}"
        self.total = total
        self.models = tuple(models) or (hosted(),)
        self.slots = slots
        self.session = secrets.token_hex(16)
        self.seq = 0
        self._heard_ms, self._heard_at = 0, 0.0
        self.foreign = 0
        self.held: dict[str, HandedJob] = {}
        self.started: list[Start] = []
        self.applied = 0
        self.disputed: Mapping[str, str] = {}

    @property
    def now_ms(self) -> int:
        """Redis time as an agent reckons it: the last that it heard, and what has passed since."""
        passed_ms = int((time.monotonic() - self._heard_at) * 1000) if self._heard_ms else 0
        return self._heard_ms + passed_ms

    @now_ms.setter
    def now_ms(self, heard_ms: int) -> None:
        self._heard_ms, self._heard_at = heard_ms, time.monotonic()

    def renew(self) -> None:
        """A new process for the same card: a new session that holds nothing."""
        self.disputed = {}
        self.session = secrets.token_hex(16)
        self.seq = self.applied = 0
        self.held.clear()
        self.started.clear()

    def sample(self) -> Sample:
        return Sample(
            read_ms=self.now_ms,
            total=self.total,
            driver=0,
            used=self.foreign,
            own=0,
            allocated=0,
            reserved=0,
            context=0,
        )

    async def register(self, *, state: BeatState = "ready") -> None:
        registration = CardRegistration(
            card=self.card,
            session=self.session,
            host="host",
            name=self.name,
            index=0,
            product="fake",
            pid=1,
            headroom=0,
            slots=self.slots,
            models=self.models,
            sample=self.sample() if self.now_ms else None,
        )
        self.now_ms = await cards.register(self.store, registration, state=state)
        await self.beat(state, models=self.models)

    async def beat(
        self,
        state: BeatState = "ready",
        *,
        applied: int | None = None,
        held: Sequence[HandedJob] | None = None,
        models: Sequence[HostedModel] | None = None,
    ) -> BeatAnswer:
        """models: published from now on; as a real agent, it repeats them while one is in dispute."""
        if models is not None:
            self.models = tuple(models)
        says_models = models is not None or self.disputed
        holding = list(self.held.values()) if held is None else held
        beat = Beat(
            state=state,
            reason=None,
            applied_seq=self.applied if applied is None else applied,
            held=tuple((job.job_id, job.lease_id) for job in holding),
            starts=tuple(self.started),
            sample=self.sample(),
            models=self.models if says_models else None,
        )
        answer = await cards.heartbeat(
            self.store, card=self.card, session=self.session, beat=beat, slots=self.slots
        )
        self.disputed = answer.disputed
        self.started.clear()
        self.now_ms = answer.now_ms
        return answer

    def start(self, job: HandedJob, *, age_ms: int = 0) -> None:
        self.started.append(Start(job.job_id, job.lease_id, age_ms))

    def _take(self, handout: Handout) -> Handout:
        self.now_ms = handout.now_ms
        self.applied = self.seq
        self.held |= {job.lease_id: job for job in handout.jobs}
        return handout

    async def claim(self, want: int = 16) -> list[HandedJob]:
        self.seq += 1
        starts, self.started = self.started, []
        handout = await cards.claim(
            self.store,
            card=self.card,
            session=self.session,
            seq=self.seq,
            want=want,
            starts=starts,
            sample=self.sample(),
        )
        return list(self._take(handout).jobs)

    async def finish(self, *reports: Report, want: int = 0) -> Handout:
        self.seq += 1
        starts, self.started = self.started, []
        handout = await cards.finish(
            self.store,
            card=self.card,
            session=self.session,
            seq=self.seq,
            reports=reports,
            starts=starts,
            sample=self.sample(),
            want=want,
        )
        for report in reports:
            self.held.pop(report.lease_id, None)
        return self._take(handout)

    async def down(self, *reports: Report, reason: str = "its child must be killed") -> Handout:
        self.seq += 1
        handout = await cards.card_down(
            self.store, card=self.card, session=self.session, seq=self.seq, reason=reason, reports=reports
        )
        for report in reports:
            self.held.pop(report.lease_id, None)
        return self._take(handout)

    async def run_all(self) -> int:
        """Claim and answer until there is nothing more."""
        done = 0
        while jobs := await self.claim():
            for job in jobs:
                self.start(job)
            await self.finish(*(ok(job) for job in jobs))
            done += len(jobs)
        return done


def ok(job: HandedJob, result: bytes = b"\xa2ok") -> Report:
    return Report(job.job_id, job.lease_id, "succeeded", result=result, peak_bytes=1, run_ms=1)


def said(job: HandedJob, kind: OutcomeKind, *, alone: bool = False) -> Report:
    return Report(job.job_id, job.lease_id, kind, alone=alone)


def failed(job: HandedJob, code: str = "model_error") -> Report:
    return Report(job.job_id, job.lease_id, "failed", code=code, detail="it said no", run_ms=1)
