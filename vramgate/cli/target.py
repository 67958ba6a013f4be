"""Where the ledger and the gateways are, and the options that say so.

Owns the order in which a command looks: its flag, the environment, a running `up` of this directory, the
settings. Does not own the connection's behaviour (`scheduler.store`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from scheduler.settings import Settings, load_settings
from scheduler.store import Store
from vramgate.cli import upfile
from vramgate.cli.exits import NothingReachable
from vramgate.errors import StoreUnavailable

REDIS_ENV = "VRAMGATE_REDIS_URL"
DEFAULT_GATEWAY = "http://127.0.0.1:8000"

RedisOption = Annotated[str | None, typer.Option("--redis", metavar="URL", help="The ledger's server.")]
PoolOption = Annotated[str | None, typer.Option("--pool", metavar="NAME", help="The scheduling domain.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Configuration; vramgate.toml here by default."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the objects that HTTP answers with.")]


@dataclass(frozen=True, slots=True)
class Target:
    """A ledger, and how the command came to look there."""

    settings: Settings
    source: str


def find(redis: str | None = None, *, pool: str | None = None, config: Path | None = None) -> Target:
    """Decide which ledger a command speaks to. Raises ConfigError."""
    given = load_settings(config)
    running = upfile.read(given.redis.data_dir)
    if redis is not None:
        url, source = redis, "from --redis"
    elif os.environ.get(REDIS_ENV):
        url, source = os.environ[REDIS_ENV], f"from {REDIS_ENV}"
    elif running is not None:
        url, source = running.redis_url, f"of the `up` that runs here, pid {running.pid}"
        pool = pool or running.pool
    else:
        source = "from the configuration" if "redis_url" in given.model_fields_set else "the default address"
        url = given.redis_url
    return Target(load_settings(config, redis_url=url, pool=pool), source)


@asynccontextmanager
async def open_store(target: Target) -> AsyncIterator[Store]:
    """A connection to the ledger. Raises NothingReachable with the place that was tried and the remedy."""
    try:
        store = await Store.connect(target.settings, max_connections=4)
    except StoreUnavailable as error:
        raise NothingReachable(
            f"{error.detail} ({target.source}); start one with `vramgate up`, or name one with "
            f"--redis or {REDIS_ENV}"
        ) from None
    try:
        yield store
    finally:
        await store.close()


def gateway_urls(url: str | None, config: Path | None = None) -> tuple[str, ...]:
    """The gateways to ask: the one named, else those of the `up` that runs here, else the default."""
    if url is not None:
        return (url,)
    running = upfile.read(load_settings(config).redis.data_dir)
    return running.gateways if running is not None else (DEFAULT_GATEWAY,)
