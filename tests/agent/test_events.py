"""Events on their way to those who watch, without a ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import pytest

from gpu_agent.events import MOST_GATHERED, Emitter
from scheduler import cards
from scheduler.handover import HandedJob
from scheduler.settings import Settings
from scheduler.store import Store


async def test_events_over_the_bound_are_counted_in_the_log(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is dropped between two sendings is one line in the log, with its number, once."""
    sent: list[int] = []

    async def emit(_: Store, *, events: Sequence[tuple[str, Mapping[str, Any]]], **__: Any) -> bool:
        sent.append(len(events))
        return True

    monkeypatch.setattr(cards, "emit", emit)
    store = Store(settings)
    emitter = Emitter(store, card="c", session="s")
    job = HandedJob("j", "l", 1, "m", "1", 1.0, 1, False, 1000, 1000, b"", True, None)
    with caplog.at_level(logging.WARNING):
        for number in range(MOST_GATHERED + 3):
            emitter.add(job, "output", {"data": msgpack.packb(number)})
        await emitter.flush()
        emitter.add(job, "output", {"data": msgpack.packb(0)})
        await emitter.flush()
    await store.close()
    assert sent == [MOST_GATHERED, 1]
    (record,) = [record for record in caplog.records if record.getMessage() == "events_dropped"]
    assert "'number': 3" in str(vars(record))


async def test_a_report_does_not_overtake_events_that_are_on_their_way(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush before a report ends after what an earlier one has begun to send: once the job is settled, the
    ledger takes no events of it any more.
    """
    may_arrive, arrived = asyncio.Event(), asyncio.Event()

    async def emit(*_: Any, **__: Any) -> bool:
        await may_arrive.wait()
        arrived.set()
        return True

    monkeypatch.setattr(cards, "emit", emit)
    store = Store(settings)
    emitter = Emitter(store, card="c", session="s")
    job = HandedJob("j", "l", 1, "m", "1", 1.0, 1, False, 1000, 1000, b"", True, None)
    emitter.add(job, "output", {"data": msgpack.packb(1)})
    sending = asyncio.create_task(emitter.flush())
    before_a_report = asyncio.create_task(emitter.flush())
    for _ in range(10):
        await asyncio.sleep(0)
    was_held_back = not before_a_report.done()
    may_arrive.set()
    await asyncio.gather(sending, before_a_report)
    await store.close()
    assert was_held_back and arrived.is_set()
