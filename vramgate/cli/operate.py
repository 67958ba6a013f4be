"""What an operator does to a job or a card: `job cancel`, `card drain|cordon|uncordon`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from scheduler import admission, documents, inventory
from scheduler.states import SETTLED, OperatorState
from vramgate.cli import tables
from vramgate.cli.target import ConfigOption, JsonOption, PoolOption, RedisOption, find, open_store
from vramgate.cli.views import fetch_cards, find_job_id, pick

job = typer.Typer(help="Do something to a job.")
card = typer.Typer(help="Do something to a card.")

CardArgument = Annotated[
    str, typer.Argument(metavar="CARD", help="Its id, a unique prefix, or its host:0 name.")
]
ReasonOption = Annotated[str, typer.Option(metavar="TEXT", help="Shown beside the card's state.")]


@job.command()
def cancel(
    id: Annotated[str, typer.Argument(metavar="ID", help="The job's id or a unique prefix.")],
    force: Annotated[
        bool,
        typer.Option("--force", help="Kill the process that runs it, without grace; others are requeued."),
    ] = False,
    as_json: JsonOption = False,
    redis: RedisOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
) -> None:
    """Cancel a job for all its callers. One that is finished stays as it is."""

    async def run() -> None:
        async with open_store(find(redis, pool=pool, config=config)) as store:
            view = await admission.cancel(store, await find_job_id(store, id), force=force)
        if as_json:
            tables.print_json(documents.job_document(view))
        elif view.state == "cancelled" or view.state not in SETTLED:
            tables.console().print(f"job {view.id}: {view.state}")
        else:
            tables.console().print(f"job {view.id} had {view.state} before; nothing was cancelled")

    asyncio.run(run())


@card.command()
def drain(
    id: CardArgument,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
    redis: RedisOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
) -> None:
    """Grant nothing new on it and let what runs there finish."""
    _set_state(id, "draining", reason, as_json, redis=redis, pool=pool, config=config)


@card.command()
def cordon(
    id: CardArgument,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
    redis: RedisOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
) -> None:
    """Grant nothing new on it."""
    _set_state(id, "cordoned", reason, as_json, redis=redis, pool=pool, config=config)


@card.command()
def uncordon(
    id: CardArgument,
    as_json: JsonOption = False,
    redis: RedisOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
) -> None:
    """Let it be granted on again, after a drain or a cordon."""
    _set_state(id, "ready", "", as_json, redis=redis, pool=pool, config=config)


def _set_state(
    id: str,
    state: OperatorState,
    reason: str,
    as_json: bool,
    *,
    redis: RedisOption,
    pool: PoolOption,
    config: ConfigOption,
) -> None:
    async def run() -> None:
        async with open_store(find(redis, pool=pool, config=config)) as store:
            known = pick(await fetch_cards(store), id, noun="card")
            view = await inventory.set_card_state(store, known["id"], state, reason=reason)
        if as_json:
            tables.print_json(documents.card_document(view))
        else:
            told = f"card {view.name} ({view.id}): {view.operator_state}"
            tables.console().print(told + (f"; {view.jobs} jobs are still on it" if view.jobs else ""))

    asyncio.run(run())
