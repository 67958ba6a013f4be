"""An agent as a process without torch: holds one card, answers every job, and leaves on SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import signal

from scheduler import cards
from scheduler.settings import load_settings
from scheduler.store import Store
from tests.ledger.fake_agent import FakeAgent
from vramgate.errors import StoreUnavailable


async def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--redis", "--pool", "--config", "--simulate"):
        parser.add_argument(option)
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    store = await Store.connect(load_settings(None, redis_url=given.redis, pool=given.pool))
    agent = FakeAgent(store, "GPU-stub")
    await agent.register()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    while not stopped.is_set():
        try:
            await agent.beat()
            await agent.run_all()
        except StoreUnavailable:
            print("the ledger is away", flush=True)
        await asyncio.sleep(0.05)
    await cards.leave(store, card=agent.card, session=agent.session)
    await store.close()
    print("left", flush=True)


asyncio.run(main())
