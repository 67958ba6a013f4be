"""Every route of the service in one table: method, path, what runs, and which refusals it can answer with.

The routes of the application and its OpenAPI document are both made from this table, so that none is
undocumented.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from gateway import collections, events, health, infer, jobs, operations
from gateway.components import Json
from gateway.context import Gateway

Run = Callable[[Gateway, Request], Awaitable[Response]]

_ALWAYS = ("internal", "unauthenticated", "forbidden", "method_not_allowed", "invalid_input")
_READ = (*_ALWAYS, "not_acceptable", "store_unavailable")
_OF_A_JOB = (
    "rejected_by_model", "wait_timeout", "no_ready_card", "memory_critical", "lost", "run_timeout",
    "total_timeout",
    "model_error", "non_finite", "output_too_large", "oom", "crashed", "cancelled", "result_expired",
)  # fmt: skip
_INFER = (
    *_READ, *_OF_A_JOB, "malformed", "unknown_model", "too_large", "unsupported_media_type",
    "key_reused", "exceeds_every_card", "queue_full", "quota_exceeded", "draining",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameter:
    """One member of a query: what it does, and the JSON Schema of its values."""

    about: str
    schema: Json


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. success: status -> component schema of its body. query: its parameters by name; one of
    another name is refused, unless the operation reads its query itself.
    """

    method: str
    path: str
    run: Run
    tag: str
    success: dict[int, str]
    refusals: tuple[str, ...]
    query: dict[str, Parameter] = field(default_factory=dict)
    reads_query: bool = False
    headers: tuple[str, ...] = ()
    request_body: str | None = None

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or "").strip().split("\n")[0]


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/models/{model}/infer",
        infer.infer,
        "inference",
        {200: "Answer", 202: "Job"},
        _INFER,
        headers=("Idempotency-Key", "Prefer", "X-Request-Id", "traceparent"),
        request_body="InferRequest",
        reads_query=True,
    ),
    Operation(
        "GET",
        "/v1/jobs",
        jobs.list_jobs,
        "jobs",
        {200: "JobList"},
        _READ,
        query={
            "state": Parameter("only this state", {"enum": list(jobs.STATES)}),
            "model": Parameter("only this model", {"type": "string"}),
            "limit": Parameter(
                "at most so many", {"type": "integer", "minimum": 1, "maximum": jobs.MAX_PAGE, "default": 50}
            ),
            "cursor": Parameter("of `next`", {"type": "string", "pattern": "^[0-9]{1,15}-[0-9a-f]{32}$"}),
        },
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}",
        jobs.get_job,
        "jobs",
        {200: "Job"},
        (*_READ, "unknown_job"),
        query={
            "wait_s": Parameter(
                "answer when the job is settled, at the latest after so many seconds",
                {"type": "number", "minimum": 0, "maximum": jobs.MAX_WAIT_S, "default": 0},
            )
        },
    ),
    Operation(
        "DELETE",
        "/v1/jobs/{job_id}",
        jobs.delete_job,
        "jobs",
        {202: "Job"},
        (*_READ, "unknown_job"),
        query={
            "force": Parameter(
                "true ends the process that runs it; for operators", {"type": "boolean", "default": False}
            )
        },
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/events",
        events.job_events,
        "jobs",
        {200: "Events"},
        (*_READ, "unknown_job", "malformed"),
        headers=("Last-Event-ID",),
    ),
    Operation("GET", "/v1/models", collections.list_models, "pool", {200: "ModelList"}, _READ),
    Operation(
        "GET",
        "/v1/models/{model}",
        collections.get_model,
        "pool",
        {200: "Model"},
        (*_READ, "unknown_model", "no_ready_card"),
    ),
    Operation("GET", "/v1/cards", collections.list_cards, "pool", {200: "CardList"}, _READ),
    Operation(
        "PATCH",
        "/v1/cards/{card}",
        operations.patch_card,
        "pool",
        {200: "Card"},
        (*_READ, "unknown_card", "malformed", "too_large", "unsupported_media_type"),
        request_body="CardState",
    ),
    Operation("GET", "/v1/leases", collections.list_leases, "pool", {200: "LeaseList"}, _READ),
    Operation("GET", "/v1/queue", collections.list_queue, "pool", {200: "QueueList"}, _READ),
    Operation("GET", "/livez", health.livez, "health", {200: "Health"}, _ALWAYS),
    Operation(
        "GET",
        "/readyz",
        health.readyz,
        "health",
        {200: "Health"},
        (*_ALWAYS, "draining", "store_unavailable", "no_ready_card"),
        query={
            "scope": Parameter("`gateway`: whether a balancer may send requests here", {"enum": ["gateway"]})
        },
    ),
    Operation("GET", "/metrics", health.show_metrics, "health", {200: "Metrics"}, _ALWAYS),
)
