"""What a job will take: lease = c0_item + c1 x units."""

from __future__ import annotations

import math

from scheduler.registration import HostedModel

STEPS_PER_OCTAVE = 4


def lease_bytes(model: HostedModel, units: float, *, vram: int | None = None) -> int:
    """Bytes to lease for one item of `units`. `vram` may raise the estimate, never lower it.

    Where a batch is padded to its largest item (`max_times_n`), units count as the end of their bucket:
    items of one bucket can then share a batch within the sum of their leases, which items of all different
    lengths never could.
    """
    counted = bucket_end(units) if model.batch_units == "max_times_n" else units
    estimate = model.c0_item + math.ceil(model.c1 * counted)
    return max(1, min(estimate if vram is None else max(estimate, vram), 2**53 - 1))


def bucket_end(units: float) -> float:
    """The smallest quarter power of two that is no less than `units` (so at most 19 % above it)."""
    if units <= 0:
        return units
    return max(units, float(2 ** (math.ceil(math.log2(units) * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE)))
