"""Which of the jobs at hand go into the next batch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.handover import HandedJob

MOST_INPUT_BYTES = 256 * 2**20


def form_batch(
    waiting: Sequence[HandedJob], *, max_batch: int, need: Callable[[Sequence[float]], int]
) -> list[HandedJob]:
    """The first waiting job, and those behind it that fit beside it: `need` of all their units within the
    sum of their leases, and their inputs within the bound of one message.

    The first always goes, also when its estimate was raised after its lease was granted: it would never
    get another. A job that must run alone takes nobody along, and nobody takes it along.
    """
    chosen = list(waiting[:1])
    if not chosen or chosen[0].alone:
        return chosen
    leased, size = chosen[0].lease_bytes, _size(chosen[0])
    for job in waiting[1:]:
        if len(chosen) >= max_batch:
            break
        if job.alone or size + _size(job) > MOST_INPUT_BYTES:
            continue
        units = [*(j.units for j in chosen), job.units]
        if need(units) <= leased + job.lease_bytes:
            chosen.append(job)
            leased, size = leased + job.lease_bytes, size + _size(job)
    return chosen


def _size(job: HandedJob) -> int:
    return len(job.inputs or b"")
