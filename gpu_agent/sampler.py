"""Memory readings of one card, taken on a thread of their own and always under a deadline.

Owns: the order own, driver, own again; the last foreign, for when the allocator will not hold still; and
how long the driver has been hanging. Does not own: what a sample means (`budget`, and the ledger).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gpu_agent.clock import ServerClock
from gpu_agent.device.reading import CardUnreadable, DriverCard, MemoryReading
from gpu_agent.ipc import Broken, Channel
from scheduler.registration import Sample

T = TypeVar("T")
TRIES = 3
TRIES_S = 0.01
DRIVER_FRESH_S = 0.25
"""So long a driver's reading serves the finishes of a child whose allocator has not moved since."""
OWN_TIMEOUT_S = 0.25
FEWEST_UNANSWERED = 4


@dataclass(frozen=True, slots=True)
class _Own:
    """What the child's allocator says of itself. segments: changes whenever it grew or shrank."""

    allocated: int
    reserved: int
    segments: int


@dataclass(slots=True)
class _Attached:
    """The child that answers for its own memory."""

    channel: Channel
    context: int
    heard_at: float
    asked: int = 0
    unanswered: int = 0
    last_foreign: int | None = None
    still: tuple[int, float] | None = None
    """The segments that stood while the driver was last read, and when that was."""
    told: tuple[int, int] | None = None
    """Allocated bytes and segments when a run ended, until a sample has been made of it or after it."""


