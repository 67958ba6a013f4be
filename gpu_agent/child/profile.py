"""What a model costs on this card: measured at load, by its own samples.

Owns: the runs that measure, and the line put over the points. Does not own: what later runs teach (the
supervisor raises the estimate by what it sees), or whether the model fits beside others.

    bytes of one item = c0 + c1 * units, so that no measured point lies above the line
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vramgate.model import Model, batch_need

MARGIN = 1 / 16
SMALLEST_UNITS = 1.0
MOST_POINTS = 28
TIME_BUDGET_S = 5.0
LONGEST_RUN_S = 0.75

Measure = Callable[[list[Any]], int]
"""Runs one batch and returns its peak above what was allocated before."""


@dataclass(frozen=True, slots=True)
class Line:
    """c0 + c1 x units, in bytes. seen_units: the largest input that was measured, 0 when none was."""

    c0: int
    c1: float
    seen_units: float

    def at(self, units: float) -> int:
        return round(self.c0 + self.c1 * units)


@dataclass(frozen=True, slots=True)
class Point:
    units: float
    peak: int
    seconds: float = 0.0


def climb(model: Model, measure: Measure, points: list[Point], *, room: int) -> None:
    """Measure growing samples: the smallest first and twice (once to warm up), then doubled while the
    prediction fits.

    Adds to `points`, so that what was measured stays when a larger run fails. Stops early when a run gets
    long, when samples stop growing, or when the model has none of that size.
    """
    deadline = time.monotonic() + TIME_BUDGET_S
    wanted = SMALLEST_UNITS
    while len(points) < MOST_POINTS:
        item = model.sample(wanted) if not points else _sample_or_none(model, wanted)
        if item is None:
            break
        item = model.parse(item) if isinstance(item, dict) else item
        units = model.count_units(item)
        if points and units <= points[-1].units:
            break
        if points and envelope(points, grows=True).at(units) > room:
            break
        if not points:
            measure([item])
        began = time.monotonic()
        peak = measure([item])
        now = time.monotonic()
        points.append(Point(units, peak, now - began))
        if now - began > LONGEST_RUN_S or now > deadline:
            break
        wanted = max(wanted, units) * 2


def prove(model: Model, measure: Measure, line: Line, points: Sequence[Point], *, room: int) -> Line:
    """Measure one full batch of middling items, and raise the line where items cost more together than one
    by one.

    Left out where it would not fit, or would take long.
    """
    count = type(model).max_batch
    if count == 1 or not points:
        return line
    middle = points[len(points) // 2]
    together = [middle.units] * count
    predicted = line.c0 * count + line.c1 * batch_need(together, model.batch_units)
    if predicted > room or middle.seconds * count > LONGEST_RUN_S:
        return line
    item = model.sample(middle.units)
    item = model.parse(item) if isinstance(item, dict) else item
    peak = measure([item] * count)
    if peak <= predicted:
        return line
    return replace(line, c0=_with_margin(line.c0 + math.ceil((peak - predicted) / count)))


def _sample_or_none(model: Model, units: float) -> Any:
    try:
        return model.sample(units)
    except Exception:
        # A model need not have samples of every size: what was measured so far has to do.
        return None


def envelope(points: Sequence[Point], *, grows: bool) -> Line:
    """A line with no point above it, its slope taken where inputs are large, plus a margin.

    Small inputs measure little but the allocator's rounding, and a slope taken there would be far too steep.
    `grows`: whether the model's units depend on its input at all.
    """
    if not points:
        return Line(0, 0.0, 0.0)
    last = points[-1]
    if not grows:
        return Line(_with_margin(max(p.peak for p in points)), 0.0, last.units)
    large = [p for p in points if p.units >= last.units / 8]
    slopes = [(b.peak - a.peak) / (b.units - a.units) for a, b in itertools.pairwise(large)]
    if not slopes:
        return Line(
            _with_margin(max(p.peak for p in points)), last.peak / last.units * (1 + MARGIN), last.units
        )
    c1 = max(0.0, *slopes)
    c0 = max(0, *(math.ceil(p.peak - c1 * p.units) for p in points))
    return Line(_with_margin(c0), c1 * (1 + MARGIN), last.units)


def _with_margin(nbytes: int) -> int:
    return math.ceil(nbytes * (1 + MARGIN))
