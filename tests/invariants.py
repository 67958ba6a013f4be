"""What must hold of every pool after every test: sums, owners, TTLs."""

from __future__ import annotations

from typing import Any

import msgpack

from scheduler import inventory
from scheduler.store import Store

WITHOUT_TTL = {
    "meta",
    "stats",
    "limits",
    "rate",
    "sessions",
    "cards",
    "card",
    "host",
    "leases",
    "ready",
    "models",
    "model",
    "on",
    "classes",
    "q",
    "jobs",
    "deadlines",
    "results",
    "delivered",
    "letters",
    "expiry",
}
LIVE = {b"queued", b"leased", b"running"}


async def check_pool(store: Store) -> None:
    """Raises AssertionError that names the key at fault."""
    await check_sums(store)
    await check_owners(store)
    stats = await inventory.totals(store)
    assert stats.get("settled_twice", 0) == 0, "a job was settled twice"
    assert stats.get("drift", 0) == 0, "an audit found drift"


async def check_sums(store: Store) -> None:
    """Leased bytes and jobs of every card equal the sums of its leases; and audit agrees."""
    redis: Any = store.redis
    for raw in await redis.zrange(store.keys.name("cards"), 0, -1):
        card = raw.decode()
        records = [msgpack.unpackb(value) for value in await redis.hvals(store.keys.name("leases", card))]
        held = await redis.hmget(store.keys.card(card), "jb", "nj")
        assert int(held[0] or 0) == sum(record[0] for record in records), f"card {card}: leased bytes drift"
        assert int(held[1] or 0) == len(records), f"card {card}: number of leases drifts"
    drift = await inventory.audit(store)
    assert not any(drift.values()), f"audit found drift {drift}"


async def check_owners(store: Store) -> None:
    """No key without an owner or a TTL; the counters of waiting jobs and payload bytes are those of the live
    jobs.
    """
    redis: Any = store.redis
    prefix = store.keys.name("")
    waiting = payload = 0
    live: set[str] = set()
    names = [
        name
        async for name in redis.scan_iter(
            match=prefix.replace("{", "[{]").replace("}", "[}]") + "*", count=1000
        )
    ]
    for name in names:
        kind, _, rest = name.decode().removeprefix(prefix).partition(":")
        if kind == "job" and (job := await redis.hgetall(name)) and job[b"s"] in LIVE:
            live.add(rest)
            waiting += job[b"s"] == b"queued"
            payload += int(job.get(b"pb", 0))
    for name in names:
        kind, _, rest = name.decode().removeprefix(prefix).partition(":")
        if kind in WITHOUT_TTL or (kind in ("job", "pay") and rest in live):
            continue
        if kind == "gwj":
            assert await redis.zscore(store.keys.name("sessions"), f"g:{rest}") is not None or any(
                member.decode() in live for member in await redis.smembers(name)
            ), f"{name!r} has no owner"
            continue
        ttl = await redis.pttl(name)
        assert ttl > 0 or ttl == -2, f"{name!r} has neither an owner nor a TTL"
    limits = await redis.hgetall(store.keys.name("limits"))
    assert int(limits.get(b"w", 0)) == waiting, f"{waiting} jobs wait, the counter says {limits.get(b'w')}"
    assert int(limits.get(b"b", 0)) == payload, (
        f"payloads are {payload} bytes, the counter says {limits.get(b'b')}"
    )
    scheduled = {member.decode() for member in await redis.zrange(store.keys.name("deadlines"), 0, -1)}
    assert scheduled == live, (
        f"deadlines without a live job {scheduled - live}, live jobs without one {live - scheduled}"
    )
