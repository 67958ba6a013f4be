"""The value objects that pass between gateways, agents, operators and the ledger.

Bytes are integers below 2**53, times are milliseconds of Redis time unless the name says otherwise.
Everything here is frozen: a newer state is a new object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

State = Literal["queued", "leased", "running", "succeeded", "failed", "cancelled", "expired"]
SETTLED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled", "expired"})
OperatorState = Literal["ready", "cordoned", "draining"]
AgentState = Literal["starting", "ready", "down", "draining"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """One call of infer, validated and measured by a gateway.

    job_id: fresh 32 hex characters; also the id of this client: `abandon` names it. When the submit joins
    another job, the client id stays this one. inputs: canonical msgpack. lease_bytes: the estimate. units:
    the measured units, for batching.
    """

    job_id: str
    model: str
    inputs: bytes
    lease_bytes: int
    units: float
    worker: str
    is_async: bool = False
    priority: int = 4
    max_wait_ms: int = 30_000
    run_timeout_ms: int = 60_000
    total_timeout_ms: int = 100_000
    tenant: str = "-"
    key: str | None = None
    fingerprint: str | None = None
    request_id: str | None = None
    wants_events: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job settled, as it is pinned to a key and rendered by a gateway.

    result: msgpack of the outputs, None when the job did not succeed or when the result is no longer stored.
    code/detail: set when the job did not succeed.
    """

    job_id: str
    state: State
    model: str
    version: str
    code: str | None
    detail: str | None
    result: bytes | None
    card: str | None
    wait_ms: int
    run_ms: int
    total_ms: int
    leased_bytes: int
    peak_bytes: int
    attempts: int
    degraded: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Submitted:
    """What submit did: stored a new job, joined one that lives (same key), or replayed a settled one.

    position: 1-based place in its class, 0 = not queued. outcome: set when replayed.
    """

    job_id: str
    how: Literal["stored", "joined", "replayed"]
    state: State
    position: int
    card: str | None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as anybody may see it. Times are Redis ms, None where it has not happened. run_ms: of its last
    run, so far or in all; what it has lived beside that it has waited.

    why: the reason why it waits (`no_ready_card`, `card_full`, `slots`, `behind`, `reserved`,
    `previous_run`), None when it does not.
    """

    id: str
    model: str
    version: str | None
    state: State
    tenant: str
    has_key: bool
    priority: int
    attempt: int
    clients: int
    card: str | None
    lease_id: str | None
    lease_bytes: int
    units: float
    peak_bytes: int
    position: int
    eta_ms: int | None
    why: str | None
    created_ms: int
    wait_started_ms: int
    granted_ms: int | None
    started_ms: int | None
    settled_ms: int | None
    deadline_ms: int | None
    now_ms: int
    run_ms: int
    crashes: int
    losses: int
    code: str | None
    detail: str | None
    has_result: bool
    events: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One stamped memory reading of a card (3-memory-and-agent.md, "What may be granted").

    own = reserved + context; all bytes. read_ms: Redis time of the reading, as the agent reckons it.
    used_by_lease: external lease id -> measured use of its process tree; None where processes are not
    visible.
    """

    read_ms: int
    total: int
    driver: int
    used: int
    own: int
    allocated: int
    reserved: int
    context: int
    used_by_lease: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model on a card: what an agent publishes of it at registration and in beats.

    slots: how many jobs of it may be leased on this card at once (lanes x max_batch + one prefetched batch,
    or its `concurrency`). resident_bytes: weights and what one lane needs however small the input. lease =
    c0_item + c1 x units. schema_hash: empty until it was loaded once; nothing is known of its inputs before.
    """

    name: str
    version: str
    ready: bool
    reason: str | None
    slots: int
    max_batch: int
    lanes: int
    resident_bytes: int
    c0_item: int
    c1: float
    units: str
    batch_units: str
    schema: Mapping[str, Any] | None
    schema_hash: str
    output_schema: Mapping[str, Any] | None = None
    owned_by: str = "vramgate"

    @property
    def contract(self) -> str:
        """What gateways hold callers to: how inputs are read, and what units mean. Living cards that host one
        name and version have the same; estimates and slots are each card's own. Empty: nothing is known.
        """
        is_known = self.ready or self.schema_hash
        return f"{self.schema_hash} {self.batch_units} {self.units}" if is_known else ""


@dataclass(frozen=True, slots=True)
class CardRegistration:
    """What an agent says when it takes a card. `slots` bounds all models of the card together."""

    card: str
    session: str
    host: str
    name: str
    index: int
    product: str
    pid: int
    headroom: int
    slots: int
    models: tuple[HostedModel, ...]
    sample: Sample | None
    simulated: bool = False


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

    kind: succeeded (result), failed (code + detail of a final failure), ended (a cancelled or timed-out job
    is off the card; if the ledger still holds it live, it is requeued), give_back (never started; requeued
    without a count), oom (requeued alone once, then failed), crashed (alone says whether it ran alone),
    killed (was in a child that was killed because of others; requeued without a count). result: msgpack; sent
    inline up to 64 KiB, larger ones are stored by `results.put` first and is_stored is True.
    """

    job_id: str
    lease_id: str
    kind: OutcomeKind
    result: bytes | None = None
    is_stored: bool = False
    result_bytes: int = 0
    code: str | None = None
    detail: str | None = None
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


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger identity of a card: usable = resident + jobs + external + lingering + foreign + overrun +
    withheld + reserved_for_head + grantable.
    """

    usable: int
    resident: int
    jobs: int
    external: int
    lingering: int
    foreign: int
    overrun: int
    withheld: int
    reserved_for_head: int
    grantable: int


@dataclass(frozen=True, slots=True)
class CardView:
    """A card as the ledger knows it. state: ready, starting, down, draining, cordoned or lost; reason says
    why it is not ready.
    """

    id: str
    host: str
    name: str
    index: int
    product: str
    state: str
    reason: str | None
    operator_state: str
    session_left_ms: int
    simulated: bool
    slots: int
    jobs: int
    running: int
    ledger: Ledger
    sample: Sample | None
    sample_age_ms: int | None
    headroom: int
    peak_leased_bytes: int
    models: tuple[HostedModel, ...]
    head: str | None


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A live lease. kind: job (later: external). state: leased, handed, running or ending (its job is settled
    already).
    """

    id: str
    card: str
    kind: str
    bytes: int
    job_id: str | None
    model: str | None
    state: str
    granted_ms: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class QueueView:
    """A class of waiting jobs. interval_ms: measured time between two grants from it, None before the first
    two.
    """

    model: str
    waiting: int
    waiting_bytes: int
    oldest_ms: int | None
    interval_ms: int | None


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model as the pool knows it. versions: descriptors. cards: card id -> (version, ready, reason)."""

    name: str
    created_ms: int
    last_seen_ms: int
    versions: tuple[HostedModel, ...]
    cards: Mapping[str, tuple[str, bool, str | None]]


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a listing; next is a cursor or None."""

    data: tuple[T, ...]
    next: str | None
