"""The shapes of bodies as JSON Schema: what the service takes, and the objects that it shows.

Does not own: how objects are made (`scheduler.documents`; a test holds both equal), nor which route has
which. Members may be added to an object that is shown, so none forbids others; what is taken is exact.
"""

from __future__ import annotations

from typing import Any, get_args

from gateway.operations import MAX_REASON
from gateway.options import MAX_PRIORITY, Options
from scheduler.states import OperatorState, State
from vramgate.errors import TABLE

Json = dict[str, Any]

NOT_ANSWERED = ("client_left",)
"""Codes that are logged only: nobody is there to be answered."""

_TEXT: Json = {"type": "string"}
_WHOLE: Json = {"type": "integer"}
_NATURAL: Json = {"type": "integer", "minimum": 0}
_FLAG: Json = {"type": "boolean"}
_ANYTHING: Json = {}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def schemas() -> dict[str, Json]:
    """Every schema by its name."""
    shown = {"Job": _job(), "Model": _model(), "Card": _card(), "Lease": _lease(), "Queue": _queue()}
    return {
        "Problem": _problem(),
        "InferRequest": _taken(
            "inputs", inputs={"type": "object"}, options=_or_null(Options.model_json_schema())
        ),
        "CardState": _taken(
            "state",
            state={"enum": list(get_args(OperatorState))},
            reason=_TEXT | {"maxLength": MAX_REASON},
        ),
        "Answer": _answer(),
        **shown,
        **{f"{name}List": _list(name) for name in shown},
        "Timing": _object(wait_ms=_NATURAL, run_ms=_NATURAL, total_ms=_NATURAL),
        "Vram": _object(leased_bytes=_NATURAL, peak_bytes=_NATURAL),
        "Health": _object(status=_TEXT),
    }


def _object(*, optional: str = "", **members: Json) -> Json:
    """An object that has all of its members but those that are named optional."""
    required = [name for name in members if name not in optional.split()]
    return {"type": "object", "required": required, "properties": members}


def _taken(required: str, **members: Json) -> Json:
    return {
        "type": "object",
        "required": required.split(),
        "properties": members,
        "additionalProperties": False,
    }


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _items(schema: Json) -> Json:
    return {"type": "array", "items": schema}


def _list(name: str) -> Json:
    return _object(object={"const": "list"}, data=_items(ref(name)), next=_or_null(_TEXT))


def _problem() -> Json:
    return _object(
        optional="instance retry_after_s field",
        type=_TEXT,
        title=_TEXT,
        status=_WHOLE,
        detail=_TEXT,
        code={"type": "string", "enum": [code for code in TABLE if code not in NOT_ANSWERED]},
        instance=_TEXT,
        retry_after_s=_WHOLE | {"minimum": 1},
        field=_TEXT,
    )


def _answer() -> Json:
    return _object(
        id=_TEXT,
        model=_TEXT,
        version=_TEXT,
        outputs=_ANYTHING,
        card=_or_null(_TEXT),
        timing=ref("Timing"),
        vram=ref("Vram"),
        degraded=_FLAG,
    )


def _job() -> Json:
    return _object(
        optional="result degraded error",
        id=_TEXT,
        object={"const": "job"},
        state={"enum": list(get_args(State))},
        model=_TEXT,
        version=_or_null(_TEXT),
        priority=_NATURAL | {"maximum": MAX_PRIORITY},
        position=_NATURAL,
        eta_s=_or_null(_NATURAL),
        why=_or_null(_TEXT),
        attempts=_NATURAL,
        crashes=_NATURAL,
        clients=_NATURAL,
        timing=ref("Timing"),
        card=_or_null(_TEXT),
        vram=ref("Vram"),
        created_ms=_NATURAL,
        started_ms=_or_null(_NATURAL),
        settled_ms=_or_null(_NATURAL),
        result=_ANYTHING,
        degraded=_FLAG,
        error=ref("Problem"),
    )


def _model() -> Json:
    estimate = _object(resident_bytes=_NATURAL, bytes_per_item=_NATURAL, bytes_per_unit={"type": "number"})
    version = _object(
        version=_TEXT,
        schema=_or_null({"type": "object"}),
        output_schema=_or_null({"type": "object"}),
        schema_hash=_TEXT,
        units=_TEXT,
        batch_units=_TEXT,
        max_batch=_NATURAL,
        lanes=_NATURAL,
        estimate=estimate,
    )
    return _object(
        id=_TEXT,
        object={"const": "model"},
        created=_NATURAL,
        owned_by=_TEXT,
        ready=_FLAG,
        versions=_items(version),
        cards=_items(_object(id=_TEXT, version=_TEXT, ready=_FLAG, reason=_or_null(_TEXT))),
    )


def _card() -> Json:
    ledger = {
        "description": "usable is the sum of all others",
        **_object(
            usable=_WHOLE,
            resident=_NATURAL,
            jobs=_NATURAL,
            external=_NATURAL,
            lingering=_NATURAL,
            foreign=_NATURAL,
            overrun=_NATURAL,
            withheld=_WHOLE,
            reserved_for_head=_NATURAL,
            grantable=_WHOLE,
        ),
    }
    measured = {
        "description": "total is the sum of all others; null while nothing was read",
        **_object(
            total=_NATURAL,
            driver=_NATURAL,
            context=_NATURAL,
            allocated=_NATURAL,
            cached=_WHOLE,
            external=_NATURAL,
            unattributed=_WHOLE,
            free=_WHOLE,
        ),
    }
    return _object(
        id=_TEXT,
        object={"const": "card"},
        name=_TEXT,
        host=_TEXT,
        index=_NATURAL,
        product=_TEXT,
        simulated=_FLAG,
        state={"enum": ["ready", "starting", "down", "draining", "cordoned", "lost"]},
        reason=_or_null(_TEXT),
        operator_state={"enum": list(get_args(OperatorState))},
        session_left_ms=_WHOLE,
        slots=_NATURAL,
        jobs=_NATURAL,
        running=_NATURAL,
        headroom_bytes=_NATURAL,
        leased_bytes=_NATURAL,
        peak_leased_bytes=_NATURAL,
        gap_bytes=_or_null(_WHOLE),
        ledger=ledger,
        measured=_or_null(measured),
        sample_age_ms=_or_null(_WHOLE),
        models=_items(_object(id=_TEXT, version=_TEXT, ready=_FLAG, reason=_or_null(_TEXT), slots=_NATURAL)),
        head=_or_null(_TEXT),
    )


def _lease() -> Json:
    return _object(
        id=_TEXT,
        object={"const": "lease"},
        kind=_TEXT,
        state=_TEXT,
        cards=_items(_TEXT),
        bytes=_NATURAL,
        job=_or_null(_TEXT),
        model=_or_null(_TEXT),
        granted_ms=_NATURAL,
        age_ms=_NATURAL,
    )


def _queue() -> Json:
    return _object(
        id=_TEXT,
        object={"const": "queue"},
        model=_TEXT,
        waiting=_NATURAL,
        waiting_bytes=_NATURAL,
        oldest_ms=_or_null(_NATURAL),
        interval_ms=_or_null(_NATURAL),
    )
