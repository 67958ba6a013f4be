"""How the items of a batch ended, and in what messages that is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpu_agent.text import plain_text

WITH_DONE_BYTES = 16 * 2**20
LONGEST_DETAIL = 4000
LONGEST_FIELD = 200


@dataclass(frozen=True, slots=True)
class Ended:
    """How one item ended. kind: ok (result), failed (code, detail, the field at fault), oom, cancelled."""

    kind: str
    result: bytes | None = None
    code: str | None = None
    detail: str | None = None
    field: str | None = None


def as_sent(ended: Sequence[Ended]) -> tuple[list[list[Any]], list[tuple[int, bytes]]]:
    """The items of a `done` message, and by their places the results that are sent before it, each in a frame
    of its own: one is within the limit for outputs, and those of a batch together need not be.
    """
    items: list[list[Any]] = []
    apart: list[tuple[int, bytes]] = []
    room = WITH_DONE_BYTES
    for index, end in enumerate(ended):
        result = end.result
        if result is not None and len(result) > room:
            apart.append((index, result))
            result = None
        elif result is not None:
            room -= len(result)
        detail = end.detail and plain_text(end.detail)[:LONGEST_DETAIL]
        field = end.field and end.field[:LONGEST_FIELD]
        items.append([end.kind, result, end.code, detail, field])
    return items, apart
