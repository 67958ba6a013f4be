"""A server that forgets scripts, cuts connections, is full, or freezes: accepted jobs end once, and no child
is killed for its silence.
"""

from __future__ import annotations

import asyncio
import signal

from tests.system.caller import Caller, new_tag
from tests.system.test_crashes import all_answered, load
from tests.waiting import is_running, until

FREEZE_S = 12.0


async def test_flushed_scripts_and_cut_connections(caller: Caller) -> None:
    """SCRIPT FLUSH and CLIENT KILL of every connection, again and again under load: all are answered, each by
    one run.
    """
    tags = [new_tag() for _ in range(60)]
    rounds = 0
    async with caller.client() as client:
        tasks = load(client, tags)
        while not all(task.done() for task in tasks):
            await caller.store.redis.script_flush()
            await caller.cut_connections()
            rounds += 1
            await asyncio.sleep(0.2)
        await all_answered(caller, tags, await asyncio.gather(*tasks))
    assert rounds >= 3
    assert [caller.box.runs(tag) for tag in tags] == [1] * len(tags)


async def test_a_full_server_refuses_new_jobs_and_finishes_the_old_ones(caller: Caller) -> None:
    """maxmemory reached under load: new jobs are refused with 503 store_unavailable; what was accepted runs
    to its end and is answered; with room again all is as before.
    """
    before = (await caller.totals()).get("submitted", 0)
    tags = [new_tag() for _ in range(12)]
    waiting = [asyncio.create_task(caller.infer("work", tag, seconds=1.0, gateway=0)) for tag in tags]
    accepted = [await caller.submit("work", new_tag(), seconds=0.5) for _ in range(8)]

    async def all_accepted() -> bool:
        return (await caller.totals())["submitted"] == before + len(tags) + len(accepted)

    await until("all jobs are accepted", all_accepted)
    await caller.store.redis.config_set("maxmemory", "1")
    try:
        refused = await asyncio.gather(*(caller.infer("work", gateway=n % 2) for n in range(8)))
        assert {answer.status_code for answer in refused} == {503}
        assert {answer.json()["code"] for answer in refused} == {"store_unavailable"}
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
        answers = await asyncio.gather(*waiting)
        assert [answer.status_code for answer in answers] == [200] * len(tags)
        assert [answer.json()["outputs"]["tag"] for answer in answers] == tags
        for job in accepted:
            assert (await caller.ended(job))["state"] == "succeeded"
        await caller.no_leases()
    finally:
        await caller.store.redis.config_set("maxmemory", "0")
    assert [caller.box.runs(tag) for tag in tags] == [1] * len(tags)
    assert (await caller.infer("work", new_tag())).status_code == 200


async def test_twelve_seconds_of_silence(caller: Caller) -> None:
    """The server is frozen for 12 s under load, six sessions long. Meanwhile callers are told 503; when it
    wakes nobody who is alive is reaped, no child was killed, all callers are answered, and what was
    accepted ran once.
    """
    children = [caller.box.agents.child(card.id) for card in await caller.cards()]
    before = await caller.totals()
    tags, async_tags = [new_tag() for _ in range(24)], [new_tag() for _ in range(24)]
    accepted = [await caller.submit("work", tag, seconds=1.0) for tag in async_tags]
    async with caller.client() as client:
        tasks = load(client, tags, seconds=1.0)
        await caller.tagged_run(async_tags[0])
        caller.box.server.signal(signal.SIGSTOP)
        try:
            frozen = asyncio.create_task(asyncio.sleep(FREEZE_S))
            refused = await caller.infer("work", new_tag(), gateway=1)
            assert refused.status_code == 503 and refused.json()["code"] == "store_unavailable"
            assert not frozen.done()
            await frozen
        finally:
            caller.box.server.signal(signal.SIGCONT)
        await all_answered(caller, tags, await asyncio.gather(*tasks))
    for job in accepted:
        ended = await caller.ended(job)
        assert ended["state"] == "succeeded" and ended["crashes"] == 0
    assert [caller.box.runs(tag) for tag in async_tags] == [1] * len(async_tags)
    await caller.all_ready()
    after = await caller.totals()
    for count in ("sessions_lost", "requeued.agent_lost", "requeued.crash", "settled_twice"):
        assert after.get(count, 0) == before.get(count, 0), count
    assert [caller.box.agents.child(card.id) for card in await caller.cards()] == children
    assert all(map(is_running, children))
