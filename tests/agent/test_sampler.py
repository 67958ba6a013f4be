"""Samples: what of a reading may serve again, and what may not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from gpu_agent import sampler as sampling
from gpu_agent.clock import ServerClock
from gpu_agent.device.reading import DriverCard, MemoryReading
from gpu_agent.ipc import Channel
from gpu_agent.sampler import Sampler

MIB = 1 << 20


class _Card:
    """A driver whose readings are counted."""

    uuid = "SIM-00000000-0"

    def __init__(self) -> None:
        self.readings = 0
        self.used = 100 * MIB

    def read(self) -> MemoryReading:
        self.readings += 1
        return MemoryReading(512 * MIB, 0, self.used, 412 * MIB, None)


class _Child:
    """Answers for its memory, as the child's memory thread does."""

    def __init__(self) -> None:
        self.allocated, self.reserved, self.segments = 10 * MIB, 20 * MIB, 1
        ours, theirs = socket.socketpair()
        self.socket, self._channel = ours, Channel(theirs)
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while (question := self._channel.receive()) is not None:
            self._channel.send(
                {
                    "n": question["n"],
                    "allocated": self.allocated,
                    "reserved": self.reserved,
                    "segments": self.segments,
                }
            )


@pytest.fixture
def child() -> Iterator[_Child]:
    built = _Child()
    yield built
    built.socket.close()


@pytest.fixture
def card() -> _Card:
    return _Card()


@pytest.fixture
def sampler(card: _Card, child: _Child) -> Sampler:
    clock = ServerClock()
    clock.hear(1000)
    driver: DriverCard = card  # type: ignore[assignment]
    built = Sampler(driver, clock, timeout_s=5.0)
    built.attach(child.socket, context=16 * MIB)
    return built


async def test_a_run_that_moved_no_segment_needs_no_new_reading(sampler: Sampler, card: _Card) -> None:
    """The driver is not asked again; what the child said of its tensors is taken over, at the time of the
    reading.
    """
    first = await sampler.take()
    assert first is not None
    sampler.run_ended(allocated=3 * MIB, segments=1)
    second = await sampler.after_run(timeout_s=5)
    assert second is not None and card.readings == 1
    assert (second.allocated, second.used, second.own) == (3 * MIB, first.used, first.own)
    assert second.read_ms == first.read_ms
    assert sampler.last == second


async def test_an_allocator_that_moved_is_read_anew(sampler: Sampler, card: _Card, child: _Child) -> None:
    """Other segments than those that stood at the reading: own, driver and own are asked."""
    await sampler.take()
    child.allocated, child.reserved, child.segments, card.used = 30 * MIB, 40 * MIB, 2, 120 * MIB
    sampler.run_ended(allocated=30 * MIB, segments=2)
    sample = await sampler.after_run(timeout_s=5)
    assert sample is not None and card.readings == 2
    assert (sample.allocated, sample.reserved, sample.used) == (30 * MIB, 40 * MIB, 120 * MIB)


async def test_one_word_of_the_child_serves_once(sampler: Sampler, card: _Card) -> None:
    """What it said of a run says nothing of what came after: without a new word there is a new reading."""
    await sampler.take()
    sampler.run_ended(allocated=3 * MIB, segments=1)
    await sampler.after_run(timeout_s=5)
    assert await sampler.after_run(timeout_s=5) is not None
    assert card.readings == 2


async def test_a_later_reading_outlives_what_a_run_said(sampler: Sampler, child: _Child) -> None:
    """The next run allocates while the report of the former one waits: a beat saw it, and it stays seen."""
    await sampler.take()
    sampler.run_ended(allocated=3 * MIB, segments=1)
    child.allocated = 18 * MIB
    await sampler.take()
    sample = await sampler.after_run(timeout_s=5)
    assert sample is not None and sample.allocated == 18 * MIB


async def test_an_old_reading_serves_nobody(
    sampler: Sampler, card: _Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers may have come since: past the bound the driver is asked again."""
    monkeypatch.setattr(sampling, "DRIVER_FRESH_S", 0.0)
    await sampler.take()
    sampler.run_ended(allocated=3 * MIB, segments=1)
    assert await sampler.after_run(timeout_s=5) is not None
    assert card.readings == 2


async def test_a_child_that_is_gone_says_nothing_for_the_next(sampler: Sampler, card: _Card) -> None:
    """After a detach there is neither a sample nor a word that could be taken over."""
    await sampler.take()
    sampler.run_ended(allocated=3 * MIB, segments=1)
    sampler.detach()
    assert await sampler.after_run(timeout_s=5) is None
    assert sampler.last is None
