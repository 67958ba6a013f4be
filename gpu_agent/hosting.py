"""The models of one card: what the configuration asks for, how each fares, and what is published of it.

Owns: the state of each model over the lives of the child, its estimate, and when a failed load is tried
again. Does not own: loading (the child), or whether it may be granted (the ledger).
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from gpu_agent.estimate import Estimate
from scheduler.logs import log_event
from scheduler.registration import HostedModel
from scheduler.settings import ModelSettings, Settings
from vramgate.model import BatchUnits, batch_need

_LOG = logging.getLogger(__name__)
MOST_LOADS = 3
RETRY_S = (5.0, 30.0)
JITTER = 0.2
_UNKNOWN_VERSION = "unknown"


@dataclass(slots=True)
class CardModel:
    """One configured model. `known` outlives the child: a new one need not measure again. `disputed`: why the
    ledger does not take it, although it may be ready here.
    """

    name: str
    settings: ModelSettings
    state: Literal["absent", "loading", "ready", "failed"] = "absent"
    reason: str | None = None
    disputed: str | None = None
    descriptor: Mapping[str, Any] | None = None
    schema_hash: str = ""
    known: Estimate | None = None
    failures: int = 0
    retry_at: float | None = None
    busy: set[int] = field(default_factory=set)
    max_batch: int = 1
    lanes: int = 1
    _published: tuple[tuple[Any, ...], HostedModel] | None = None

    @property
    def slots(self) -> int:
        """How many jobs may be leased at once: all lanes full, and one batch more at hand."""
        return self.settings.concurrency or self.lanes * self.max_batch + self.max_batch

    @property
    def batch_units(self) -> BatchUnits:
        return "max_times_n" if self.descriptor and self.descriptor["batch_units"] == "max_times_n" else "sum"

    def loaded(self, message: Mapping[str, Any]) -> None:
        """The child says that it is ready, and what it measured."""
        c0, c1, seen = message["line"]
        measured = Estimate(int(message["weights"]), int(message["buffers"]), int(c0), float(c1), float(seen))
        if self.known is not None:
            measured = Estimate(
                measured.weights,
                max(measured.buffers, self.known.buffers),
                max(measured.c0, self.known.c0),
                max(measured.c1, self.known.c1),
                max(measured.seen_units, self.known.seen_units),
            )
        self.known, self.descriptor = measured, message["descriptor"]
        self.schema_hash = schema_hash(message["descriptor"].get("schema"))
        self.max_batch, self.lanes = self._at_most("max_batch"), self._at_most("lanes")
        self.state, self.reason, self.failures, self.retry_at = "ready", None, 0, None

    def _at_most(self, name: str) -> int:
        """What the model declares, within what the configuration lets it have."""
        assert self.descriptor is not None
        declared = int(self.descriptor[name])
        return min(declared, self.settings.concurrency or declared)

    def batch_bytes(self, units: Sequence[float]) -> int:
        """What a batch of these items takes, by the estimate."""
        return 0 if self.known is None else self.known.batch_bytes(units, self.batch_units)

    def learn(self, units: Sequence[float], *, peak: int | None, buffers: int) -> None:
        """A batch of these items ran; peak None: it was not alone in the child."""
        if self.known is None:
            return
        known = self.known.with_buffers(buffers)
        if peak is not None:
            known = known.raised(items=len(units), units=batch_need(units, self.batch_units), peak=peak)
        self.known = known

    def load_failed(self, reason: str, *, is_final: bool) -> None:
        """Try again later, and after the third time no more."""
        self.failures += 1
        self.state = "failed"
        if is_final or self.failures >= MOST_LOADS:
            tries = f" (given up after {self.failures} tries)" if not is_final else ""
            self.reason, self.retry_at = reason + tries, None
        else:
            # A little apart: cards whose models all failed at one moment share a host, and often a cause.
            delay = RETRY_S[min(self.failures, len(RETRY_S)) - 1] * random.uniform(1 - JITTER, 1 + JITTER)
            then = datetime.now(UTC) + timedelta(seconds=delay)
            self.reason = f"{reason} (tried again at {then:%H:%M:%S} UTC)"
            self.retry_at = time.monotonic() + delay

    @property
    def is_given_up(self) -> bool:
        return self.state == "failed" and self.retry_at is None

    @property
    def is_due(self) -> bool:
        """To be loaded now: neither ready, nor given up, nor waiting for its next try."""
        waits = self.retry_at is not None and self.retry_at > time.monotonic()
        return self.state != "ready" and not self.is_given_up and not waits

    def published(self) -> HostedModel:
        """What the ledger and the gateways are told: the same object until it says something else."""
        basis = (self.state, self.reason, self.descriptor, self.known)
        if self._published is None or self._published[0] != basis:
            self._published = (basis, self._described())
        return self._published[1]

    def _described(self) -> HostedModel:
        facts = self.descriptor or {}
        known = self.known or Estimate(0, 0, 0, 0.0, 0.0)
        is_ready = self.state == "ready"
        return HostedModel(
            name=self.name,
            version=str(facts.get("version") or self.settings.version or _UNKNOWN_VERSION),
            ready=is_ready,
            reason=None if is_ready else self.reason or "it is being loaded",
            slots=self.slots if is_ready else 0,
            max_batch=self.max_batch,
            lanes=self.lanes,
            resident_bytes=known.resident if is_ready else 0,
            c0_item=known.c0,
            c1=known.c1,
            units=str(facts.get("units", "1")),
            batch_units=self.batch_units,
            schema=facts.get("schema"),
            schema_hash=self.schema_hash,
            output_schema=facts.get("output_schema"),
        )


class CardModels:
    """All models of this card, by name."""

    def __init__(self, settings: Settings, *, uuid: str, name: str) -> None:
        self._models = {
            model: CardModel(model, chosen)
            for model, chosen in settings.models.items()
            if chosen.cards == "all" or uuid in chosen.cards or name in chosen.cards
        }

    def __getitem__(self, name: str) -> CardModel:
        return self._models[name]

    def get(self, name: str) -> CardModel | None:
        return self._models.get(name)

    @property
    def all(self) -> tuple[CardModel, ...]:
        return tuple(self._models.values())

    @property
    def ready(self) -> tuple[CardModel, ...]:
        return tuple(model for model in self._models.values() if model.state == "ready")

    @property
    def resident(self) -> int:
        """Bytes that the loaded models keep."""
        return sum(model.known.resident for model in self.ready if model.known is not None)

    @property
    def slots(self) -> int:
        return sum(model.slots for model in self.ready)

    def published(self) -> tuple[HostedModel, ...]:
        """Every model of the configuration: who asks for one that is being loaded is told so, and not that
        there is none.
        """
        return tuple(model.published() for model in self.all)

    def hear_disputes(self, disputed: Mapping[str, str]) -> None:
        """The ledger's answer to what was published: the models that it does not take, and why. Each change
        is logged once.
        """
        for model in self.all:
            reason = disputed.get(model.name)
            if reason == model.disputed:
                continue
            model.disputed = reason
            if reason is None:
                log_event(_LOG, "version_free", model=model.name)
            else:
                log_event(_LOG, "version_disputed", logging.ERROR, model=model.name, reason=reason)

    def child_gone(self) -> None:
        """No model is loaded any more; what has failed waits for its next try, or has none."""
        for model in self._models.values():
            model.busy.clear()
            if model.state != "failed":
                model.state = "absent"


def schema_hash(schema: Mapping[str, Any] | None) -> str:
    """A hash of a JSON Schema that does not hang on the order of its keys."""
    text = json.dumps(schema, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
