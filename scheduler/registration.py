"""What an agent publishes of its card: the card itself, the models on it, and stamped readings of its memory.

Bytes are integers below 2**53, times are milliseconds of Redis time unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One stamped memory reading of a card; what may be granted is put together from the last one.

    own = reserved + context; all bytes. read_ms: Redis time of the reading, as the agent reckons it.
    used_by_lease: external lease id -> measured use of its process tree; None where processes are not
    visible.
    """

    read_ms: int
    total: int
    driver: int
    used: int
    own: int
    allocated: int
    reserved: int
    context: int
    used_by_lease: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model on a card: what an agent publishes of it at registration and in beats.

    slots: how many jobs of it may be leased on this card at once (lanes x max_batch + one prefetched batch,
    or its `concurrency`). resident_bytes: weights and what one lane needs however small the input. lease =
    c0_item + c1 x units. schema_hash: empty until it was loaded once; nothing is known of its inputs before.
    """

    name: str
    version: str
    ready: bool
    reason: str | None
    slots: int
    max_batch: int
    lanes: int
    resident_bytes: int
    c0_item: int
    c1: float
    units: str
    batch_units: str
    schema: Mapping[str, Any] | None
    schema_hash: str
    output_schema: Mapping[str, Any] | None = None
    owned_by: str = "vramgate"

    @property
    def contract(self) -> str:
        """What gateways hold callers to: how inputs are read, and what units mean. Living cards that host one
        name and version have the same; estimates and slots are each card's own. Empty: nothing is known.
        """
        is_known = self.ready or self.schema_hash
        return f"{self.schema_hash} {self.batch_units} {self.units}" if is_known else ""


@dataclass(frozen=True, slots=True)
class CardRegistration:
    """What an agent says when it takes a card. `slots` bounds all models of the card together."""

    card: str
    session: str
    host: str
    name: str
    index: int
    product: str
    pid: int
    headroom: int
    slots: int
    models: tuple[HostedModel, ...]
    sample: Sample | None
    simulated: bool = False
