"""`gateway` and `agent`: one service in the foreground, and the command lines that start services.

Services run as `python -P -m <package>`: with -P the working directory, where a user may well have a
`scheduler.py`, is not on their path.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from scheduler.settings import Settings
from vramgate.cli.exits import Failure, Misuse
from vramgate.cli.target import ConfigOption, PoolOption, RedisOption, find

SimulateOption = Annotated[
    str | None,
    typer.Option(
        "--simulate", metavar="2x24GiB", help="Cards simulated on this host's memory, without a GPU."
    ),
]
HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Serve other addresses than loopback, without keys.")
]

_NEEDS = {
    "gateway": (("fastapi", "uvicorn", "jsonschema_rs"), "gateway"),
    "gpu_agent": (("torch", "pynvml"), "agent"),
}


def gateway(
    host: HostOption = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=64, help="Worker processes.")] = None,
    insecure: InsecureOption = False,
    redis: RedisOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
) -> None:
    """One gateway: HTTP in front of the ledger."""
    target = find(redis, pool=pool, config=config)
    _become(
        gateway_command(
            target.settings, config=config, host=host, port=port, workers=workers, insecure=insecure
        )
    )


def agent(
    card: Annotated[
        str | None, typer.Option("--card", metavar="UUID", help="One card, or its host:0 name.")
    ] = None,
    all_cards: Annotated[bool, typer.Option("--all", help="One agent for each card of this host.")] = False,
    simulate: SimulateOption = None,
    redis: RedisOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
) -> None:
    """The agent of one card, or of all cards of this host."""
    target = find(redis, pool=pool, config=config)
    if card is not None and all_cards:
        raise Misuse("give --card or --all, not both")
    which = ["--all"] if all_cards else ["--card", card] if card is not None else []
    _become(agent_command(target.settings, which, config=config, simulate=simulate))


def gateway_command(
    settings: Settings,
    *,
    config: Path | None,
    host: str | None = None,
    port: int | None = None,
    workers: int | None = None,
    insecure: bool = False,
) -> list[str]:
    """The command line of one gateway. Raises Failure when its extra is not installed."""
    command = _service("gateway", settings, config)
    for option, value in (("--host", host), ("--port", port), ("--workers", workers)):
        if value is not None:
            command += [option, str(value)]
    return command + (["--insecure"] if insecure else [])


def agent_command(
    settings: Settings, which: Sequence[str] = ("--all",), *, config: Path | None, simulate: str | None = None
) -> list[str]:
    """The command line of the agents of all cards, or of those of `which`. Raises Failure when its extra is
    not installed.
    """
    command = [*_service("gpu_agent", settings, config), *which]
    return command + (["--simulate", simulate] if simulate is not None else [])


def _service(package: str, settings: Settings, config: Path | None) -> list[str]:
    modules, extra = _NEEDS[package]
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise Failure(f"{missing[0]} is not installed; pip install 'vramgate[{extra}]'")
    command = [sys.executable, "-P", "-m", package, "--redis", settings.redis_url, "--pool", settings.pool]
    return command + (["--config", str(config)] if config is not None else [])


def _become(command: list[str]) -> None:
    """Replace this process, so that signals and the exit code are the service's own."""
    sys.stdout.flush()
    os.execv(command[0], command)
