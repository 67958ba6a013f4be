"""Answers that are not refusals: documents as JSON or msgpack, with the headers of the contract.

Owns: the encoding and the headers of a job's answers. Does not own: the shape of the documents
(`scheduler.documents`), or problems (`gateway.problems`).
"""

from __future__ import annotations

import base64
from typing import Any

import msgpack
import orjson
from starlette.responses import Response

from gateway.headers import Form
from scheduler import documents
from scheduler.submissions import Outcome
from scheduler.views import JobView

MEDIA_TYPES = {"json": "application/json", "msgpack": "application/msgpack"}
VARY = "Accept, Prefer"


def _plain(value: Any) -> Any:
    """What JSON shows of a value that it has no form for: base64 text of bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def dumps(document: Any) -> bytes:
    """Compact JSON; bytes become base64 text."""
    return orjson.dumps(document, default=_plain, option=orjson.OPT_NON_STR_KEYS)


def render(
    document: Any, form: Form | None = None, *, status: int = 200, extra: dict[str, str] | None = None
) -> Response:
    """One document in the form that the caller accepts; None where there is none but JSON."""
    if form is not None:
        extra = {"Vary": "Accept"} | (extra or {})
    if form == "msgpack":
        content: bytes = msgpack.packb(document)
    else:
        content, form = dumps(document), "json"
    return Response(content, status_code=status, headers=extra, media_type=MEDIA_TYPES[form])


def render_answer(outcome: Outcome, form: Form, *, is_replayed: bool = False) -> Response:
    """The 200 of infer. Raises the refusal that the outcome stands for when there is no answer to give."""
    error = documents.outcome_error(outcome)
    if error is not None:
        raise error
    extra = {"X-Job-Id": outcome.job_id, "Vary": VARY}
    if is_replayed:
        extra["Idempotency-Replayed"] = "true"
    return render(documents.answer_document(outcome, binary=True), form, extra=extra)


def render_job(
    view: JobView,
    outcome: Outcome | None,
    form: Form = "json",
    *,
    status: int = 200,
    extra: dict[str, str] | None = None,
) -> Response:
    """A job in any state, with its place in the queue as a header."""
    given = {"X-Job-Id": view.id, "X-Queue-Position": str(view.position)} | (extra or {})
    return render(documents.job_document(view, outcome, binary=True), form, status=status, extra=given)
