"""One object for people: `vramgate models ID`, `cards ID`, `jobs ID` without `--json`."""

from __future__ import annotations

import io
from typing import Any

import pydantic
from rich.console import Console

from scheduler.documents import queue_document
from scheduler.views import QueueView
from vramgate.cli.details import properties


def drawn(document: dict[str, Any]) -> list[str]:
    """The lines that a terminal of 80 columns shows."""
    console = Console(width=80, file=io.StringIO())
    console.print(properties(document))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


class Part(pydantic.BaseModel):
    start: float
    end: float


class Wish(pydantic.BaseModel):
    image: bytes
    height: int = pydantic.Field(256, ge=64, le=1024)
    words: list[str] | None = None
    parts: list[Part] = []


def test_a_model_reads_from_top_to_bottom() -> None:
    """What is nested stands indented below its name, a flat object on one line, a schema as one line a field;
    sizes and times have their units.
    """
    shown = drawn(
        {
            "id": "paint",
            "object": "model",
            "created": 0,
            "ready": True,
            "versions": [
                {
                    "version": "v1",
                    "schema": Wish.model_json_schema(),
                    "output_schema": None,
                    "units": "height",
                    "estimate": {"resident_bytes": 2**30, "bytes_per_item": 10, "bytes_per_unit": 2048.4},
                }
            ],
            "cards": [
                {"id": "GPU-a", "version": "v1", "ready": True, "reason": None},
                {"id": "GPU-b", "version": "v1", "ready": False, "reason": "the card is lost"},
            ],
        }
    )
    assert shown == [
        "id              paint",
        "created         1970-01-01 00:00:00 UTC",
        "ready           yes",
        "versions",
        "  v1",
        "    schema",
        "      image     bytes, required",
        "      height    integer, ≥ 64, ≤ 1024, default 256",
        "      words     list of text or null, default null",
        "      parts     list of Part (start, end), default []",
        "    units       height",
        "    estimate",
        "      resident  1 GiB",
        "      per item  10 B",
        "      per unit  2 KiB",
        "cards",
        "  GPU-a         version v1, ready",
        "  GPU-b         version v1, not ready, the card is lost",
    ]


def test_a_job_shows_its_result_as_it_is_and_its_error_by_member() -> None:
    """A result is the model's own: JSON, and no markup of ours."""
    shown = drawn({"timing": {"wait_ms": 61_000, "run_ms": 5}, "settled_ms": 1000, "result": ["[bold]", 1]})
    assert shown == [
        "timing",
        "  wait   61.0 s",
        "  run    5 ms",
        "settled  1970-01-01 00:00:01 UTC",
        'result   ["[bold]", 1]',
    ]
    assert drawn({"result": None, "eta_s": None}) == ["result  null"]
    shown = drawn({"error": {"code": "model_error", "status": 500, "detail": "no"}})
    assert shown == ["error", "  code    model_error", "  status  500", "  detail  no"]


def test_no_two_members_of_a_queue_have_one_name() -> None:
    """A name without its unit is still the name of one thing: jobs and bytes wait."""
    queue = QueueView(model="echo", waiting=3, waiting_bytes=2048, oldest_ms=10, interval_ms=90)
    shown = drawn(queue_document(queue))
    assert [line.split()[0] for line in shown] == ["id", "model", "waiting", "bytes", "oldest", "interval"]


def test_schemas_that_pydantic_does_not_write() -> None:
    """Any JSON Schema is shown somehow: several types, `true`, a reference to nowhere, no properties."""
    odd = {
        "properties": {
            "a": {"type": ["string", "null"]},
            "b": True,
            "c": {"$ref": "#/$defs/X"},
            "d": {"enum": [1, "x"]},
        }
    }
    assert drawn({"schema": odd}) == [
        "schema",
        "  a     string or null",
        "  b     anything",
        "  c     X (see --json)",
        '  d     one of 1, "x"',
    ]
    assert drawn({"schema": {"type": "object"}}) == ["schema  any object"]
