"""What a model costs, as published: measured at load, raised by what was seen, never lowered here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vramgate.model import BatchUnits, batch_need

MARGIN = 1 / 16


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes: `weights` and input `buffers` stay; one item takes c0 + c1 x units while it runs."""

    weights: int
    buffers: int
    c0: int
    c1: float
    seen_units: float

    @property
    def resident(self) -> int:
        return self.weights + self.buffers

    def batch_bytes(self, units: Sequence[float], how: BatchUnits) -> int:
        """What a batch of these items takes."""
        return math.ceil(len(units) * self.c0 + self.c1 * batch_need(units, how))

    def raised(self, *, items: int, units: float, peak: int) -> Estimate:
        """The estimate after a run alone in the child: `items` of `units` together took `peak`. The same
        object where that taught nothing, as most runs do.
        """
        if peak <= items * self.c0 + self.c1 * units:
            return self if units <= self.seen_units else replace(self, seen_units=units)
        if units > self.seen_units and self.c1 > 0:
            c1 = max(self.c1, (peak - items * self.c0) / units * (1 + MARGIN))
            return replace(self, c1=c1, seen_units=units)
        c0 = math.ceil((peak - self.c1 * units) / items * (1 + MARGIN))
        return replace(self, c0=max(self.c0, c0), seen_units=max(self.seen_units, units))

    def with_buffers(self, buffers: int) -> Estimate:
        return self if buffers <= self.buffers else replace(self, buffers=buffers)
