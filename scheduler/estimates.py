"""What a job will take: lease = c0_item + c1 x units."""

from __future__ import annotations

import math

from scheduler.models import HostedModel


def lease_bytes(model: HostedModel, units: float, *, vram: int | None = None) -> int:
    """Bytes to lease for one item of `units`. `vram` may raise the estimate, never lower it."""
    estimate = model.c0_item + math.ceil(model.c1 * units)
    return max(1, min(estimate if vram is None else max(estimate, vram), 2**53 - 1))
