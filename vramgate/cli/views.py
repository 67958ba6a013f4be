"""`cards`, `leases`, `jobs`, `queue`, `models`: what the ledger holds, straight from Redis.

Owns listing, one object by id or unique prefix, `--json` and `--watch`. The objects' shapes are
`scheduler.documents`', their columns `tables`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.live import Live
from rich.table import Table

from scheduler import documents, inventory
from scheduler import jobs as ledger_jobs
from scheduler.documents import Document
from scheduler.states import SETTLED, State
from scheduler.store import Store
from vramgate.cli import tables
from vramgate.cli.details import properties
from vramgate.cli.exits import Missing, Misuse
from vramgate.cli.target import ConfigOption, JsonOption, PoolOption, RedisOption, find, open_store

WATCH_S = 1.0
_PAGE = 200
_MOST_SCANNED = 20_000
_FULL_ID = 32

IdArgument = Annotated[str | None, typer.Argument(metavar="ID", help="One of them, by id or unique prefix.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Show it again each second, until Ctrl-C.")]

Fetch = Callable[[Store], Awaitable[list[Document]]]


@dataclass(frozen=True, slots=True)
class Where:
    """The options that every view has."""

    redis: str | None
    pool: str | None
    config: Path | None
    as_json: bool
    watch: bool


def cards(
    id: IdArgument = None,
    as_json: JsonOption = False,
    watch: WatchOption = False,
    redis: RedisOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
) -> None:
    """The cards: state, what is leased on them, and what was measured."""
    where = Where(redis, pool, config, as_json, watch)
    _show(fetch_cards, tables.CARDS, id, where, noun="card", prepare=tables.told_apart)


def leases(
    id: IdArgument = None,
    as_json: JsonOption = False,
    watch: WatchOption = False,
    redis: RedisOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
) -> None:
    """The live leases: who holds how many bytes of which card."""
    _show(fetch_leases, tables.LEASES, id, Where(redis, pool, config, as_json, watch), noun="lease")


def queue(
    id: Annotated[str | None, typer.Argument(metavar="MODEL", help="One model's queue.")] = None,
    as_json: JsonOption = False,
    watch: WatchOption = False,
    redis: RedisOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
) -> None:
    """What waits, by model."""
    _show(fetch_queue, tables.QUEUE, id, Where(redis, pool, config, as_json, watch), noun="queue")


def models(
    id: Annotated[str | None, typer.Argument(metavar="MODEL", help="One model.")] = None,
    as_json: JsonOption = False,
    watch: WatchOption = False,
    redis: RedisOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
) -> None:
    """The models: versions, estimates, and the cards that serve them."""
    _show(fetch_models, tables.MODELS, id, Where(redis, pool, config, as_json, watch), noun="model")


def jobs(
    id: IdArgument = None,
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    model: Annotated[str | None, typer.Option(help="Only jobs of this model.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most so many, the newest.")] = 50,
    as_json: JsonOption = False,
    watch: WatchOption = False,
    redis: RedisOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
) -> None:
    """The jobs, newest first: state, place, and why they wait or failed."""
    where = Where(redis, pool, config, as_json, watch)
    if state is not None and state not in get_args(State):
        raise Misuse(f"--state: {state!r} is none of {', '.join(get_args(State))}")
    if id is not None:
        asyncio.run(_present(where, lambda store: fetch_job(store, id), properties))
        return

    async def fetch(store: Store) -> Document:
        found = await fetch_jobs(store, state=state, model=model, limit=limit)
        if model is not None and not found["data"]:
            await _refuse_unknown_model(store, model)
        return found

    asyncio.run(_present(where, fetch, lambda found: tables.table(tables.JOBS, found["data"])))


async def fetch_cards(store: Store) -> list[Document]:
    return [documents.card_document(view) for view in await inventory.cards(store)]


async def fetch_leases(store: Store) -> list[Document]:
    return [documents.lease_document(view) for view in await inventory.leases(store)]


async def fetch_queue(store: Store) -> list[Document]:
    return [documents.queue_document(view) for view in await inventory.queue(store)]


async def fetch_models(store: Store) -> list[Document]:
    return [documents.model_document(view) for view in await inventory.models(store)]


async def fetch_jobs(store: Store, *, state: str | None, model: str | None, limit: int) -> Document:
    """The newest jobs that fit. A page of the ledger may hold fewer than asked for, so pages are joined."""
    found: list[Document] = []
    cursor: str | None = None
    while True:
        wanted = min(_PAGE, limit - len(found))
        page = await ledger_jobs.list_jobs(store, state=state, model=model, cursor=cursor, limit=wanted)
        found += [documents.job_document(view) for view in page.data]
        cursor = page.next
        if cursor is None or len(found) >= limit:
            return documents.list_document(found, cursor)


async def _refuse_unknown_model(store: Store, name: str) -> None:
    known = [view.name for view in await inventory.models(store)]
    if name not in known:
        raise Missing(f"--model: there is no model {name!r}; known are: {', '.join(known) or 'none'}")


async def fetch_job(store: Store, prefix: str) -> Document:
    """A job by id or unique prefix, with its result or error once it settled."""
    job_id = await find_job_id(store, prefix)
    view = await ledger_jobs.view(store, job_id)
    outcome = await ledger_jobs.outcome(store, job_id) if view.state in SETTLED else None
    return documents.job_document(view, outcome)


async def find_job_id(store: Store, prefix: str) -> str:
    """The full id that `prefix` begins. Looks through the newest jobs, page by page."""
    prefix = prefix.lower()
    if not prefix:
        raise Misuse("the job's id is empty; write the id or its beginning, `vramgate jobs` lists them")
    if len(prefix) >= _FULL_ID:
        return prefix
    found: list[str] = []
    cursor: str | None = None
    for _ in range(_MOST_SCANNED // _PAGE):
        page = await ledger_jobs.list_jobs(store, cursor=cursor, limit=_PAGE)
        found += [view.id for view in page.data if view.id.startswith(prefix)]
        cursor = page.next
        if cursor is None:
            break
    return only(found, prefix, noun="job")


def only(found: Sequence[str], prefix: str, *, noun: str) -> str:
    """The one id that a prefix stands for. Raises Missing for none, Misuse for several."""
    if prefix in found:
        return prefix
    if not found:
        if noun == "queue":
            raise Missing(f"nothing waits for a model {prefix}; `vramgate queue` lists what waits")
        raise Missing(f"there is no {noun} {prefix}; `vramgate {noun}s` lists them")
    if len(found) > 1:
        some = ", ".join(sorted(found)[:3])
        more = ", ..." if len(found) > 3 else ""
        raise Misuse(f"{prefix} stands for {len(found)} {noun}s: {some}{more}; write more of the id")
    return found[0]


def pick(listed: Sequence[Document], prefix: str, *, noun: str) -> Document:
    """One of `listed` by id, unique prefix or exact name."""
    if not prefix:
        raise Misuse(f"the {noun}'s id is empty; write the id or its beginning")
    named = {document["id"]: document for document in listed if document.get("name") == prefix}
    matching = named or {document["id"]: document for document in listed if document["id"].startswith(prefix)}
    if named and len(named) == 1:
        return next(iter(named.values()))
    return matching[only(list(matching), prefix, noun=noun)]


def _show(
    fetch: Fetch,
    columns: Sequence[tables.Column],
    id: str | None,
    where: Where,
    *,
    noun: str,
    prepare: Callable[[Sequence[Document]], Sequence[Document]] = lambda listed: listed,
) -> None:
    async def fetch_one(store: Store) -> Document:
        return pick(await fetch(store), id or "", noun=noun)

    async def fetch_all(store: Store) -> Document:
        return documents.list_document(await fetch(store))

    if id is not None:
        asyncio.run(_present(where, fetch_one, properties))
    else:
        asyncio.run(_present(where, fetch_all, lambda found: tables.table(columns, prepare(found["data"]))))


async def _present(
    where: Where, fetch: Callable[[Store], Awaitable[Document]], draw: Callable[[Document], Table]
) -> None:
    async with open_store(find(where.redis, pool=where.pool, config=where.config)) as store:
        if not where.watch:
            found = await fetch(store)
            if where.as_json:
                tables.print_json(found)
            else:
                tables.console().print(draw(found))
            return
        if where.as_json:
            while True:
                tables.print_json(await fetch(store), is_line=True)
                await asyncio.sleep(WATCH_S)
        console = tables.console()
        if not console.is_terminal:
            while True:
                console.print(draw(await fetch(store)))
                console.file.flush()
                await asyncio.sleep(WATCH_S)
        with Live(draw(await fetch(store)), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(WATCH_S)
                live.update(draw(await fetch(store)), refresh=True)
