"""Which storages of this process lie on the simulated card, and what each costs there.

Owns the registry: storages by identity, their blocks in the allocator, and the lock around both. A storage is
booked once however many tensors view it, and its block is freed when the storage itself dies, whoever held it
last.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gpu_agent.device.sim_allocator import Block, CachingAllocator


@dataclass(slots=True, eq=False)
class _Booking:
    nbytes: int
    block: Block | None
    """None for a storage without bytes, which is booked so that a later resize is seen."""
    watch: weakref.ref[Any]


class StorageRegistry:
    """Books storages on an allocator. Safe between threads, and under finalizers that run at any point."""

    def __init__(self, allocator: CachingAllocator, *, scale: int) -> None:
        self.allocator = allocator
        self.scale = scale
        self._bookings: dict[int, _Booking] = {}
        self._freed: deque[Block] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def settled(self) -> Iterator[CachingAllocator]:
        """The allocator under the lock, with everything that has died freed."""
        with self._lock:
            self._free_the_dead()
            yield self.allocator

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is booked."""
        return storage._cdata in self._bookings

    def book(self, storage: torch.UntypedStorage, *, stream: int) -> bool:
        """Count a storage, or count it anew if its size changed. False, nothing booked: the card is full."""
        key, nbytes = storage._cdata, storage.nbytes()
        booking = self._bookings.get(key)
        if booking is not None and booking.nbytes == nbytes:
            return True
        with self._lock:
            self._free_the_dead()
            allocator = self.allocator
            booking = self._bookings.get(key)
            if booking is not None and booking.nbytes == nbytes:
                return True  # another lane was first
            block = allocator.malloc(nbytes * self.scale, stream=stream) if nbytes else None
            if nbytes and block is None:
                return False
            if booking is None:
                self._bookings[key] = _Booking(nbytes, block, weakref.ref(storage, self._undertaker(key)))
                return True
            # As torch resizes: the new block is there before the old one goes.
            if booking.block is not None:
                allocator.free(booking.block)
            booking.nbytes, booking.block = nbytes, block
            return True

    def hold(self, nbytes: int, *, stream: int) -> Block | None:
        """Take card bytes without a storage; None when the card is full."""
        with self.settled() as allocator:
            return allocator.malloc(nbytes, stream=stream)

    def let_go(self, block: Block) -> None:
        """Free what `hold` took."""
        with self.settled() as allocator:
            allocator.free(block)

    def _undertaker(self, key: int) -> Callable[[weakref.ref[Any]], None]:
        bookings, bury = self._bookings, self._bury

        def storage_died(_: weakref.ref[Any]) -> None:
            # The address may be a new storage's as soon as this returns, so the name goes at once.
            booking = bookings.pop(key, None)
            if booking is not None:
                bury(booking)

        return storage_died

    def _bury(self, booking: _Booking) -> None:
        # A finalizer may run inside this very lock, in the same thread: then the holder frees the block
        # later.
        if booking.block is None:
            return
        self._freed.append(booking.block)
        if self._lock.acquire(blocking=False):
            try:
                self._free_the_dead()
            finally:
                self._lock.release()

    def _free_the_dead(self) -> None:
        while self._freed:
            self.allocator.free(self._freed.popleft())
