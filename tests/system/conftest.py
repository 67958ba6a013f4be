"""One box for all system tests. Each test leaves it whole: every process alive, every job settled, every byte
back.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from scheduler import admission
from scheduler.store import Store
from tests.conftest import TestServer
from tests.invariants import check_pool
from tests.system.box import Box, stable_port
from tests.system.caller import Caller
from tests.system.whole import check_whole


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("box")
    (folder / "server").mkdir()
    server = TestServer(folder / "server")
    server.port = stable_port()
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


async def _end_leftovers(caller: Caller) -> None:
    """What a failed test left must not fail the next one."""
    for state in ("queued", "leased", "running"):
        for view in await caller.jobs(state):
            await admission.cancel(caller.store, view.id, force=True)
