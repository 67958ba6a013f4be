"""Cancels that arrive at the worst moment, and tasks that do not listen to the first."""

from __future__ import annotations

import asyncio
import time

import pytest

from gpu_agent.clock import ServerClock
from gpu_agent.device.reading import DriverCard, MemoryReading
from gpu_agent.ending import end_tasks, happens_within
from gpu_agent.sampler import Sampler


class _QuickCard:
    """A driver that answers at once."""

    uuid = "SIM-00000000-0"

    def read(self) -> MemoryReading:
        raise AssertionError("only xids are asked for")

    def xids(self) -> list[int]:
        time.sleep(0.001)
        return []


def _keep_the_loop_busy() -> None:
    """So that it finds the answer and the cancel at once."""
    time.sleep(0.003)


async def test_a_cancel_that_comes_with_the_drivers_answer_is_not_lost() -> None:
    """A task that only reads the driver ends by one cancel, also when answer and cancel come in one turn."""
    card: DriverCard = _QuickCard()  # type: ignore[assignment]
    sampler = Sampler(card, ServerClock(), timeout_s=5)

    async def read_for_ever() -> None:
        while True:
            await sampler.xids()

    for _ in range(20):
        task = asyncio.create_task(read_for_ever())
        await asyncio.sleep(0.002)
        _keep_the_loop_busy()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=1)
        await end_tasks([task])
        assert done


async def test_a_cancel_that_comes_with_the_event_is_not_lost() -> None:
    """A wait for an event that is set and cancelled in one turn is cancelled."""
    event = asyncio.Event()
    task = asyncio.create_task(happens_within(event, 5))
    await asyncio.sleep(0)
    event.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await happens_within(event, 0.01)
    assert not await happens_within(asyncio.Event(), 0.01)


async def test_a_task_that_drops_a_cancel_is_asked_again() -> None:
    """One that swallows its first cancel is over when the helper returns."""
    dropped = []

    async def deaf_once() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            dropped.append(True)
        await asyncio.sleep(60)

    task = asyncio.create_task(deaf_once())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert dropped and task.cancelled()


async def test_a_task_that_never_listens_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """After the bound the caller goes on, and the log names the task."""
    enough = asyncio.Event()

    async def deaf() -> None:
        while not enough.is_set():
            try:
                await enough.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(deaf(), name="deaf")
    await asyncio.sleep(0)
    await end_tasks([task], bound_s=0.05)
    assert not task.done()
    assert "task_not_ended" in caplog.text
    enough.set()
    await task
