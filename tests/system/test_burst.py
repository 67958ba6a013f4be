"""Four gateway workers and more memory asked for than there is."""

from __future__ import annotations

import asyncio
import random

from scheduler import inventory
from tests.system.caller import Caller, new_tag

REQUESTS = 160
MIB = 2**20


async def test_a_burst_never_takes_a_card_over_its_budget(caller: Caller) -> None:
    """160 requests at once of 1 to 120 MiB, several times the memory of both cards, over all four workers: at
    no moment is more leased than usable, nobody sees an out-of-memory, no audit finds drift, and all are
    answered.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    sizes = [dice.choice((1.0, 8.0, 40.0, 120.0)) for _ in range(REQUESTS)]
    before = await caller.totals()
    tags = [new_tag() for _ in sizes]
    tasks = [
        asyncio.create_task(
            caller.infer("work", tag, mib=mib, seconds=dice.uniform(0, 0.1), gateway=number % 2)
        )
        for number, (tag, mib) in enumerate(zip(tags, sizes, strict=True))
    ]
    asked = sum(sizes) * MIB
    while not all(task.done() for task in tasks):
        for card in await caller.cards():
            ledger = card.ledger
            assert ledger.resident + ledger.jobs <= ledger.usable, f"{card.id}: {ledger}"
            assert card.sample is None or card.sample.used <= card.sample.total
        await asyncio.sleep(0.05)
    answers = await asyncio.gather(*tasks)
    assert {answer.status_code for answer in answers} == {200}, sorted(
        {answer.text for answer in answers if answer.status_code != 200}
    )
    for tag, mib, answer in zip(tags, sizes, answers, strict=True):
        assert answer.json()["outputs"]["tag"] == tag
        assert answer.json()["outputs"]["floats"] == int(mib * MIB) // 4
    cards = await caller.cards()
    assert asked > 2 * sum(card.ledger.usable for card in cards)
    for card in cards:
        assert 0 < card.peak_leased_bytes <= card.ledger.usable
    assert not any((await inventory.audit(caller.store)).values())
    after = await caller.totals()
    for count in ("settled.oom", "requeued.oom", "drift", "settled_twice"):
        assert after.get(count, 0) == before.get(count, 0), count
    assert [caller.box.runs(tag) for tag in tags] == [1] * REQUESTS
