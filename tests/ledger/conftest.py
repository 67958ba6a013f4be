"""Stores with other settings than the usual ones, each on the pool of its test."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest

from scheduler.records import LAYOUT
from scheduler.settings import Settings, load_settings
from scheduler.store import Store
from tests.conftest import TestServer
from tests.invariants import check_pool

Tuned = Callable[..., Awaitable[Store]]


@pytest.fixture
async def tuned(server: TestServer, pool: str) -> AsyncIterator[Tuned]:
    """`await tuned(clocks={...}, limits={...})`: a store with these settings; invariants are checked at
    the end.
    """
    opened: list[Store] = []

    async def open_store(**sections: Mapping[str, Any]) -> Store:
        store = await Store.connect(tune(server, pool, **sections))
        opened.append(store)
        return store

    yield open_store
    try:
        await check_pool(opened[0])
    finally:
        for store in opened:
            await store.close()


async def shift_clock(store: Store, *, ms: int) -> None:
    """As if the pool's last script had run at another time."""
    redis: Any = store.redis
    clock = list(struct.unpack("<5d", await redis.hget(store.keys.meta, f"clock:{LAYOUT}")))
    clock[0] += ms
    await redis.hset(store.keys.meta, f"clock:{LAYOUT}", struct.pack("<5d", *clock))


def tune(server: TestServer, pool: str, **sections: Mapping[str, Any]) -> Settings:
    """Settings with short clocks, changed as given."""
    clocks = {"session_s": 1.0, "beat_s": 0.3, "abandon_grace_s": 1.0} | dict(sections.pop("clocks", {}))
    return load_settings(None, redis_url=server.url, pool=pool, clocks=clocks, **sections)
