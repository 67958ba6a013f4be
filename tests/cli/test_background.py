"""The end of background tasks: also of one that swallows its cancel."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

from scheduler.embedded import free_port
from scheduler.settings import load_settings
from vramgate.cli import background, up
from vramgate.cli.exits import INTERRUPTED
from vramgate.cli.stack import watch_cards


async def test_a_swallowed_cancel_is_repeated() -> None:
    """A task that loses its first cancel, as asyncio.wait_for can, ends all the same."""

    async def deaf_once() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
        await asyncio.sleep(60)

    task = asyncio.create_task(deaf_once())
    await asyncio.sleep(0)
    assert await background.end(task) and task.cancelled()


async def test_a_deaf_task_is_waited_for_within_a_bound() -> None:
    """What never ends holds up nothing."""
    freed = asyncio.Event()

    async def deaf() -> None:
        while not freed.is_set():
            try:
                await freed.wait()
            except asyncio.CancelledError:
                pass

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    assert not await background.end(task, within_s=0.05)
    freed.set()
    await task


async def test_the_watch_of_cards_ends_by_its_flag() -> None:
    """Once the flag is set it ends without any cancel, also while nothing answers."""
    stopped = asyncio.Event()
    settings = load_settings(None, redis_url=f"redis://127.0.0.1:{free_port()}/0")
    watch = asyncio.create_task(watch_cards(settings, up.say, stopped))
    await asyncio.sleep(0)
    stopped.set()
    await asyncio.wait_for(watch, 10)


DEAF = """
import asyncio
from vramgate.cli import up
from vramgate.cli.stack import Stack

class Nothing(Stack):
    def __init__(self): self.hurry, self._gateways, self._agents = asyncio.Event(), [], []
    async def start(self): pass
    async def stop(self): pass

async def deaf(stopped):
    print("ready", flush=True)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

up.END_S = 0.2
asyncio.run(up.run_stack(Nothing(), deaf))
"""


def test_a_second_ctrl_c_ends_it_whatever_hangs() -> None:
    """Work that hears neither the event nor a cancel is ended by the second signal."""
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)  # two signals at once are one to the kernel
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "killing what still drains\n"
            assert process.wait(10) == INTERRUPTED
        finally:
            process.kill()
