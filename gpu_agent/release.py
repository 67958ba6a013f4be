"""Whether the memory of a child that is gone is back on its card, by the driver's word."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from gpu_agent.budget import foreign_bytes
from gpu_agent.device.reading import CardUnreadable, MemoryReading
from gpu_agent.sampler import Sampler
from scheduler.registration import Sample

INTERVAL_S = 0.02
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Baseline:
    """What others held: `used` must come down to it, give or take `slack`."""

    used: int
    slack: int

    @classmethod
    def of(cls, reading: MemoryReading) -> Baseline:
        """The card as it is without a child."""
        return cls(used=reading.used, slack=max(2 * _MIB, reading.total // 512))

    def with_foreign(self, sample: Sample | None) -> Baseline:
        """Strangers that came while the child lived are not the child's memory."""
        return self if sample is None else Baseline(max(self.used, foreign_bytes(sample)), self.slack)


async def memory_back(
    sampler: Sampler, baseline: Baseline, *, pid: int, timeout_s: float, stopping: asyncio.Event
) -> bool:
    """Wait until the driver's `used` is at the baseline. False when it is not in time, or when the agent
    stops.

    Where the driver shows processes and ours is not among them, what is left at the end of the time is a
    stranger's.
    """
    deadline = time.monotonic() + timeout_s
    is_shown_gone = False
    while time.monotonic() < deadline and not stopping.is_set():
        try:
            reading = await sampler.read()
        except CardUnreadable:
            await asyncio.sleep(INTERVAL_S * 5)
            continue
        if reading.used <= baseline.used + baseline.slack:
            return True
        is_shown_gone = reading.processes is not None and pid not in reading.processes
        await asyncio.sleep(INTERVAL_S)
    return is_shown_gone
