"""Which of the jobs at hand go into the next batch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.handover import HandedJob


def form_batch(
    waiting: Sequence[HandedJob], *, max_batch: int, need: Callable[[Sequence[float]], int]
) -> list[HandedJob]:
    """The first waiting job, and those behind it that fit beside it: `need` of all their units within the
    sum of their leases.

    The first always goes, also when its estimate was raised after its lease was granted: it would never
    get another. A job that must run alone takes nobody along, and nobody takes it along.
    """
    chosen = list(waiting[:1])
    if not chosen or chosen[0].alone:
        return chosen
    leased = chosen[0].lease_bytes
    for job in waiting[1:]:
        if len(chosen) >= max_batch:
            break
        if job.alone:
            continue
        units = [*(j.units for j in chosen), job.units]
        if need(units) <= leased + job.lease_bytes:
            chosen.append(job)
            leased += job.lease_bytes
    return chosen
