"""What a job leases."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from scheduler.estimates import bucket_end, lease_bytes
from tests.ledger.fake_agent import MIB, hosted

PADDED = dataclasses.replace(hosted(), c0_item=0, c1=float(MIB), batch_units="max_times_n")


def test_a_lease_is_what_the_item_takes() -> None:
    """c0 + c1 x units, rounded up; `vram` raises it and never lowers it."""
    summed = dataclasses.replace(PADDED, c0_item=10, c1=2.5, batch_units="sum")
    assert lease_bytes(summed, 3.0) == 10 + 8
    assert lease_bytes(summed, 3.0, vram=100) == 100
    assert lease_bytes(summed, 3.0, vram=1) == 18


@given(st.floats(1e-6, 1e9), st.floats(0.85, 1.0))
def test_items_of_a_bucket_fit_beside_each_other(units: float, share: float) -> None:
    """A padded batch of any items of one bucket takes no more than the sum of their leases, and a bucket
    wastes at most a fifth.
    """
    end = bucket_end(units)
    assert units <= end <= units * 2**0.25 * (1 + 1e-9)
    other = units * share
    if bucket_end(other) == end:
        assert 2 * max(units, other) * PADDED.c1 <= 2 * end * PADDED.c1
        assert (
            lease_bytes(PADDED, units) == lease_bytes(PADDED, other) >= end * PADDED.c1
            or end * PADDED.c1 > 2**53
        )
