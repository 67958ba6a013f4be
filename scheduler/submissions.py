"""What a gateway asks of the ledger, and what it is told: a job to submit, what submit did, and how a job
settled.

Bytes are integers below 2**53, times are milliseconds of Redis time unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from scheduler.states import State


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
