"""The OpenAPI document, made from the table of routes and the table of errors; nothing of it is inferred.

Every status that a route can answer with is there, with the codes that share it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, get_args

from gateway.options import Options
from gateway.problems import PROBLEM_JSON
from gateway.routes import OPERATIONS, Operation
from scheduler.states import OperatorState, State
from vramgate.errors import TABLE

Json = dict[str, Any]

_STREAMS = {"Events": "text/event-stream", "Metrics": "text/plain"}
_HEADERS = {
    "Idempotency-Key": "1 to 255 printable ASCII characters, bare or quoted: "
    "a retry joins the run in flight or gets its stored answer",
    "Prefer": "`respond-async` or `respond-async, wait=10` (RFC 7240)",
    "X-Request-Id": "echoed and logged",
    "traceparent": "echoed and logged",
    "Last-Event-ID": "resume after this event",
}
NOT_ANSWERED = ("client_left",)
"""Codes that are logged only: nobody is there to be answered."""


def document(*, title: str, version: str) -> Json:
    """The whole document."""
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }


def _operation(operation: Operation) -> Json:
    described: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": _parameters(operation),
        "responses": {
            **{str(status): _success(name) for status, name in operation.success.items()},
            **{str(status): _refusals(codes) for status, codes in _by_status(operation.refusals)},
        },
    }
    if operation.request_body == "InferRequest":
        described["requestBody"] = _infer_body()
    elif operation.request_body is not None:
        content = {"application/json": {"schema": _ref(operation.request_body)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _parameters(operation: Operation) -> list[Json]:
    text = {"type": "string"}
    return [
        *(
            {"name": name, "in": "path", "required": True, "schema": text}
            for name in re.findall(r"{(\w+)}", operation.path)
        ),
        *(
            {"name": name, "in": "query", "description": about, "schema": text}
            for name, about in operation.query.items()
        ),
        *(
            {"name": name, "in": "header", "description": _HEADERS[name], "schema": text}
            for name in operation.headers
        ),
    ]


def _success(name: str) -> Json:
    if name in _STREAMS:
        return {"description": name, "content": {_STREAMS[name]: {"schema": {"type": "string"}}}}
    described: Json = {"description": name, "content": {"application/json": {"schema": _ref(name)}}}
    if name != "Health":
        described["content"]["application/msgpack"] = {"schema": _ref(name)}
    if name == "Answer":
        described["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    if name in ("Answer", "Job"):
        described["headers"] = {"X-Job-Id": {"schema": {"type": "string"}}}
    return described


def _by_status(codes: Iterable[str]) -> list[tuple[int, list[str]]]:
    grouped: dict[int, list[str]] = {}
    for code in codes:
        grouped.setdefault(TABLE[code].status, []).append(code)
    return sorted(grouped.items())


def _refusals(codes: list[str]) -> Json:
    described: Json = {
        "description": "; ".join(f"`{code}`: {TABLE[code].title}" for code in sorted(codes)),
        "content": {PROBLEM_JSON: {"schema": _ref("Problem")}},
        "x-codes": sorted(codes),
    }
    if any(TABLE[code].retry == "after" for code in codes):
        described["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    return described


def _infer_body() -> Json:
    raw = {"schema": {"type": "string", "format": "binary"}}
    envelope = {"schema": _ref("InferRequest")}
    return {
        "required": True,
        "description": "The whole body may be the model's only required field when that is bytes; "
        "a form has one part per field. For both, options are query parameters.",
        "content": {
            "application/json": envelope,
            "application/msgpack": envelope,
            "multipart/form-data": {"schema": {"type": "object"}},
            "*/*": raw,
        },
    }


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: str = "", **properties: Json) -> Json:
    return {"type": "object", "required": required.split(), "properties": properties}


def _schemas() -> Json:
    text: Json = {"type": "string"}
    whole: Json = {"type": "integer"}
    timing = _object("wait_ms run_ms total_ms", wait_ms=whole, run_ms=whole, total_ms=whole)
    vram = _object("leased_bytes peak_bytes", leased_bytes=whole, peak_bytes=whole)
    options = Options.model_json_schema()
    return {
        "Problem": _object(
            "type title status detail code",
            type=text,
            title=text,
            status=whole,
            detail=text,
            code={"type": "string", "enum": [code for code in TABLE if code not in NOT_ANSWERED]},
            instance=text,
            retry_after_s=whole,
        ),
        "InferRequest": _object("inputs", inputs={"type": "object"}, options=options)
        | {"additionalProperties": False},
        "Answer": _object(
            "id model version outputs card timing vram degraded",
            id=text,
            model=text,
            version=text,
            outputs={},
            card={"type": ["string", "null"]},
            timing=timing,
            vram=vram,
            degraded={"type": "boolean"},
        ),
        "Job": _object(
            "id object state model position attempts timing",
            id=text,
            object={"const": "job"},
            state={"enum": list(get_args(State))},
            model=text,
            position=whole,
            eta_s={"type": ["integer", "null"]},
            why={"type": ["string", "null"]},
            attempts=whole,
            timing=timing,
            card={"type": ["string", "null"]},
            result={},
            error=_ref("Problem"),
        ),
        "CardState": _object("state", state={"enum": list(get_args(OperatorState))}, reason=text),
        "Card": _object(
            "id object state ledger", id=text, object={"const": "card"}, state=text, ledger={"type": "object"}
        ),
        "Model": _object(
            "id object created owned_by", id=text, object={"const": "model"}, created=whole, owned_by=text
        ),
        "List": _object(
            "object data next",
            object={"const": "list"},
            data={"type": "array", "items": {"type": "object"}},
            next={"type": ["string", "null"]},
        ),
        "Health": _object("status", status=text),
    }
