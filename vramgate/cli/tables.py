"""Lists of public objects as tables for people. Owns columns and their wording; knows no ledger."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scheduler.documents import Document
from scheduler.views import with_reason
from vramgate.quantities import format_size

SHORT_ID = 12
_WIDE = 200
_LONG = frozenset({"NAME", "STATE", "MODEL", "MODELS", "WHY", "CARD", "CARDS", "VERSIONS"})
"""Columns that fold where the terminal is narrow; every other cell stays on its line."""
_LEAST = 10
"""A folded column still holds the longest word for a state."""

Column = tuple[str, Callable[[Document], Any]]


def console() -> Console:
    """Standard output: as wide as the terminal, and wide enough for every column where there is none."""
    return Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False, soft_wrap=False)


def print_json(document: Document, *, is_line: bool = False) -> None:
    """The object as JSON on standard output; `is_line` keeps it on one line."""
    print(json.dumps(document, indent=None if is_line else 2, ensure_ascii=False), flush=True)


def size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_size(nbytes)


def duration(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} m"


def short(name: str | None) -> str:
    return (name or "")[:SHORT_ID]


def table(columns: Sequence[Column], documents: Iterable[Document]) -> Table:
    """One row for each document; cells are text as given."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for head, _ in columns:
        is_long = head in _LONG
        least = max(_LEAST, len(head)) if is_long else None
        drawn.add_column(head, no_wrap=not is_long, overflow="fold", min_width=least)
    for document in documents:
        drawn.add_row(*(_text(cell(document)) for _, cell in columns))
    return drawn


def told_apart(cards: Sequence[Document]) -> list[Document]:
    """Cards with the beginning of their id beside a name that several have; it stands for the card wherever
    one is named.
    """
    ids = [card["id"] for card in cards]
    names = Counter(card["name"] for card in cards)
    return [
        card | {"name": f"{card['name']} {_unique_prefix(card['id'], ids)}"}
        if names[card["name"]] > 1
        else card
        for card in cards
    ]


def _unique_prefix(id: str, ids: Sequence[str]) -> str:
    """The shortest beginning, of SHORT_ID characters at least, that no other id has."""
    ends = range(min(SHORT_ID, len(id)), len(id))
    return next((id[:end] for end in ends if sum(other.startswith(id[:end]) for other in ids) == 1), id)


def _text(value: Any) -> Text:
    # A text and not markup: what a model or an operator wrote may hold square brackets, or ":M:".
    return Text("" if value is None else str(value))


def _share(nbytes: float) -> str:
    """A size that may be a part of a byte."""
    return size(round(nbytes)) if nbytes >= 1024 else f"{nbytes:.4g} B"


def _used(card: Document) -> str:
    measured = card["measured"]
    if measured is None:
        return "unknown"
    used, total = measured["total"] - measured["driver"] - measured["free"], measured["total"]
    return f"{size(used)}/{size(total)}"


def _unless_unknown(card: Document, part: str) -> str:
    """Nothing is known of a card before its first reading, and sums over nothing mean nothing."""
    return "unknown" if card["measured"] is None else size(card["ledger"][part])


CARDS: tuple[Column, ...] = (
    ("NAME", lambda card: card["name"]),
    ("STATE", lambda card: with_reason(card["state"], card["reason"])),
    ("MODELS", lambda card: " ".join(m["id"] if m["ready"] else f"({m['id']})" for m in card["models"])),
    ("RUN", lambda card: f"{card['running']}/{card['jobs']}"),
    ("USABLE", lambda card: _unless_unknown(card, "usable")),
    ("LEASED", lambda card: size(card["leased_bytes"])),
    ("FREE", lambda card: _unless_unknown(card, "grantable")),
    ("USED/TOTAL", _used),
)

LEASES: tuple[Column, ...] = (
    ("ID", lambda lease: short(lease["id"])),
    ("KIND", lambda lease: lease["kind"]),
    ("STATE", lambda lease: lease["state"]),
    ("CARD", lambda lease: " ".join(lease["cards"])),
    ("BYTES", lambda lease: size(lease["bytes"])),
    ("MODEL", lambda lease: lease["model"]),
    ("JOB", lambda lease: short(lease["job"])),
    ("AGE", lambda lease: duration(lease["age_ms"])),
)

JOBS: tuple[Column, ...] = (
    ("ID", lambda job: short(job["id"])),
    ("MODEL", lambda job: job["model"]),
    ("STATE", lambda job: job["state"]),
    ("PLACE", lambda job: job["position"] or ""),
    ("ETA", lambda job: "" if job["eta_s"] is None else f"{job['eta_s']} s"),
    ("WHY", lambda job: job["error"]["code"] if "error" in job else job["why"]),
    ("LEASE", lambda job: size(job["vram"]["leased_bytes"])),
    ("WAIT", lambda job: duration(job["timing"]["wait_ms"])),
    ("RUN", lambda job: duration(job["timing"]["run_ms"]) if job["started_ms"] else ""),
)

QUEUE: tuple[Column, ...] = (
    ("MODEL", lambda queue: queue["model"]),
    ("WAITING", lambda queue: queue["waiting"]),
    ("BYTES", lambda queue: size(queue["waiting_bytes"])),
    ("OLDEST", lambda queue: duration(queue["oldest_ms"])),
    ("EVERY", lambda queue: duration(queue["interval_ms"])),
)


def _cards_of(model: Document) -> str:
    return " ".join(
        card["id"] if card["ready"] else f"{card['id']} ({card['reason'] or 'not ready'})"
        for card in model["cards"]
    )


def _newest(member: Callable[[Document], Any]) -> Callable[[Document], Any]:
    return lambda model: member(model["versions"][0]) if model["versions"] else ""


MODELS: tuple[Column, ...] = (
    ("MODEL", lambda model: model["id"]),
    ("READY", lambda model: "yes" if model["ready"] else "no"),
    ("VERSIONS", lambda model: " ".join(version["version"] for version in model["versions"])),
    ("UNITS", _newest(lambda version: version["units"])),
    ("RESIDENT", _newest(lambda version: size(version["estimate"]["resident_bytes"]))),
    ("PER ITEM", _newest(lambda version: size(version["estimate"]["bytes_per_item"]))),
    ("PER UNIT", _newest(lambda version: _share(version["estimate"]["bytes_per_unit"]))),
    ("BATCH", _newest(lambda version: version["max_batch"])),
    ("CARDS", _cards_of),
)
