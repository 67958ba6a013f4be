"""The OpenAPI document, made from the table of routes and the table of errors; nothing of it is inferred.

Every status that a route can answer with is there, with the codes that share it. Does not own: the shapes of
bodies (`gateway.components`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gateway import components
from gateway.components import Json, ref
from gateway.problems import PROBLEM_JSON
from gateway.routes import OPERATIONS, Operation
from vramgate.errors import TABLE

_STREAMS = {"Events": "text/event-stream", "Metrics": "text/plain"}
_PRINTABLE = r'^([!#-~]([ -~]*[!-~])?|"[ -~]+")$'
_TEXT: Json = {"type": "string"}
_HEADERS: dict[str, tuple[str, Json]] = {
    "Idempotency-Key": (
        "1 to 255 printable ASCII characters, bare or quoted: "
        "a retry joins the run in flight or gets its stored answer",
        _TEXT | {"pattern": _PRINTABLE, "minLength": 1, "maxLength": 255},
    ),
    "Prefer": ("`respond-async` or `respond-async, wait=10` (RFC 7240)", _TEXT),
    "X-Request-Id": ("echoed and logged", _TEXT),
    "traceparent": ("echoed and logged", _TEXT),
    "Last-Event-ID": (
        "resume after this event",
        _TEXT | {"pattern": r"^[0-9]{1,9}-[0-9]{1,19}(-[0-9]{1,19})?$"},
    ),
}
_IN_PATH: dict[str, Json] = {
    "job_id": _TEXT | {"pattern": "^[0-9a-f]{32}$"},
    "model": _TEXT | {"description": "a name, or `name@version`"},
    "card": _TEXT,
}


def document(*, title: str, version: str) -> Json:
    """The whole document."""
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": components.schemas()},
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
        content = {"application/json": {"schema": ref(operation.request_body)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _parameters(operation: Operation) -> list[Json]:
    return [
        *(
            {"name": name, "in": "path", "required": True, "schema": _IN_PATH[name]}
            for name in re.findall(r"{(\w+)}", operation.path)
        ),
        *(
            {"name": name, "in": "query", "description": given.about, "schema": given.schema}
            for name, given in operation.query.items()
        ),
        *(
            {"name": name, "in": "header", "description": about, "schema": schema}
            for name in operation.headers
            for about, schema in (_HEADERS[name],)
        ),
    ]


def _success(name: str) -> Json:
    if name in _STREAMS:
        return {"description": name, "content": {_STREAMS[name]: {}}}
    described: Json = {"description": name, "content": {"application/json": {"schema": ref(name)}}}
    if name != "Health":
        described["content"]["application/msgpack"] = {"schema": ref(name)}
    if name == "Answer":
        described["content"]["text/event-stream"] = {}
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
        "content": {PROBLEM_JSON: {"schema": ref("Problem")}},
        "x-codes": sorted(codes),
    }
    if any(TABLE[code].retry == "after" for code in codes):
        described["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    return described


def _infer_body() -> Json:
    raw = {"schema": {"type": "string", "format": "binary"}}
    envelope = {"schema": ref("InferRequest")}
    return {
        "required": True,
        "description": "The whole body, of any other media type, may be the model's only required field when "
        "that is bytes; a form has one part per field. For both, options are query parameters.",
        "content": {
            "application/json": envelope,
            "application/msgpack": envelope,
            "multipart/form-data": {"schema": {"type": "object"}},
            "application/octet-stream": raw,
        },
    }
