"""The one error tree of vramgate, used by the client, the gateway, the ledger and the agent.

VramgateError
├── InputError                rejected_by_model 422   raised by a model for a user's mistake
├── Cancelled                 cancelled               raised inside a model whose whole batch was cancelled
├── Refused                   the request was answered with a problem document
│   ├── one class per code in TABLE, named after the code: QueueFull, WaitTimeout, ModelError, ...
└── Unreachable               no gateway answered within the caller's deadline

TABLE is the only place that maps a code to an HTTP status and to whether a retry can help. The ledger, the
OpenAPI document, the gateway's handlers and the client's exceptions are held equal to it by tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

URN = "urn:vramgate:"

Retry = Literal["no", "after", "maybe", "yes"]
JobState = Literal["expired", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One row of the error table: what a caller sees and whether trying again can help."""

    code: str
    status: int
    retry: Retry
    title: str
    job_state: JobState | None = None


_ROWS: tuple[ErrorCode, ...] = (
    ErrorCode("malformed", 400, "no", "The request body could not be read"),
    ErrorCode("unauthenticated", 401, "no", "No valid key was given"),
    ErrorCode("forbidden", 403, "no", "This caller may not do that"),
    ErrorCode("unknown_model", 404, "no", "No agent has served this model lately"),
    ErrorCode("unknown_job", 404, "no", "There is no such job"),
    ErrorCode("unknown_card", 404, "no", "There is no such card"),
    ErrorCode("unknown_lease", 404, "no", "There is no such lease"),
    ErrorCode("unknown_route", 404, "no", "There is no such route"),
    ErrorCode("method_not_allowed", 405, "no", "This route does not take that method"),
    ErrorCode("not_acceptable", 406, "no", "The answer has no form that Accept allows"),
    ErrorCode(
        "result_expired", 410, "no", "The answer under this key is no longer stored; the key never runs again"
    ),
    ErrorCode("lease_fenced", 412, "no", "Another token holds this lease now"),
    ErrorCode("too_large", 413, "no", "The body is larger than the limit"),
    ErrorCode("unsupported_media_type", 415, "no", "The body has a media type that this route does not read"),
    ErrorCode("invalid_input", 422, "no", "The inputs or options do not match the schema"),
    ErrorCode("rejected_by_model", 422, "no", "The model refused these inputs", "failed"),
    ErrorCode("key_reused", 422, "no", "This idempotency key was used with other inputs"),
    ErrorCode("exceeds_every_card", 422, "no", "The job needs more memory than any card has"),
    ErrorCode("queue_full", 429, "after", "The queue is full"),
    ErrorCode("quota_exceeded", 429, "after", "This tenant's share of the queue is full"),
    ErrorCode("wait_timeout", 503, "after", "No card became free within the wait limit", "expired"),
    ErrorCode("no_ready_card", 503, "after", "No card that hosts this model is ready", "expired"),
    ErrorCode("store_unavailable", 503, "after", "The ledger in Redis did not answer or is full"),
    ErrorCode("memory_critical", 503, "after", "The card's memory is critically low"),
    ErrorCode("lost", 503, "after", "The job was lost together with its agents or its record", "failed"),
    ErrorCode("draining", 503, "after", "This gateway is shutting down"),
    ErrorCode("run_timeout", 504, "maybe", "The run passed its limit", "failed"),
    ErrorCode("total_timeout", 504, "maybe", "The job passed its total limit", "expired"),
    ErrorCode("model_error", 500, "no", "The model raised an error", "failed"),
    ErrorCode("non_finite", 500, "no", "The model's output holds NaN or infinity", "failed"),
    ErrorCode("output_too_large", 500, "no", "The output is larger than the limit", "failed"),
    ErrorCode("internal", 500, "yes", "vramgate failed"),
    ErrorCode("oom", 500, "yes", "The run did not fit into the card's memory, also not alone", "failed"),
    ErrorCode("crashed", 500, "yes", "The run ended the model's process, also when it ran alone", "failed"),
    ErrorCode("cancelled", 409, "no", "The job was cancelled", "cancelled"),
    ErrorCode("client_left", 499, "no", "The client closed the connection before the answer"),
)

TABLE: Mapping[str, ErrorCode] = {row.code: row for row in _ROWS}


class VramgateError(Exception):
    """All that vramgate raises on purpose. `code` is stable; `detail` says what happened and what to do."""

    code: str = "internal"

    def __init__(self, detail: str = "", **data: Any) -> None:
        # Whoever raises it may pass what is no text; whoever reads it relies on text.
        self.detail = str(detail or TABLE[self.code].title)
        super().__init__(self.detail)
        self.data = data


