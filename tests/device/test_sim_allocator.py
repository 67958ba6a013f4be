"""The allocator's model: rounding, caching, the cap, and sums that always agree."""

from __future__ import annotations

import random

import pytest

from gpu_agent.device.sim_allocator import Block, CachingAllocator

KIB, MIB = 1024, 1024**2


class Card:
    """A card with room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken = 0

    def grow(self, nbytes: int) -> bool:
        if self.taken + nbytes > self.room:
            return False
        self.taken += nbytes
        return True

    def shrink(self, nbytes: int) -> None:
        self.taken -= nbytes


def _allocator(room: int, cap: int | None = None) -> tuple[CachingAllocator, Card]:
    card = Card(room)
    return CachingAllocator(card, cap=room if cap is None else cap), card


def test_small_blocks_share_a_segment() -> None:
    """Sizes are rounded to 512 B, and small blocks are cut out of one segment of 2 MiB."""
    allocator, card = _allocator(64 * MIB)
    for _ in range(4):
        assert allocator.malloc(1, stream=0) is not None
    assert (allocator.allocated, allocator.reserved, card.taken) == (4 * 512, 2 * MIB, 2 * MIB)


def test_freed_blocks_stay_cached_until_emptied() -> None:
    """A freed block keeps its segment reserved; emptying the cache gives the card its bytes back."""
    allocator, card = _allocator(64 * MIB)
    block = allocator.malloc(10 * MIB, stream=0)
    assert block is not None
    allocator.free(block)
    assert (allocator.allocated, allocator.reserved) == (0, 10 * MIB)
    changes = allocator.changes
    allocator.empty_cache()
    assert (allocator.reserved, card.taken) == (0, 0)
    assert allocator.changes > changes


def test_a_cached_block_is_used_again() -> None:
    """An allocation that fits a cached block of its stream takes nothing more from the card."""
    allocator, _ = _allocator(64 * MIB)
    block = allocator.malloc(10 * MIB, stream=0)
    assert block is not None
    allocator.free(block)
    changes = allocator.changes
    assert allocator.malloc(9 * MIB + 512 * KIB, stream=0) is not None
    assert allocator.changes == changes


def test_the_cache_of_one_stream_is_no_use_to_another() -> None:
    """Cached blocks belong to a stream: another stream needs a segment of its own."""
    allocator, _ = _allocator(64 * MIB)
    block = allocator.malloc(10 * MIB, stream=0)
    assert block is not None
    allocator.free(block)
    assert allocator.malloc(10 * MIB, stream=1) is not None
    assert allocator.reserved == 20 * MIB


def test_the_cache_is_emptied_before_an_allocation_fails() -> None:
    """A full card first gives up what is only cached, by whichever stream, and no refusal is counted."""
    allocator, _ = _allocator(16 * MIB)
    block = allocator.malloc(10 * MIB, stream=0)
    assert block is not None
    allocator.free(block)
    assert allocator.malloc(12 * MIB, stream=1) is not None
    assert (allocator.reserved, allocator.refusals) == (12 * MIB, 0)


def test_a_refusal_changes_nothing_but_its_count() -> None:
    """Out of memory leaves every sum as it was."""
    allocator, card = _allocator(16 * MIB)
    assert allocator.malloc(10 * MIB, stream=0) is not None
    assert allocator.malloc(10 * MIB, stream=0) is None
    assert (allocator.allocated, allocator.reserved, card.taken) == (10 * MIB, 10 * MIB, 10 * MIB)
    assert allocator.refusals == 1


def test_the_cap_bounds_what_is_reserved() -> None:
    """A cap refuses a segment that the card would have had; lowering it frees nothing by itself."""
    allocator, _ = _allocator(64 * MIB, cap=8 * MIB)
    assert allocator.malloc(8 * MIB, stream=0) is not None
    assert allocator.malloc(1, stream=0) is None
    allocator.cap = 4 * MIB
    assert allocator.reserved == 8 * MIB


def test_a_segment_in_use_anywhere_is_kept() -> None:
    """Fragmentation is real: one small block in use keeps its whole segment from the card."""
    allocator, _ = _allocator(64 * MIB)
    blocks = [allocator.malloc(512 * KIB, stream=0) for _ in range(4)]
    for block in blocks[1:]:
        assert block is not None
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (512 * KIB, 2 * MIB)


def test_the_peak_is_the_most_allocated_at_once() -> None:
    """The peak stays after blocks are freed."""
    allocator, _ = _allocator(64 * MIB)
    block = allocator.malloc(10 * MIB, stream=0)
    assert block is not None
    allocator.free(block)
    assert allocator.malloc(MIB, stream=0) is not None
    assert (allocator.peak, allocator.allocated) == (10 * MIB, MIB)


@pytest.mark.parametrize("seed", range(5))
def test_sums_agree_through_random_traffic(seed: int) -> None:
    """At all times allocated is what is in use and reserved is what the card lent; in the end all is back."""
    rng = random.Random(seed)
    allocator, card = _allocator(256 * MIB, cap=200 * MIB)
    live: list[Block] = []
    for _ in range(3_000):
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                size = int(2 ** rng.uniform(0, 25))
                block = allocator.malloc(size, stream=rng.randrange(3))
                if block is not None:
                    assert block.size >= size
                    live.append(block)
            case 7 if rng.random() < 0.1:
                allocator.empty_cache()
            case _ if live:
                allocator.free(live.pop(rng.randrange(len(live))))
        assert allocator.allocated == sum(block.size for block in live)
        assert allocator.allocated <= allocator.reserved == card.taken <= 200 * MIB
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved, card.taken) == (0, 0, 0)
