"""The models of the pool as this worker last saw them, with their compiled readers.

Owns: which version's schema and estimate an infer call is measured against. Gateways need no model
configuration: agents publish all of it. Does not own: when to look again, except that an unknown name looks
at once, so that a model that has just registered is not a 404 until the next beat.

A ledger that lost its memory knows no model until the agents have registered again. Callers are told to come
back then: 404 is for a model that this worker has not known lately either, in a pool that knows some.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.body import Body
from gateway.hints import did_you_mean
from gateway.ledger import Ledger
from gateway.validation import InputReader
from scheduler import estimates
from scheduler.logs import log_event
from scheduler.registration import HostedModel
from scheduler.views import ModelView
from vramgate.errors import NoReadyCard, Refused, UnknownModel

logger = logging.getLogger("gateway")

MAX_REASONS = 4
MAX_WHY = 600
LATELY_S = 60.0
"""So long a model counts as known that the ledger has lost; its agents register again within a few beats."""

REGISTER_S = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """Decoded inputs with what they cost."""

    inputs: dict[str, Any]
    units: float
    lease_bytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """What `name` or `name@version` stands for now.

    readers: one per version that may run the job, never empty.
    """

    name: str
    asked: str
    readers: tuple[InputReader, ...]

    def measure(self, body: Body, vram: int | None) -> Measured:
        """Inputs as the first version that takes them reads them, and the largest lease that any needs.

        Any of the versions may run the job, so the estimate must do for each. Raises the first version's
        refusal.
        """
        first_error: Refused | None = None
        read: Measured | None = None
        for reader in self.readers:
            try:
                inputs = reader.read(body)
                units = reader.units(inputs)
            except Refused as error:
                first_error = first_error or error
                continue
            lease = estimates.lease_bytes(reader.model, units, vram=vram)
            read = (
                Measured(inputs, units, lease)
                if read is None
                else Measured(read.inputs, read.units, max(read.lease_bytes, lease))
            )
        if read is None:
            assert first_error is not None
            raise first_error
        return read


class Catalogue:
    """A snapshot, replaced as a whole."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._views: dict[str, ModelView] = {}
        self._entries: dict[str, Entry] = {}
        self._readers: dict[HostedReaderKey, InputReader] = {}
        self._lost: dict[str, float] = {}
        self._looked = float("-inf")
        self._looking = asyncio.Lock()

    async def refresh(self) -> None:
        """Read all models again. Raises StoreUnavailable."""
        began = time.monotonic()
        views = {view.name: view for view in await self._ledger.models()}
        lost = dict.fromkeys(_names(self._views) - _names(views), began)
        self._lost = {name: at for name, at in self._lost.items() if began - at < LATELY_S} | lost
        self._views, self._entries = views, {}
        self._looked = began
        alive = {_reader_key(model) for view in views.values() for model in view.versions}
        self._readers = {key: reader for key, reader in self._readers.items() if key in alive}

    async def find(self, asked: str) -> Entry:
        """The entry of `name` or `name@version`.

        Raises UnknownModel, NoReadyCard of a ledger that has forgotten it, StoreUnavailable when nobody
        knows.
        """
        entry = self._entries.get(asked) or self._enter(asked)
        if entry is not None:
            return entry
        asked_at = time.monotonic()
        async with self._looking:
            # One look serves all who asked before it began: unknown names cost one look at a time, not one
            # each.
            if self._looked < asked_at:
                await self.refresh()
        entry = self._enter(asked)
        if entry is None:
            raise self.refusal(asked, self._views)
        return entry

    def forget(self, asked: str) -> Refused:
        """The ledger does not know what was found here a moment ago; what to tell the caller."""
        name = asked.partition("@")[0]
        self._lost |= dict.fromkeys((name, asked), time.monotonic())
        self._views, self._entries = {other: self._views[other] for other in self._views if other != name}, {}
        return self.refusal(asked, self._views)

    def why_nowhere(self, name: str) -> str | None:
        """What the cards say of a model that none of them can serve; None where one can, or none says."""
        view = self._views.get(name)
        if view is None or any(place.is_ready for place in view.cards.values()):
            return None
        said = [f"{card}: {place.reason}" for card, place in sorted(view.cards.items()) if place.reason]
        return "; ".join(said[:MAX_REASONS])[:MAX_WHY] or None

    def why_nothing(self) -> str | None:
        """What the cards say of all models that none of them can serve; None: nothing."""
        said = [f"{name} on {why}" for name in sorted(self._views) if (why := self.why_nowhere(name))]
        return "; ".join(said[:MAX_REASONS])[:MAX_WHY] or None

    def _enter(self, asked: str) -> Entry | None:
        name, _, version = asked.partition("@")
        view = self._views.get(name)
        if view is None:
            return None
        if "@" in asked:
            chosen = [model for model in _measured(view) if model.version == version]
        else:
            # Loaded is enough: a card that takes nothing now may well be the one that runs the job.
            loaded = {place.version for place in view.cards.values() if place.is_loaded}
            chosen = [model for model in _measured(view) if model.version in loaded] or _measured(view)
        readers = tuple(reader for model in chosen if (reader := self._reader(model)) is not None)
        if not readers:
            return None
        self._entries[asked] = Entry(name, asked, readers)
        return self._entries[asked]

    def _reader(self, model: HostedModel) -> InputReader | None:
        key = _reader_key(model)
        if key not in self._readers:
            try:
                self._readers[key] = InputReader(model)
            except ValueError as error:
                log_event(
                    logger,
                    "model_unusable",
                    logging.ERROR,
                    model=model.name,
                    version=model.version,
                    detail=str(error)[:300],
                )
                return None
        return self._readers[key]

    def refusal(self, asked: str, views: Mapping[str, ModelView]) -> Refused:
        """Why there is no such model: `views` are all that the ledger knows."""
        name, _, version = asked.partition("@")
        is_lost = time.monotonic() - self._lost.get(asked, float("-inf")) < LATELY_S
        if is_lost or (name in self._views and name not in views):
            return NoReadyCard(
                f"the ledger no longer knows {asked[:64]!r}, which it knew a moment ago; its agents register "
                "again",
                retry_after_s=REGISTER_S,
            )
        if not views:
            return NoReadyCard(
                "no agent has registered a model in this pool yet, or the ledger has lost its memory",
                retry_after_s=REGISTER_S,
            )
        if name in views and not _measured(views[name]):
            why = self.why_nowhere(name)
            return NoReadyCard(
                f"no card has loaded {name} as yet{f'; {why}' if why else ''}", retry_after_s=REGISTER_S
            )
        if name in views:
            known = ", ".join(model.version for model in views[name].versions)
            return UnknownModel(f"model {name} has no version {version[:64]!r}; there is {known}")
        hint = did_you_mean(name, views, otherwise="GET /v1/models lists those that are known")
        return UnknownModel(f"no agent has served {name[:64]!r} lately; {hint}")


HostedReaderKey = tuple[str, str, str, int, float]


def _measured(view: ModelView) -> list[HostedModel]:
    """The versions that some card has loaded. Of the others nobody knows what their inputs are, and a lease
    reckoned without that would be too small.
    """
    return [model for model in view.versions if model.contract]


def _names(views: Mapping[str, ModelView]) -> set[str]:
    """All that can be asked for: names, and names with a version."""
    versions = {f"{view.name}@{model.version}" for view in views.values() for model in view.versions}
    return views.keys() | versions


def _reader_key(model: HostedModel) -> HostedReaderKey:
    # The estimate too: a reader carries the model that its lease is reckoned from.
    return (model.name, model.version, model.contract, model.c0_item, model.c1)
