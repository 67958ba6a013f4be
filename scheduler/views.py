"""Jobs, cards, leases, queues and models as the ledger shows them to whoever looks.

Bytes are integers below 2**53, times are milliseconds of Redis time unless the name says otherwise.
Each is of one instant; how they are written for callers is in `documents`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from scheduler.registration import HostedModel, Sample
from scheduler.states import State

T = TypeVar("T")


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
    data: Mapping[str, Any] = field(default_factory=dict)


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


def with_reason(state: str, reason: str | None) -> str:
    """A state and why, without saying `cordoned` twice for `cordoned by an operator`."""
    if not reason:
        return state
    return reason if reason.startswith(state) else f"{state}: {reason}"


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
class ModelOnCard:
    """A model on one of its cards. is_loaded: its agent has it loaded and the ledger takes it. is_ready: the
    card can be granted on as well; reason says why not.
    """

    version: str
    is_loaded: bool
    is_ready: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model as the pool knows it. versions: descriptors. cards: by id."""

    name: str
    created_ms: int
    last_seen_ms: int
    versions: tuple[HostedModel, ...]
    cards: Mapping[str, ModelOnCard]


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a listing; next is a cursor or None."""

    data: tuple[T, ...]
    next: str | None
