"""`up`: everything on one box, in the foreground, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from vramgate.cli import background
from vramgate.cli.exits import INTERRUPTED
from vramgate.cli.services import HostOption, InsecureOption, SimulateOption
from vramgate.cli.stack import Plan, Stack, watch_cards
from vramgate.cli.target import ConfigOption, PoolOption

END_S = 5.0
"""After the second Ctrl-C everything is over within so long."""


def up(
    config: ConfigOption = None,
    simulate: SimulateOption = None,
    gateways: Annotated[int, typer.Option(min=1, max=64, help="Gateways, on port, port+1, ...")] = 1,
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Worker processes of each gateway.")
    ] = None,
    host: HostOption = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="The first gateway's port.")] = None,
    redis: Annotated[
        str | None,
        typer.Option("--redis", metavar="URL", help="A server that runs; else one is started here."),
    ] = None,
    pool: PoolOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Everything on one box: the ledger's server, gateways, and an agent for each card. Ctrl-C drains and
    ends it.
    """
    plan = Plan(config, simulate, gateways, workers, host, port, redis, pool, insecure)
    raise typer.Exit(asyncio.run(_run(plan)))


async def _run(plan: Plan) -> int:
    stack = Stack(plan, say=say)
    if not stack.settings.models:
        say("no model is configured: cards will stand idle; write [models.NAME] into vramgate.toml")

    async def serve(stopped: asyncio.Event) -> None:
        watch = asyncio.create_task(watch_cards(stack.settings, say, stopped), name="watch cards")
        try:
            say("up; Ctrl-C drains and ends it")
            await stopped.wait()
        finally:
            stopped.set()
            await background.end(watch)

    return await run_stack(stack, serve)


async def run_stack(stack: Stack, work: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Start `stack`, do `work`, and end everything whatever happens; the exit code.

    The first Ctrl-C or SIGTERM sets the event that `work` gets, a second one kills what still drains. A
    signal during the start ends it at once.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopped.is_set() and not stack.hurry.is_set():
            say("killing what still drains")
            stack.hurry.set()
            # Nothing that hangs, not even what asyncio.run waits for at its end, may outlive it.
            loop.call_later(END_S, _end_now, stack)
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        if not await _started(stack, stopped):
            return INTERRUPTED
        await work(stopped)
        return 0
    finally:
        if stopped.is_set():
            say("draining; press Ctrl-C again to kill")
        stopped.set()
        await stack.stop()


def _end_now(stack: Stack) -> None:
    stack.kill()
    os._exit(INTERRUPTED)


def say(line: str) -> None:
    """A line of progress for people, on standard output, at once."""
    print(line, flush=True)


async def _started(stack: Stack, stopped: asyncio.Event) -> bool:
    starting = asyncio.create_task(stack.start(), name="start")
    stopping = asyncio.create_task(stopped.wait(), name="stopped")
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        await background.end(starting)
        return False
    await starting
    return True
