"""What passes between an agent and the ledger while its session lives: jobs that are handed out, reports of
what became of them, and beats with their answers.

Bytes are integers below 2**53, times are milliseconds of Redis time unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from scheduler.registration import HostedModel, Sample
from scheduler.states import AgentState, OperatorState


@dataclass(frozen=True, slots=True)
class Start:
    """A job that began to run on the card `age_ms` before this call."""

    job_id: str
    lease_id: str
    age_ms: int


OutcomeKind = Literal["succeeded", "failed", "ended", "give_back", "oom", "crashed", "killed"]


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one handed-out job, said by the holder of its lease.

    kind: succeeded (result), failed (code, detail, and the field of the inputs at fault), ended (a cancelled
    or timed-out job is off the card; if the ledger still holds it live, it is requeued), give_back (never
    started; requeued without a count), oom (requeued alone once, then failed), crashed (alone says whether
    it ran alone), killed (was in a child that was killed because of others; requeued without a count).
    result: msgpack; sent inline up to 64 KiB, larger ones are stored by `results.put` first and is_stored is
    True.
    """

    job_id: str
    lease_id: str
    kind: OutcomeKind
    result: bytes | None = None
    is_stored: bool = False
    result_bytes: int = 0
    code: str | None = None
    detail: str | None = None
    field: str | None = None
    peak_bytes: int = 0
    run_ms: int = 0
    alone: bool = False


@dataclass(frozen=True, slots=True)
class HandedJob:
    """A job that claim or finish hands to an agent. inputs is None when it must be read by `jobs.payload`.

    alone: run it alone in the child. run_timeout_ms counts from its start, total_left_ms from the reply.
    """

    job_id: str
    lease_id: str
    lease_bytes: int
    model: str
    version: str
    units: float
    attempt: int
    alone: bool
    run_timeout_ms: int
    total_left_ms: int
    inputs: bytes | None
    wants_events: bool
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Handout:
    """The answer to claim and finish. verdicts: per report `ok`, `settled` (it had been settled before) or
    `stale` (fenced off).

    more: the ledger has more to do for this card at once: call again. now_ms: Redis time of the answer.
    """

    now_ms: int
    jobs: tuple[HandedJob, ...]
    verdicts: tuple[str, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat. held: (job, lease) pairs that the agent holds, until their finish is acknowledged.

    applied_seq: the last claim/finish whose answer the agent has taken in. state: `ready`, `starting`, `down`
    or `draining`, with a reason.
    """

    state: AgentState
    reason: str | None
    applied_seq: int
    held: tuple[tuple[str, str], ...]
    starts: tuple[Start, ...]
    sample: Sample | None
    models: tuple[HostedModel, ...] | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """A lease whose job has been settled for its callers: end it on the card. force: kill without grace."""

    job_id: str
    lease_id: str
    force: bool
    reason: str


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    """What the ledger tells an agent: Redis time, cancels, jobs to give back when not started, the operator's
    wish. disputed: model -> why the card is no place for it; known where the beat carried the models, so they
    are to be sent again until nothing is disputed.
    """

    now_ms: int
    cancels: tuple[Cancel, ...]
    recalls: tuple[str, ...]
    operator_state: OperatorState
    has_work: bool
    more: bool
    disputed: Mapping[str, str] = field(default_factory=dict)
