"""A gateway worker's session in the ledger, and its share of the pool's sweeping."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.store import Store


@dataclass(frozen=True, slots=True)
class GatewayBeat:
    """models_stamp changes whenever a card or a model does. ready_cards: with a model that is ready. more:
    there is more to sweep, call again at once.
    """

    now_ms: int
    models_stamp: int
    ready_cards: int
    more: bool


async def gateway_beat(store: Store, worker: str) -> GatewayBeat:
    """Once a second per worker: renews its session; sweeps deadlines, ended sessions and expired records, 16
    at a time.
    """
    reply = await store.run("gateway_beat", {"worker": worker}, keys=(store.keys.name("sessions"),))
    fields = reply.fields
    return GatewayBeat(reply.now_ms, int(fields["stamp"]), int(fields["ready_cards"]), bool(fields["more"]))


async def gateway_leave(store: Store, worker: str) -> None:
    """A clean shutdown: its clients do not count as having left, its jobs go on."""
    await store.run("gateway_leave", {"worker": worker}, keys=(store.keys.name("sessions"),))
