"""`demo`: the whole path on simulated cards, under load, with a killed child, and a verdict over the
promises.

Owns the course of the demo. The services are `stack`'s, the clients `demo_load`'s, the verdict
`demo_report`'s.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from scheduler import inventory
from scheduler.store import Store
from scheduler.views import CardView
from vramgate.cli import background, tables
from vramgate.cli.demo_load import Tally, ask_again, make_requests, run_clients
from vramgate.cli.demo_report import Evidence, Peaks, print_report, promises
from vramgate.cli.exits import FAILED, Failure
from vramgate.cli.preflight import check_ports
from vramgate.cli.processes import descendants, environment
from vramgate.cli.stack import Plan, Stack, card_line
from vramgate.cli.up import run_stack, say
from vramgate.errors import VramgateError

MODELS = frozenset({"speech", "diffusion"})
CARDS = "2x512MiB"
READY_TIMEOUT_S = 150.0
LOAD_TIMEOUT_S = 240.0
_KILL_AFTER = 0.35
_SETTLE_TIMEOUT_S = 15.0
_POLL_S = 0.2
_ASKED_AGAIN = 20


def demo(
    requests: Annotated[int, typer.Option(min=8, help="Requests over both models.")] = 320,
    clients: Annotated[int, typer.Option(min=1, max=200, help="Clients at once.")] = 40,
    impatient: Annotated[int, typer.Option(min=0, help="How many of them give up early and ask again.")] = 10,
    simulate: Annotated[str, typer.Option(metavar="2x512MiB", help="The simulated cards.")] = CARDS,
    seed: Annotated[int | None, typer.Option(help="Makes sizes and order repeatable.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65534, help="The first gateway's port.")] = None,
) -> None:
    """See it work: two gateways, two simulated cards, many clients, one killed process, and a table at the
    end.
    """
    config = find_examples() / "vramgate.toml"
    seed = random.randrange(2**32) if seed is None else seed
    first = _two_ports() if port is None else port
    # Alone: a ledger that the environment names is not there to be played with.
    plan = Plan(config, simulate, gateways=2, workers=2, port=first, pool="demo", is_alone=True)
    raise typer.Exit(asyncio.run(_run(plan, requests, clients, impatient, seed)))


def find_examples() -> Path:
    """The examples of a checkout: below the working directory, or beside the package."""
    for parent in (Path.cwd(), Path(__file__).parents[2]):
        if (parent / "examples" / "vramgate.toml").is_file():
            return parent / "examples"
    raise Failure(
        "the demo serves the models in examples/, which are not here; run it in a checkout of vramgate"
    )


async def _run(plan: Plan, count: int, clients: int, impatient: int, seed: int) -> int:
    stack = Stack(plan, say=say)
    broken = True

    async def work(stopped: asyncio.Event) -> None:
        nonlocal broken
        course = asyncio.create_task(_course(stack, stopped, count, clients, impatient, seed), name="demo")
        stopping = asyncio.create_task(stopped.wait(), name="stopped")
        await asyncio.wait({course, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if course.done():
            broken = await course
        else:
            await background.end(course)

    ended = await run_stack(stack, work)
    return ended or (FAILED if broken else 0)


async def _course(
    stack: Stack, stopped: asyncio.Event, count: int, clients: int, impatient: int, seed: int
) -> bool:
    """The demo between start and end of the services; True when a promise was broken."""
    store = await Store.connect(stack.settings, max_connections=4)
    try:
        taking_part = await _until_ready(store, stopped)
        recording = find_examples() / "speech-like.wav"
        work = make_requests(count, recording=recording, chance=random.Random(seed))
        say(f"{clients} clients send {count} requests (seed {seed}), {impatient} of them are impatient")
        say("look at it from another terminal here: vramgate cards --watch, vramgate leases, vramgate queue")
        tally, peaks, before, began = Tally(), Peaks(), await inventory.totals(store), time.monotonic()
        is_over = asyncio.Event()
        sampler = asyncio.create_task(_sample(store, peaks, is_over), name="sample")
        killer = asyncio.create_task(_kill_a_child(store, stack, tally, count, is_over), name="kill a child")
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await run_clients(stack.urls, work, clients=clients, impatient=impatient, tally=tally)
        except TimeoutError:
            say(f"the clients were not served within {LOAD_TIMEOUT_S:.0f} s")
        finally:
            is_over.set()
            await background.end(sampler, killer)
        seconds = time.monotonic() - began
        counters = _growth(before, await inventory.totals(store))
        repeated = tally.answers[:_ASKED_AGAIN]
        replayed = await ask_again(stack.urls, repeated)
        leases_left = await _leases_left(store)
        # The pool may know cards of an earlier demo with another geometry.
        cards = [card for card in await inventory.cards(store) if card.id in taking_part]
        peaks.see(cards)
        evidence = Evidence(
            requests=count,
            tally=tally,
            counters=counters,
            cards=cards,
            peaks=peaks,
            drift=await inventory.audit(store),
            leases_left=leases_left,
            asked_again=len(repeated),
            replayed=replayed,
            seconds=seconds,
            killed_pid=_result_of(killer),
        )
    finally:
        await store.close()
    verdict = promises(evidence)
    say("")
    print_report(evidence, verdict, console=tables.console())
    return not all(promise.is_kept for promise in verdict)


def _result_of(killer: asyncio.Task[int | None]) -> int | None:
    is_told = killer.done() and not killer.cancelled() and killer.exception() is None
    return killer.result() if is_told else None


async def _until_ready(store: Store, stopped: asyncio.Event) -> frozenset[str]:
    """Wait until every card serves both models, saying each change; the cards. Models are profiled while they
    load.
    """
    said: dict[str, str] = {}
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not stopped.is_set():
        cards = [card for card in await inventory.cards(store) if card.session_left_ms > 0]
        for card in cards:
            if said.get(card.id) != card_line(card):
                said[card.id] = card_line(card)
                say(said[card.id])
        if len(cards) >= 2 and all(_serves_all(card) for card in cards):
            return frozenset(card.id for card in cards)
        if time.monotonic() > deadline:
            raise Failure(
                f"not every card was ready within {READY_TIMEOUT_S:.0f} s: " + "; ".join(said.values())
            )
        await asyncio.sleep(_POLL_S)
    raise Failure("the demo was stopped before its cards were ready")


def _serves_all(card: CardView) -> bool:
    return card.state == "ready" and {model.name for model in card.models if model.ready} >= MODELS


async def _sample(store: Store, peaks: Peaks, is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        try:
            peaks.see(await inventory.cards(store))
        except VramgateError:
            pass  # the next look will see it; the ledger's own peak misses nothing
        await asyncio.sleep(_POLL_S)


async def _kill_a_child(
    store: Store, stack: Stack, tally: Tally, count: int, is_over: asyncio.Event
) -> int | None:
    """Kill -9 the torch process of a card that runs jobs, once a part of the answers is there; its pid."""
    while not is_over.is_set():
        await asyncio.sleep(_POLL_S / 4)
        if tally.settled < count * _KILL_AFTER:
            continue
        for card in await inventory.cards(store):
            pid = _child_of(card, stack) if card.running else None
            if pid is not None:
                say(f"kill -9 {pid}: the process of {card.name}, which runs {card.running} jobs now")
                os.kill(pid, signal.SIGKILL)
                return pid
    return None


def _child_of(card: CardView, stack: Stack) -> int | None:
    """The torch process of a simulated card: the one below the agents that is pinned to it by its
    environment.
    """
    for agent in stack.agent_pids:
        for pid in descendants(agent):
            if card.id in environment(pid).get("VRAMGATE_SIM", ""):
                return pid
    return None


async def _leases_left(store: Store) -> int:
    """Leases that are still held when every caller has its answer and the last runs had time to end."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        left = [lease for lease in await inventory.leases(store) if lease.kind == "job"]
        if not left or time.monotonic() > deadline:
            return len(left)
        await asyncio.sleep(_POLL_S)


def _growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def _two_ports() -> int:
    for port in range(8000, 8200, 2):
        try:
            check_ports("127.0.0.1", (port, port + 1))
            return port
        except Failure:
            continue
    raise Failure("no two ports from 8000 to 8199 are free; name the first of two with --port")
