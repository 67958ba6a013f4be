"""A model of CUDA's caching allocator: what `reserved` does while `allocated` comes and goes.

Owns rounding, segments, the cache of each stream, the cap, and the counters. Knows neither torch nor the
card's file: it asks `Backing` for card memory. Not safe between threads; its caller holds a lock.

Modelled after the documented behaviour of torch.cuda: sizes rounded to 512 B, segments of 2 MiB for blocks up
to 1 MiB and of whole 2 MiB for larger ones, best fit, splitting, merging with free neighbours, and one
emptying of the whole cache before an allocation fails.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field
from typing import Protocol

_ROUND = 512
_SEGMENT = 2 * 1024**2
_SMALL = 1024**2


class Backing(Protocol):
    """Where segments come from: the card, with everybody else on it."""

    def grow(self, nbytes: int) -> bool:
        """Take `nbytes` more from the card; False where it has no room."""
        ...

    def shrink(self, nbytes: int) -> None:
        """Give `nbytes` back to the card."""
        ...


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, in use or cached; its neighbours are the pieces before and after it."""

    size: int
    pool: _Pool
    serial: int
    before: Block | None = None
    after: Block | None = None
    in_use: bool = False


@dataclass(slots=True, eq=False)
class _Pool:
    """The cached blocks of one stream and one size class, smallest first."""

    small: bool
    cached: list[tuple[int, int, Block]] = field(default_factory=list)

    def add(self, block: Block) -> None:
        bisect.insort(self.cached, (block.size, block.serial, block))

    def remove(self, block: Block) -> None:
        del self.cached[bisect.bisect_left(self.cached, (block.size, block.serial))]

    def take(self, size: int) -> Block | None:
        at = bisect.bisect_left(self.cached, (size, -1))
        return self.cached.pop(at)[2] if at < len(self.cached) else None


class CachingAllocator:
    """Counts as torch's allocator would. All sizes are bytes of the card."""

    def __init__(self, backing: Backing, *, cap: int) -> None:
        self.cap = cap
        self.allocated = 0
        self.reserved = 0
        self.peak = 0
        self.changes = 0
        """How often a segment was taken or given back."""
        self.refusals = 0
        self._backing = backing
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._serials = itertools.count()

    def malloc(self, nbytes: int, *, stream: int) -> Block | None:
        """Allocate at least `nbytes` (over 0); None where that is an out-of-memory."""
        size = _up(nbytes, _ROUND)
        small = size <= _SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = pool.take(size) or self._new_segment(size, pool)
        if block is None:
            self.refusals += 1
            return None
        self._split(block, size)
        block.in_use = True
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Put a block back into the cache of its stream; the card keeps what it is a part of."""
        self.allocated -= block.size
        block.in_use = False
        if (after := block.after) is not None and not after.in_use:
            block.pool.remove(after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        if (before := block.before) is not None and not before.in_use:
            block.pool.remove(before)
            before.size += block.size
            before.after = block.after
            if block.after is not None:
                block.after.before = before
            block = before
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give back every segment that is free as a whole, of all streams."""
        given = 0
        for pool in self._pools.values():
            parts = []
            for entry in pool.cached:
                if entry[2].before is None and entry[2].after is None:
                    given += entry[0]
                else:
                    parts.append(entry)
            pool.cached = parts
        if given:
            self.reserved -= given
            self.changes += 1
            self._backing.shrink(given)

    def _new_segment(self, size: int, pool: _Pool) -> Block | None:
        nbytes = _up(size, _SEGMENT)
        if not self._grow(nbytes):
            self.empty_cache()
            if not self._grow(nbytes):
                return None
        return Block(nbytes, pool, next(self._serials))

    def _grow(self, nbytes: int) -> bool:
        if self.reserved + nbytes > self.cap or not self._backing.grow(nbytes):
            return False
        self.reserved += nbytes
        self.changes += 1
        return True

    def _split(self, block: Block, size: int) -> None:
        """Leave what is over in the cache, unless it is too little for another block of the same class."""
        over = block.size - size
        if over < _ROUND if block.pool.small else over <= _SMALL:
            return
        rest = Block(over, block.pool, next(self._serials), before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        block.pool.add(rest)


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
