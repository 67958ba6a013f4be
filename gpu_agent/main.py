"""The agent's command line: `python -m gpu_agent [--card UUID|host:index | --all]`.

Exit status: 0 stopped as asked, 1 failed, 2 usage or configuration, 3 no such card or no card at all, 4
the ledger was not reached, 69 the driver lost the card.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from gpu_agent.device.listing import list_cards
from gpu_agent.device.reading import DriverCard, NoNvml
from gpu_agent.fleet import run_fleet
from gpu_agent.supervisor import CardGone, CardPlace, Supervisor
from scheduler.logs import log_event, setup_logging
from scheduler.settings import ConfigError, Settings, load_settings, model_directories
from vramgate.errors import StoreUnavailable, VramgateError

_LOG = logging.getLogger(__name__)
EXIT_FAILED, EXIT_USAGE, EXIT_NO_CARD, EXIT_NO_LEDGER, EXIT_CARD_GONE = 1, 2, 3, 4, 69
EXIT_INTERRUPTED = 130
HOST_DIR = "VRAMGATE_INTERNAL_HOST_DIR"
HOST_NAME = "VRAMGATE_INTERNAL_HOST"


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent; returns the exit status. Every failure is one line on stderr."""
    parser = _parser()
    args = parser.parse_args(argv)
    setup_logging(as_json=args.log_json)
    try:
        settings = load_settings(args.config, redis_url=args.redis, pool=args.pool)
        host_dir = _host_dir(settings, args.simulate)
        cards = list_cards(args.simulate, host_dir=host_dir)
        if args.all:
            return asyncio.run(run_fleet(cards, _shared_arguments(args)))
        card = _choose(cards, args.card)
        for other in cards:
            if other is not card:
                other.close()
        log_event(_LOG, "agent_started", card=card.uuid, product=card.product, remark=card.remark or None)
        place = CardPlace(
            host=_host(),
            simulated=args.simulate is not None,
            host_dir=host_dir,
            directories=model_directories(args.config),
        )
        uvloop.run(Supervisor(settings, card, place).run())
    except (VramgateError, NoNvml, ValueError) as error:
        log_event(_LOG, "agent_failed", logging.ERROR, reason=str(error))
        return _status(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vramgate agent", description="Serve models on one card, or on all."
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--card", help="a UUID, a unique prefix of one, or host:index; needed when there are several"
    )
    which.add_argument("--all", action="store_true", help="one agent per card, started again when it ends")
    parser.add_argument("--simulate", metavar="2x24GiB", help="simulated cards on this host's memory")
    parser.add_argument("--config", type=Path, help="vramgate.toml")
    parser.add_argument("--redis", help="URL of the ledger's server")
    parser.add_argument("--pool", help="the scheduling domain")
    parser.add_argument("--log-json", action="store_true", help="log one JSON object per line")
    return parser


def _shared_arguments(args: argparse.Namespace) -> list[str]:
    """What each agent of a fleet is started with, beside its card."""
    pairs = (
        ("--simulate", args.simulate),
        ("--config", args.config),
        ("--redis", args.redis),
        ("--pool", args.pool),
    )
    told = [part for flag, value in pairs if value is not None for part in (flag, str(value))]
    return [*told, *(["--log-json"] if args.log_json else [])]


class NoSuchCard(VramgateError):
    """The command line names a card that this host has not."""


def _choose(cards: Sequence[DriverCard], wanted: str | None) -> DriverCard:
    shown = ", ".join(f"{card.uuid} ({_host()}:{card.index})" for card in cards)
    if wanted is None:
        if len(cards) == 1:
            return cards[0]
        raise NoSuchCard(f"this host has {len(cards)} cards; choose with --card, or take --all: {shown}")
    exact = [card for card in cards if wanted in (card.uuid, f"{_host()}:{card.index}", f"host:{card.index}")]
    found = exact or [card for card in cards if card.uuid.startswith(wanted)]
    if len(found) != 1:
        raise NoSuchCard(
            f"--card {wanted} names {len(found)} of this host's cards; there are: {shown or 'none'}"
        )
    return found[0]


def _host() -> str:
    return os.environ.get(HOST_NAME) or platform.node() or "localhost"


def _host_dir(settings: Settings, simulate: str | None) -> Path:
    """Where this host's agents meet: locks of real cards are the host's, simulated cards belong to a
    working folder.
    """
    given = os.environ.get(HOST_DIR)
    if given:
        return Path(given)
    if simulate is not None:
        return settings.redis.data_dir / "sim"
    return Path(tempfile.gettempdir()) / "vramgate"


def _status(error: Exception) -> int:
    if isinstance(error, StoreUnavailable):
        return EXIT_NO_LEDGER
    if isinstance(error, ConfigError | ValueError):
        return EXIT_USAGE
    if isinstance(error, NoSuchCard | NoNvml):
        return EXIT_NO_CARD
    if isinstance(error, CardGone):
        return EXIT_CARD_GONE
    return EXIT_FAILED