class Refused(VramgateError):
    """A request that was answered with a problem document (RFC 9457).

    `retry_after_s` is the server's integer of seconds, or None. `job_id` is the job that it speaks of.
    """

    def __init__(
        self, detail: str = "", *, retry_after_s: int | None = None, job_id: str | None = None, **data: Any
    ) -> None:
        super().__init__(detail, **data)
        self.retry_after_s = retry_after_s
        self.job_id = job_id

    @property
    def status(self) -> int:
        return TABLE[self.code].status

    @property
    def retry(self) -> Retry:
        return TABLE[self.code].retry

    def problem(self) -> dict[str, Any]:
        """The RFC 9457 document of this error. Extra data members are those given to the constructor."""
        row = TABLE[self.code]
        document: dict[str, Any] = {
            "type": URN + row.code,
            "title": row.title,
            "status": row.status,
            "detail": self.detail,
            "code": row.code,
        }
        if self.job_id is not None:
            document["instance"] = f"/v1/jobs/{self.job_id}"
        if self.retry_after_s is not None:
            document["retry_after_s"] = self.retry_after_s
        return document | self.data


def _class_name(code: str) -> str:
    return "".join(word.capitalize() for word in code.split("_"))


def _refusal(code: str) -> type[Refused]:
    return type(
        _class_name(code), (Refused,), {"code": code, "__doc__": TABLE[code].title, "__module__": __name__}
    )


class InputError(Refused):
    """A model's word that the input is at fault; 422 `rejected_by_model`, never counted against the card.

    `field` names the input at fault.
    """

    code = "rejected_by_model"

    def __init__(self, detail: str = "", *, field: str | None = None, **data: Any) -> None:
        super().__init__(detail, **(data | ({"field": field} if field is not None else {})))
        self.field = field


class Cancelled(Refused):
    """The job was cancelled. Inside predict(): every item of the batch was, so the model should stop now."""

    code = "cancelled"


Malformed = _refusal("malformed")
Unauthenticated = _refusal("unauthenticated")
Forbidden = _refusal("forbidden")
UnknownModel = _refusal("unknown_model")
UnknownJob = _refusal("unknown_job")
UnknownCard = _refusal("unknown_card")
UnknownLease = _refusal("unknown_lease")
UnknownRoute = _refusal("unknown_route")
MethodNotAllowed = _refusal("method_not_allowed")
NotAcceptable = _refusal("not_acceptable")
ResultExpired = _refusal("result_expired")
LeaseFenced = _refusal("lease_fenced")
TooLarge = _refusal("too_large")
UnsupportedMediaType = _refusal("unsupported_media_type")
InvalidInput = _refusal("invalid_input")
KeyReused = _refusal("key_reused")
ExceedsEveryCard = _refusal("exceeds_every_card")
QueueFull = _refusal("queue_full")
QuotaExceeded = _refusal("quota_exceeded")
WaitTimeout = _refusal("wait_timeout")
NoReadyCard = _refusal("no_ready_card")
StoreUnavailable = _refusal("store_unavailable")
MemoryCritical = _refusal("memory_critical")
Lost = _refusal("lost")
Draining = _refusal("draining")
RunTimeout = _refusal("run_timeout")
TotalTimeout = _refusal("total_timeout")
ModelError = _refusal("model_error")
NonFinite = _refusal("non_finite")
OutputTooLarge = _refusal("output_too_large")
Internal = _refusal("internal")
Oom = _refusal("oom")
Crashed = _refusal("crashed")
ClientLeft = _refusal("client_left")

_CLASSES: Mapping[str, type[Refused]] = {
    cls.code: cls for cls in Refused.__subclasses__() if cls.__module__ == __name__
}


class Unreachable(VramgateError):
    """No gateway answered within the caller's deadline; the last cause is chained."""


def by_code(code: str) -> type[Refused]:
    """The exception class of a code in TABLE; raises KeyError for an unknown one."""
    return _CLASSES[code]


def from_problem(problem: Mapping[str, Any], retry_after_s: int | None = None) -> Refused:
    """The exception for a problem document; a code that is not in the table becomes `Internal`,
    whose `data["code"]` names it.
    """
    code = str(problem.get("code") or str(problem.get("type", "")).removeprefix(URN))
    known = {"type", "title", "status", "detail", "code", "instance", "retry_after_s"}
    data = {str(name): value for name, value in problem.items() if name not in known}
    instance = str(problem.get("instance", ""))
    detail = str(problem.get("detail") or problem.get("title") or f"unknown problem {code!r}")
    if retry_after_s is None and isinstance(problem.get("retry_after_s"), int):
        retry_after_s = int(problem["retry_after_s"])
    if code not in _CLASSES:
        data["code"] = code
    error = _CLASSES.get(code, Internal)(detail, **data)
    error.retry_after_s = retry_after_s
    error.job_id = instance.rsplit("/", 1)[-1] if "/jobs/" in instance else None
    return error
