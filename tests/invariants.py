"""What must hold of every pool after every test: sums, owners, TTLs."""

from __future__ import annotations

import struct
from typing import Any

from scheduler import inventory
from scheduler.store import Store
from tests import packed

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
LIVE = {"queued", "leased", "running"}


async def check_pool(store: Store) -> None:
    """Raises AssertionError that names the key at fault."""
    await check_sums(store)
    await check_owners(store)
    await check_versions(store)
    stats = await inventory.totals(store)
    assert stats.get("settled_twice", 0) == 0, "a job was settled twice"
    assert stats.get("drift", 0) == 0, "an audit found drift"


async def check_sums(store: Store) -> None:
    """Leased bytes and jobs of every card equal the sums of its leases; and audit agrees."""
    redis: Any = store.redis
    for raw in await redis.zrange(store.keys.name("cards"), 0, -1):
        card = raw.decode()
        values = await redis.hvals(store.keys.name("leases", card))
        records = [packed.unpack("lease", "RECORD", value)[0] for value in values]
        stored = await redis.hget(store.keys.card(card), "r")
        held, _ = packed.unpack("lease", "CARD", stored)
        assert held["jb"] == sum(record["bytes"] for record in records), f"card {card}: leased bytes drift"
        assert held["nj"] == len(records), f"card {card}: number of leases drifts"
    drift = await inventory.audit(store)
    assert not any(drift.values()), f"audit found drift {drift}"


async def check_owners(store: Store) -> None:
    """No key without an owner or a TTL; every live job is where its state says; the counters of waiting jobs
    and payload bytes are those of the live jobs.
    """
    redis: Any = store.redis
    prefix = store.keys.name("")
    pattern = prefix.replace("{", "[{]").replace("}", "[}]") + "*"
    names = [name.decode() async for name in redis.scan_iter(match=pattern, count=1000)]
    kinds = [(name, *name.removeprefix(prefix).split(":", 1)) for name in names]
    recorded = [name for name, kind, *_ in kinds if kind == "job"]
    stored = await _each(redis, "get", recorded)
    jobs = {name: packed.unpack_job(value) for name, value in zip(recorded, stored, strict=True) if value}
    live = {name.removeprefix(prefix + "job:"): job for name, job in jobs.items() if job["s"] in LIVE}
    bounded = [
        name
        for name, kind, *rest in kinds
        if kind not in WITHOUT_TTL and kind != "gwj" and not (kind in ("job", "pay") and rest[0] in live)
    ]
    for name, ttl_ms in zip(bounded, await _each(redis, "pttl", bounded), strict=True):
        assert ttl_ms != -1, f"{name} has neither an owner nor a TTL"
    for name, kind, *rest in kinds:
        if kind == "gwj" and await redis.zscore(store.keys.name("sessions"), f"g:{rest[0]}") is None:
            members = {member.decode() for member in await redis.smembers(name)}
            assert members & live.keys(), f"{name} has no owner"
    await _check_places(store, kinds, live)
    limits = await redis.hgetall(store.keys.name("limits"))
    waiting = sum(job["s"] == "queued" for job in live.values())
    payload = sum(job["pb"] for job in live.values())
    counted = struct.unpack("<dd", limits.get(b"p", bytes(16)))
    assert counted == (waiting, payload), f"waiting jobs and bytes: {(waiting, payload)}, counted {counted}"
    scheduled = {member.decode() for member in await redis.zrange(store.keys.name("deadlines"), 0, -1)}
    assert scheduled == live.keys(), f"deadlines and live jobs differ by {scheduled ^ live.keys()}"


async def check_versions(store: Store) -> None:
    """Living cards that host a version agree on its contract; a model in dispute has no place on its card."""
    redis: Any = store.redis
    agreed: dict[str, bytes] = {}
    for raw in await redis.zrange(store.keys.name("cards"), 0, -1):
        card = raw.decode()
        fields = await redis.hgetall(store.keys.card(card))
        held, _ = packed.unpack("lease", "CARD", fields[b"r"])
        classes = held["cl"].split()
        for field in (name.decode() for name in fields if name.startswith(b"d:")):
            name = field.removeprefix("d:")
            assert f"m:{name}".encode() not in fields, (
                f"card {card} has slots for {name}, which is in dispute"
            )
            assert name not in classes, f"card {card} serves waiters of {name}, which is in dispute"
        for name in classes:
            assert await redis.sismember(store.keys.name("on", name), card), (
                f"card {card} is not in on:{name}"
            )
            model, _, version = name.partition("@")
            contract = fields.get(f"s:{model}".encode())
            if version and contract is not None and held["sid"]:
                assert agreed.setdefault(name, contract) == contract, f"living cards differ on {name}"


async def _each(redis: Any, command: str, names: list[str]) -> list[Any]:
    answers: list[Any] = []
    for at in range(0, len(names), 1000):
        async with redis.pipeline(transaction=False) as pipe:
            for name in names[at : at + 1000]:
                getattr(pipe, command)(name)
            answers += await pipe.execute()
    return answers


async def _check_places(store: Store, kinds: list[tuple[str, ...]], live: dict[str, dict[str, Any]]) -> None:
    """A queued job stands in the queue of its class and nowhere else; one on a card has its lease there."""
    redis: Any = store.redis
    standing: dict[str, str] = {}
    leases: dict[str, set[str]] = {}
    for name, kind, *rest in kinds:
        if kind == "q":
            standing |= {member.decode(): rest[0] for member in await redis.zrange(name, 0, -1)}
        elif kind == "leases":
            leases[rest[0]] = {lease_id.decode() for lease_id in await redis.hkeys(name)}
    expected = {job_id: job["c"] for job_id, job in live.items() if job["s"] == "queued" and "bl" not in job}
    assert standing == expected, f"queues and queued jobs differ by {standing.items() ^ expected.items()}"
    for job_id, job in live.items():
        if job["s"] != "queued":
            card, lease_id = job["d"], job["l"]
            assert lease_id in leases.get(card, ()), f"job {job_id} has no lease {lease_id} on card {card}"
