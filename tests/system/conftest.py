"""One box for all system tests. Each test leaves it whole: every process alive, every job settled, every byte back."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import httpx
import pytest

from scheduler import admission
from scheduler.models import CardView
from scheduler.store import Store
from tests.conftest import TestServer
from tests.invariants import check_pool
from tests.system.box import Box
from tests.system.caller import Caller, until


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a card's memory holds while nothing runs: tensors, and all that is used but the allocator's cache."""

    allocated: int
    used: int

    @classmethod
    def of(cls, card: CardView) -> Footprint | None:
        sample = card.sample
        if sample is None:
            return None
        return cls(sample.allocated, sample.used - (sample.reserved - sample.allocated))


BASELINE: dict[str, Footprint] = {}


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("box")
    (folder / "server").mkdir()
    server = TestServer(folder / "server")
    server.start()
    started = Box(folder, server, "s" + secrets.token_hex(6))
    try:
        started.heal()
        yield started
        started.close()
    finally:
        server.kill()


@pytest.fixture
async def caller(box: Box) -> AsyncIterator[Caller]:
    """A caller of the whole box."""
    box.heal()
    store = await Store.connect(box.settings)
    limits = httpx.Limits(max_connections=400, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, trust_env=False) as http:
        asking = Caller(box, store, http)
        try:
            await _end_leftovers(asking)
            await check_whole(asking)
            yield asking
            box.heal()
            await check_whole(asking)
            await check_pool(store)
        finally:
            await asyncio.shield(store.close())


async def check_whole(caller: Caller) -> None:
    """Both cards ready, nothing leased, nothing queued, memory as it was before the first job."""
    cards = await caller.all_ready()
    await caller.no_leases()
    for state in ("queued", "leased", "running"):
        assert not await caller.jobs(state), f"a job is still {state}"
    for card in cards:
        await _memory_back(caller, card.id)


async def _memory_back(caller: Caller, card_id: str) -> None:
    async def check() -> bool:
        card = next(card for card in await caller.cards() if card.id == card_id)
        found = Footprint.of(card)
        return found is not None and BASELINE.setdefault(card_id, found) == found

    await until(f"the memory of {card_id} is back at {BASELINE.get(card_id)}", check, patience_s=20)


async def _end_leftovers(caller: Caller) -> None:
    """What a failed test left must not fail the next one."""
    for state in ("queued", "leased", "running"):
        for view in await caller.jobs(state):
            await admission.cancel(caller.store, view.id, force=True)