class Sampler:
    """Readings for any event loop; the blocking part happens on one daemon thread."""

    def __init__(self, card: DriverCard, clock: ServerClock, *, timeout_s: float) -> None:
        self._card = card
        self._clock = clock
        self._timeout_s = timeout_s
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = (
            queue.SimpleQueue()
        )
        self._busy_since: float | None = None
        self._child: _Attached | None = None
        self.last: Sample | None = None
        self._renewing = threading.Lock()
        self.trouble: CardUnreadable | None = None
        # A daemon: a driver call that never returns must not hold up the end of the process.
        threading.Thread(target=self._serve, name="nvml", daemon=True).start()

    @property
    def stuck_s(self) -> float:
        """How long the driver call in progress has been going on; 0 when there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def silence_s(self) -> float:
        """How long the child has left our questions unanswered; 0 while it answers, or none was asked."""
        child = self._child
        # Several questions, not one: after a sleep of our own, the first answer is still on its way.
        if child is None or child.unanswered < FEWEST_UNANSWERED:
            return 0.0
        return time.monotonic() - child.heard_at

    def attach(self, memory: socket.socket, *, context: int) -> None:
        """A child answers for its memory from now on."""
        memory.setblocking(True)
        channel = Channel(memory)
        channel.set_timeout(OWN_TIMEOUT_S)
        self._child = _Attached(channel, context, time.monotonic())

    def detach(self) -> None:
        """The child is gone; until another is attached there are readings, but no samples."""
        with self._renewing:
            self._child = None
            self.last = None

    async def take(self, *, timeout_s: float | None = None) -> Sample | None:
        """A stamped sample; None when there is no child, no reading, or no time."""
        try:
            return await self._run(self._sample, timeout_s)
        except (CardUnreadable, TimeoutError):
            return None

    def run_ended(self, *, allocated: int, segments: int) -> None:
        """The child says so of its own accord as a run ends."""
        if self._child is not None:
            self._child.told = (allocated, segments)

    async def after_run(self, *, timeout_s: float) -> Sample | None:
        """A sample in which the run that has just ended is over.

        While the allocator keeps its segments, what the driver showed a moment ago still holds: only
        `allocated` has changed. That spares a busy child two questions, and a caller their way.
        """
        with self._renewing:
            child, last = self._child, self.last
            if child is not None and last is not None and child.told is not None and child.still is not None:
                (allocated, segments), (stood, read_at) = child.told, child.still
                child.told = None
                if segments == stood and time.monotonic() - read_at < DRIVER_FRESH_S:
                    if allocated != last.allocated:
                        last = self.last = replace(last, allocated=allocated)
                    return last
        return await self.take(timeout_s=timeout_s)

    async def read(self) -> MemoryReading:
        """What the driver says. Raises CardUnreadable; a driver that hangs counts as one."""
        try:
            return await self._run(self._card.read, None)
        except TimeoutError:
            raise CardUnreadable(
                f"the driver has not answered for {self.stuck_s:.1f} s", lost=False
            ) from None

    async def xids(self) -> list[int]:
        """Hardware events since the last call; none when the driver hangs."""
        try:
            return await self._run(self._card.xids, None)
        except (CardUnreadable, TimeoutError):
            return []

    async def _run(self, step: Callable[[], T], timeout_s: float | None) -> T:
        limit = self._timeout_s if timeout_s is None else timeout_s
        if self.stuck_s > self._timeout_s:
            raise TimeoutError
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work.put((step, future))
        async with asyncio.timeout(limit):
            return await asyncio.wrap_future(future)

    def _serve(self) -> None:
        while True:
            step, future = self._work.get()
            if not future.set_running_or_notify_cancel():
                continue
            self._busy_since = time.monotonic()
            try:
                future.set_result(step())
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._busy_since = None

    def _sample(self) -> Sample | None:
        child = self._child
        if child is None:
            return None
        deadline = time.monotonic() + TRIES_S
        tries = 1
        while (looked := self._look(child)) is not None:
            read_ms, reading, own, was_still = looked
            reserved = own.reserved + child.context
            if was_still:
                child.last_foreign = max(0, reading.used - reserved)
                sample = _stamped(reading, own, child.context, read_ms, used=reading.used)
                return self._keep(child, sample, still=(own.segments, time.monotonic()))
            if tries == TRIES or time.monotonic() > deadline:
                if child.last_foreign is None:
                    return None
                # The allocator moved between the readings: their difference says nothing of strangers.
                used = reserved + child.last_foreign
                return self._keep(child, _stamped(reading, own, child.context, read_ms, used=used))
            tries += 1
        return None

    def _look(self, child: _Attached) -> tuple[int, MemoryReading, _Own, bool] | None:
        """Own, driver, own again; and whether the allocator kept its segments meanwhile."""
        before = self._own(child)
        read_ms = self._clock.now_ms()
        reading = self._read_driver()
        after = self._own(child)
        if before is None or after is None or read_ms is None:
            return None
        return read_ms, reading, after, before.segments == after.segments

    def _keep(
        self, child: _Attached, sample: Sample, *, still: tuple[int, float] | None = None
    ) -> Sample | None:
        with self._renewing:
            if child is not self._child:
                return None
            self.last, child.still = sample, still
            # Said before this reading, or so shortly after that another question is cheaper than to tell.
            child.told = None
        return sample

    def _read_driver(self) -> MemoryReading:
        try:
            reading = self._card.read()
        except CardUnreadable as error:
            self.trouble = error
            raise
        self.trouble = None
        return reading

    def _own(self, child: _Attached) -> _Own | None:
        child.asked += 1
        child.unanswered += 1
        try:
            child.channel.send({"n": child.asked})
            while (answer := child.channel.receive()) is not None:
                # A late answer to a question that was given up on is not the answer to this one.
                if answer["n"] == child.asked:
                    child.heard_at, child.unanswered = time.monotonic(), 0
                    return _Own(answer["allocated"], answer["reserved"], answer["segments"])
        except (OSError, Broken):
            return None
        return None


def _stamped(reading: MemoryReading, own: _Own, context: int, read_ms: int, *, used: int) -> Sample:
    return Sample(
        read_ms=read_ms,
        total=reading.total,
        driver=reading.driver,
        used=used,
        own=own.reserved + context,
        allocated=own.allocated,
        reserved=own.reserved,
        context=context,
        used_by_lease=None if reading.processes is None else {},
    )
