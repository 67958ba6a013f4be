"""What a box is after a test: as it was before.

Owns the comparison of each card's measured memory with what it was before the first job. Does not own the
ledger's own invariants (`tests.invariants`).
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.views import CardView
from tests.system.caller import Caller
from tests.waiting import until


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a card's memory holds while nothing runs: tensors, and all use but the allocator's cache."""

    allocated: int
    used: int

    @classmethod
    def of(cls, card: CardView) -> Footprint | None:
        sample = card.sample
        if sample is None:
            return None
        return cls(sample.allocated, sample.used - (sample.reserved - sample.allocated))


BASELINE: dict[str, Footprint] = {}


async def check_whole(caller: Caller) -> None:
    """Both cards ready, nothing leased, nothing queued, memory as it was before the first job."""
    cards = await caller.all_ready()
    await caller.no_leases()
    for state in ("queued", "leased", "running"):
        assert not await caller.jobs(state), f"a job is still {state}"
    for card in cards:
        await _memory_back(caller, card.id)


async def _memory_back(caller: Caller, card_id: str) -> None:
    async def check() -> bool:
        card = next(card for card in await caller.cards() if card.id == card_id)
        found = Footprint.of(card)
        return found is not None and BASELINE.setdefault(card_id, found) == found

    await until(f"the memory of {card_id} is back at {BASELINE.get(card_id)}", check, patience_s=20)
