"""The key space: the names that Python and Lua build, what each waiting job costs, what expiry leaves
behind.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from scheduler import admission, cards, jobs, scripts
from scheduler import keys as keys_module
from scheduler.gateways import gateway_beat, gateway_leave
from scheduler.keys import Keys
from scheduler.store import Store, pack
from tests.ledger.conftest import Tuned
from tests.ledger.fake_agent import MIB, FakeAgent, failed, hosted, ok, request
from tests.waiting import until

DRAWN = set(re.findall(r"^vg:\{pool\}:(\w+)", keys_module.__doc__ or "", re.MULTILINE))


async def test_python_and_lua_build_the_same_names(store: Store) -> None:
    """For every kind of key that is drawn in keys.py, with and without a name."""
    base = (scripts.LUA / "_lib" / "base.lua").read_text()
    arguments = (scripts.LUA / "_lib" / "arguments.lua").read_text()
    text = f"{base}\n{arguments}\nreturn key(A.kind, A.name)"
    for kind in sorted(DRAWN):
        for name in (None, "GPU-1:{x}"):
            given = {"kind": kind} | ({"name": name} if name else {})
            built = await store.redis.eval(text, 1, store.keys.meta, pack(given), store.script_settings(""))
            assert built.decode() == store.keys.name(kind, name)
    keys = Keys("p")
    assert (keys.meta, keys.job("j"), keys.card("c")) == ("vg:{p}:meta", "vg:{p}:job:j", "vg:{p}:card:c")
    assert keys.idempotency("a", "b:c") != keys.idempotency("a:b", "c")


def test_every_kind_of_key_is_drawn() -> None:
    """Lua and Python name no kind of key that keys.py does not show, and it shows none that nobody uses."""
    used = {"meta"}
    for path in scripts.LUA.rglob("*.lua"):
        used |= set(re.findall(r"\bkey\('(\w+)'", path.read_text()))
    for path in Path(keys_module.__file__).parent.glob("*.py"):
        used |= set(re.findall(r"""\.name\("(\w+)\"""", path.read_text()))
    # Names that reach key() through a variable: what is kept for a while.
    used |= {"letters", "results", "delivered"}
    assert used == DRAWN


async def test_a_waiting_job_costs_at_most_a_kilobyte(store: Store) -> None:
    """Beside its payload and its key's record: the job's record and its places in the
    indexes.
    """
    agent = FakeAgent(store, models=(hosted("a-model-with-a-name-of-some-length"),), total=2**40)
    await agent.register(state="starting")
    number = 200
    asked = [
        request(
            "a-model-with-a-name-of-some-length",
            key=f"key-{i}" if i % 2 else None,
            nbytes=123_456_789_012,
            tenant="tenant-of-ours",
            request_id="0123456789abcdef" * 2,
            worker="worker-0123456789abcdef",
        )
        for i in range(number)
    ]
    for each in asked:
        await admission.submit(store, each)
    redis: Any = store.redis
    spent = 0
    for each in asked:
        spent += await redis.memory_usage(store.keys.job(each.job_id))
    for index in ("jobs", "deadlines", f"q:{asked[0].model}", f"gwj:{asked[0].worker}"):
        spent += await redis.memory_usage(store.keys.name(index), samples=0)
    assert spent / number <= 1024, f"{spent / number:.0f} bytes for a waiting job"


async def test_expiry_leaves_nothing_of_a_job(tuned: Tuned) -> None:
    """After the times to live of answers, records, dead letters and tombstones only the pool's own keys
    are left.
    """
    store = await tuned(retention={"result_ttl_s": 1, "delivered_ttl_s": 1})
    agent = FakeAgent(store)
    await agent.register()
    asked = [request(key=f"k{i}" if i % 2 else None, nbytes=MIB, inputs=i) for i in range(24)]
    for each in asked:
        await admission.submit(store, each)
    await admission.cancel(store, asked[0].job_id)
    done = 0
    while handed := await agent.claim():
        await agent.finish(*((failed if (done := done + 1) % 5 == 0 else ok)(job) for job in handed))
    # Records of a key live a day and dead letters a week: seen from a week later.
    redis: Any = store.redis
    for index in ("expiry", "results", "letters"):
        for member, score in await redis.zrange(store.keys.name(index), 0, -1, withscores=True):
            if score - agent.now_ms > 5000:
                await redis.zadd(store.keys.name(index), {member: agent.now_ms + 500})

    async def is_gone() -> bool:
        await agent.beat()
        await gateway_beat(store, "w1")
        return not await store.redis.zcard(store.keys.name("jobs"))

    await until("every record expired", is_gone)
    assert (await jobs.list_jobs(store)).data == ()
    await gateway_leave(store, "w1")
    await cards.leave(store, card=agent.card, session=agent.session)
    left = {
        name.decode().removeprefix(store.keys.name("")).split(":")[0]
        async for name in store.redis.scan_iter(match=f"vg:[{{]{store.pool}[}}]:*", count=1000)
    }
    assert left <= {"meta", "stats", "rate", "cards", "card", "host", "models", "model", "on", "key", "wake"}
    assert int(await store.redis.hget(store.keys.meta, "rb") or 0) == 0
    assert not await store.redis.hgetall(store.keys.name("limits"))
