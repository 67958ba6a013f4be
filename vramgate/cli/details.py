"""One public object for people: two columns, what is nested indented below its name.

Owns the wording of members: sizes, durations and times as people read them, and a schema as one line for each
field. Gets documents and knows no ledger. `--json` prints the documents themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from scheduler.documents import Document
from vramgate.cli.tables import duration, size

Row = tuple[int, str, str]
"""Depth, name and value."""

_INDENT = "  "
_TIMES = frozenset({"created_ms", "started_ms", "settled_ms", "granted_ms"})
_SUMS = frozenset({"ledger", "measured"})
_SCHEMAS = frozenset({"schema", "output_schema"})
_HEADS = ("id", "version")
_LONGEST_CHOICE = 60
_NAMES = {"waiting_bytes": "bytes"}
"""As in the table: without its unit, a queue's would be the name of its number of jobs."""


def properties(document: Document) -> Table:
    """One object as a table without a head."""
    drawn = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for depth, name, value in _rows(document, 0):
        # Texts and not markup: what a model or an operator wrote may hold square brackets.
        drawn.add_row(Text(_INDENT * depth + name), Text(value))
    return drawn


def _rows(document: Mapping[str, Any], depth: int) -> Iterator[Row]:
    for name, value in document.items():
        # A result of nothing is an answer; elsewhere null is what is not there.
        if name != "object" and (value is not None or name == "result"):
            yield from _member(name, value, depth)


def _member(name: str, value: Any, depth: int) -> Iterator[Row]:
    if name == "result":
        yield depth, name, json.dumps(value, ensure_ascii=False)
    elif name in _SUMS:
        yield from _sum(name, value, depth)
    elif name in _SCHEMAS:
        yield depth, name, "" if value.get("properties") else "any object"
        yield from ((depth + 1, *field) for field in _fields(value))
    elif isinstance(value, Mapping):
        yield depth, name, ""
        yield from _rows(value, depth + 1)
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        yield depth, name, ""
        for item in value:
            yield from _item(item, depth + 1)
    else:
        yield depth, *_plain(name, value)


def _sum(name: str, terms: Mapping[str, int], depth: int) -> Iterator[Row]:
    """An identity: its total, and below it the terms that add up to it."""
    (whole, total), *parts = terms.items()
    yield depth, name, f"{whole} {size(total)} ="
    yield from ((depth + 1, part, size(value)) for part, value in parts)


def _item(item: Mapping[str, Any], depth: int) -> Iterator[Row]:
    """One of several, under its id; a flat one is a single row."""
    head = next((name for name in _HEADS if name in item), None)
    title = "-" if head is None else str(item[head])
    rest = {name: value for name, value in item.items() if name != head and value is not None}
    if any(isinstance(value, Mapping | list) for value in rest.values()):
        yield depth, title, ""
        yield from _rows(rest, depth + 1)
    else:
        yield depth, title, ", ".join(_phrase(name, value) for name, value in rest.items())


def _phrase(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    name, text = _plain(name, value)
    return text if name == "reason" else f"{name} {text}"


def _plain(name: str, value: Any) -> tuple[str, str]:
    """A member's name without its unit, and its value with it."""
    if isinstance(value, bool):
        return name, "yes" if value else "no"
    if isinstance(value, list):
        return name, ", ".join(map(str, value)) or "none"
    if isinstance(value, int | float):
        if name in _TIMES:
            return name.removesuffix("_ms"), _time(value / 1000)
        if name == "created":
            return name, _time(value)
        if name.endswith("_ms"):
            return name.removesuffix("_ms"), duration(value)
        if name.endswith("_bytes"):
            return _NAMES.get(name, name.removesuffix("_bytes")), size(round(value))
        if name.startswith("bytes_per_"):
            return name.removeprefix("bytes_").replace("_", " "), size(round(value))
        if name.endswith("_s"):
            return name.removesuffix("_s"), f"{value} s"
    return name, str(value)


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each field of an object's JSON Schema with what it takes, in one line."""
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    required = schema.get("required", ())
    for name, node in schema.get("properties", {}).items():
        words = [_kind(node, definitions), *_bounds(node)]
        if name in required:
            words.append("required")
        elif isinstance(node, Mapping) and "default" in node:
            words.append(f"default {json.dumps(node['default'], ensure_ascii=False)}")
        yield name, ", ".join(words)


def _kind(node: Any, definitions: Mapping[str, Any]) -> str:
    if not isinstance(node, Mapping):
        return "anything"
    if "$ref" in node:
        name = str(node["$ref"]).rpartition("/")[2]
        return f"{name} ({', '.join(definitions.get(name, {}).get('properties', {})) or 'see --json'})"
    if "anyOf" in node:
        return " or ".join(_kind(choice, definitions) for choice in node["anyOf"])
    if "enum" in node:
        choices = ", ".join(json.dumps(choice, ensure_ascii=False) for choice in node["enum"])
        return f"one of {choices if len(choices) <= _LONGEST_CHOICE else choices[:_LONGEST_CHOICE] + '...'}"
    if "const" in node:
        return json.dumps(node["const"], ensure_ascii=False)
    kind = node.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(map(str, kind))
    if kind == "array":
        return f"list of {_kind(node.get('items', {}), definitions)}"
    if kind == "string":
        return "bytes" if node.get("format") == "binary" else "text"
    return str(kind)


_BOUNDS = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("exclusiveMaximum", "< {}"),
    ("multipleOf", "a multiple of {}"),
    ("minLength", "at least {} long"),
    ("maxLength", "at most {} long"),
    ("minItems", "at least {}"),
    ("maxItems", "at most {}"),
    ("pattern", "matches {}"),
)


def _bounds(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        yield from (words.format(node[name]) for name, words in _BOUNDS if name in node)
