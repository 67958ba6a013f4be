"""The demo's table, and the judgement whether every promise was kept.

Pure: gets what the clients saw and what the ledger says, and asks nobody. A promise that was broken makes
the demo fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from scheduler.views import CardView
from vramgate.cli.demo_load import Tally
from vramgate.cli.tables import duration, size


@dataclass(slots=True)
class Peaks:
    """The highest figures of each card while the clients ran. leased: at the moment of a grant, by the
    ledger's own account; what is measured as resident later may fill a card further.
    """

    leased: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    allocated: dict[str, int] = field(default_factory=dict)

    def see(self, cards: Sequence[CardView]) -> None:
        for card in cards:
            self.leased[card.id] = max(self.leased.get(card.id, 0), card.peak_leased_bytes)
            if card.sample is not None:
                self.used[card.id] = max(self.used.get(card.id, 0), card.sample.used)
                self.allocated[card.id] = max(self.allocated.get(card.id, 0), card.sample.allocated)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the verdict rests on. counters: what the ledger's totals grew by. drift: found by an audit at
    the end.
    """

    requests: int
    tally: Tally
    counters: Mapping[str, int]
    cards: Sequence[CardView]
    peaks: Peaks
    drift: Mapping[str, int]
    leases_left: int
    asked_again: int
    replayed: int
    seconds: float
    killed_pid: int | None


@dataclass(frozen=True, slots=True)
class Promise:
    """One line of the verdict."""

    claim: str
    seen: str
    is_kept: bool


def runs_again(counters: Mapping[str, int]) -> int:
    """Runs that were started again because their process died under them."""
    return sum(counters.get(f"requeued.{cause}", 0) for cause in ("crash", "killed", "agent_lost"))


def promises(evidence: Evidence) -> list[Promise]:
    """What was promised, what was seen, and whether that keeps it."""
    tally = evidence.tally
    codes = Counter(error.code for _, error in tally.failures)
    twice = evidence.counters.get("settled_twice", 0)
    drift = sum(abs(value) for value in evidence.drift.values())
    again = runs_again(evidence.counters)
    over = [card for card in evidence.cards if evidence.peaks.leased.get(card.id, 0) > budget(card)]
    replayed = f"{evidence.replayed} of {evidence.asked_again}"
    killed = f"{again} (child {evidence.killed_pid})"
    return [
        Promise("every request has its answer", f"{len(tally.answers)} of {evidence.requests}",
                len(tally.answers) == evidence.requests),
        Promise("jobs settled twice", str(twice), twice == 0),
        Promise("asked again under its key: the stored answer", replayed,
                evidence.replayed == evidence.asked_again),
        Promise("OOM that reached a caller", str(codes["oom"]), codes["oom"] == 0),
        Promise("crashes that reached a caller", str(codes["crashed"]), codes["crashed"] == 0),
        Promise("a killed child's runs are started again", killed, again > 0),
        Promise("cards over their budget", str(len(over)), not over),
        Promise("bytes of drift between leases and sums", str(drift), drift == 0),
        Promise("leases left behind", str(evidence.leases_left), evidence.leases_left == 0),
    ]  # fmt: skip


def budget(card: CardView) -> int:
    """What may be leased of a card, weights included: all but the driver, the context and the headroom."""
    return card.ledger.usable


def print_report(evidence: Evidence, kept: Sequence[Promise], *, console: Console) -> None:
    """The tables that end the demo."""
    console.print(_summary(evidence))
    console.print()
    console.print(_cards(evidence))
    console.print()
    console.print(_clocks(evidence))
    console.print()
    verdict = Table(title="Promises", box=None, pad_edge=False, title_justify="left", header_style="bold")
    for head in ("", "PROMISE", "SEEN"):
        verdict.add_column(head)
    for promise in kept:
        verdict.add_row("kept" if promise.is_kept else "BROKEN", promise.claim, promise.seen)
    console.print(verdict)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile, None of nothing."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def _summary(evidence: Evidence) -> Table:
    tally, counters = evidence.tally, evidence.counters
    asked = sum(answer.vram.leased_bytes for _, answer in tally.answers)
    total = sum(max(0, budget(card) - card.ledger.resident) for card in evidence.cards)
    by_status = ", ".join(f"{count} x {status}" for status, count in sorted(tally.statuses.items()))
    rows = {
        "requests": f"{evidence.requests} in {evidence.seconds:.0f} s",
        "memory asked for": f"{size(asked)}, {asked / max(total, 1):.1f} times what the cards have for jobs",
        "answers by status": by_status,
        "tries given up and repeated": str(tally.gave_up),
        "joined or replayed by key": str(counters.get("joined", 0) + counters.get("replayed", 0)),
        "runs": str(counters.get("runs", 0)),
        "runs started again after a crash": str(runs_again(counters)),
        "jobs settled twice": str(counters.get("settled_twice", 0)),
        "OOM that reached a caller": str(sum(error.code == "oom" for _, error in tally.failures)),
    }
    for code, count in sorted(Counter(error.code for _, error in tally.failures).items()):
        rows[f"failed: {code}"] = str(count)
    table = Table(title="Demo", box=None, pad_edge=False, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _cards(evidence: Evidence) -> Table:
    table = Table(title="Cards", box=None, pad_edge=False, title_justify="left", header_style="bold")
    for head in ("CARD", "TOTAL", "WEIGHTS", "BUDGET", "PEAK LEASED", "PEAK ALLOCATED", "PEAK USED", "DRIFT"):
        table.add_column(head, justify="left" if head == "CARD" else "right")
    peaks = evidence.peaks
    for card in evidence.cards:
        table.add_row(
            f"{card.name} {card.id}",
            "" if card.sample is None else size(card.sample.total),
            size(card.ledger.resident),
            size(budget(card)),
            size(peaks.leased.get(card.id, 0)),
            size(peaks.allocated.get(card.id, 0)),
            size(peaks.used.get(card.id, 0)),
            str(evidence.drift.get(card.id, 0)),
        )
    return table


def _clocks(evidence: Evidence) -> Table:
    table = Table(title="Clocks", box=None, pad_edge=False, title_justify="left", header_style="bold")
    for head in ("MODEL", "ANSWERS", "WAIT P50", "P95", "P99", "RUN P50", "P95", "P99"):
        table.add_column(head, justify="left" if head == "MODEL" else "right")
    answers = [answer for _, answer in evidence.tally.answers]
    for model in sorted({answer.model for answer in answers}):
        timings = [answer.timing for answer in answers if answer.model == model]
        cells = [
            duration(percentile(values, share))
            for values in ([t.wait_ms for t in timings], [t.run_ms for t in timings])
            for share in (0.5, 0.95, 0.99)
        ]
        table.add_row(model, str(len(timings)), *cells)
    return table
