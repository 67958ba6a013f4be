"""The sums of a card as its own agent reckons them: what it may hold, and what its allocator is bounded to.

Pure functions over samples. The ledger decides about grants with the same terms; this is the second pair
of eyes that stays honest when the ledger has lost its last writes.
"""

from __future__ import annotations

from scheduler.registration import Sample


def usable_bytes(sample: Sample, *, headroom: int) -> int:
    """What leases, weights and strangers share."""
    return sample.total - sample.driver - headroom - sample.context


def foreign_bytes(sample: Sample) -> int:
    """What strangers hold. Leases of other processes are not known here and count as strangers."""
    return max(0, sample.used - sample.own)


def allocator_cap(sample: Sample, *, headroom: int) -> int:
    """The most that the child's allocator may reserve."""
    return max(0, usable_bytes(sample, headroom=headroom) - foreign_bytes(sample))


def has_moved(cap: int, before: int | None, *, total: int) -> bool:
    """Whether a new cap is worth a message: by more than 1/64 of the card."""
    return before is None or abs(cap - before) > total // 64


def exceeds_budget(
    lease_bytes: int, *, held: int, resident: int, sample: Sample | None, headroom: int
) -> bool:
    """Whether one more lease would take this card over what was measured. An unknown measure refuses nothing:
    then the ledger grants nothing either."""
    if sample is None:
        return False
    return held + lease_bytes + resident > allocator_cap(sample, headroom=headroom)
