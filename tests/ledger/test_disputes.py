"""One contract per name and version: who publishes another one beside a living card is not taken, and told
why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler import admission, cards, inventory, jobs
from scheduler.gateways import gateway_beat
from scheduler.registration import HostedModel
from scheduler.states import OperatorState
from scheduler.store import Store
from tests import packed
from tests.invariants import check_versions
from tests.ledger.conftest import Tuned
from tests.ledger.fake_agent import GIB, FakeAgent, hosted, ok, request, said
from tests.waiting import until

IMAGE, TEXT = hosted(takes="image"), hosted(takes="text")
OTHER = hosted("other")
WORDS = (
    "echo@v1: another input schema is published under this version by host:GPU-a; "
    "give the entry point another version"
)


def _pair(store: Store, second: HostedModel = TEXT) -> tuple[FakeAgent, FakeAgent]:
    """GPU-a publishes IMAGE, GPU-b `second` under the same version; neither has registered."""
    return FakeAgent(store, "GPU-a", models=(IMAGE,)), FakeAgent(store, "GPU-b", models=(second, OTHER))


async def _shown(store: Store, card: str, model: str = "echo") -> tuple[bool, int, str | None]:
    """ready, slots and reason of a model, as its card and the model itself show them."""
    found = {each.name: each for each in (await inventory.card(store, card)).models}[model]
    (view,) = [view for view in await inventory.models(store) if view.name == model]
    place = view.cards[card]
    assert (place.version, place.is_loaded, place.reason) == (found.version, found.ready, found.reason)
    return found.ready, found.slots, found.reason


async def _schema(store: Store) -> Any:
    """The schema that gateways hold callers of echo@v1 to."""
    (view,) = [view for view in await inventory.models(store) if view.name == "echo"]
    (version,) = view.versions
    return version.schema


async def _everything(store: Store) -> dict[bytes, Any]:
    """All that the ledger says of models and cards, without what each beat changes."""
    redis: Any = store.redis
    told: dict[bytes, Any] = {}
    for kind in (
        "model:echo",
        "model:other",
        "on:echo",
        "on:echo@v1",
        "on:other",
        "card:GPU-a",
        "card:GPU-b",
    ):
        name = store.keys.name(kind)
        read = redis.smembers if kind.startswith("on:") else redis.hgetall
        told[kind.encode()] = found = await read(name)
        if kind.startswith("card:"):
            card, _ = packed.unpack("lease", "CARD", found.pop(b"r"))
            told[kind.encode()] |= {name.encode(): value for name, value in card.items() if name != "sm"}
    return told


async def _stamp(store: Store) -> int:
    return (await gateway_beat(store, "w1")).models_stamp


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (TEXT, WORDS),
        (replace(IMAGE, units="len(image)"), WORDS.replace("another input schema is", "other units are")),
        (
            replace(IMAGE, batch_units="max_times_n"),
            WORDS.replace("another input schema is", "other units are"),
        ),
        (replace(TEXT, ready=False, reason="it is being loaded"), "it is being loaded"),
    ],
    ids=["schema", "units", "batch_units", "not loaded yet"],
)
async def test_a_second_contract_is_not_taken(store: Store, second: HostedModel, words: str) -> None:
    """The model is not ready on the second card, with the reason; what the first published stands; the second
    card's other model is served.
    """
    first, other = _pair(store, second)
    await first.register()
    await other.register()
    assert await _shown(store, "GPU-a") == (True, 4, None)
    assert await _shown(store, "GPU-b") == (False, 0, words)
    assert await _shown(store, "GPU-b", "other") == (True, 4, None)
    assert await _schema(store) == IMAGE.schema
    assert (first.disputed, list(other.disputed)) == ({}, ["echo"])


async def test_cards_may_differ_in_what_is_their_own(store: Store) -> None:
    """Estimates, slots, lanes and outputs are no part of the contract; nor is another version."""
    first = FakeAgent(store, "GPU-a", models=(IMAGE,))
    same = replace(
        IMAGE, c0_item=7, c1=2.0, resident_bytes=9, slots=2, lanes=2, max_batch=1, output_schema={}
    )
    await first.register()
    for card, model in (("GPU-b", same), ("GPU-c", replace(TEXT, version="v2"))):
        agent = FakeAgent(store, card, models=(model,))
        await agent.register()
        assert await _shown(store, card) == (True, model.slots, None)
        assert not agent.disputed


async def test_nothing_is_ever_placed_where_the_version_is_in_dispute(store: Store) -> None:
    """Not at submit, not from the queue, not by takeover or recall, by name nor by version; jobs of its other
    model are.
    """
    first, other = _pair(store)
    await first.register()
    await other.register()
    asked = [await admission.submit(store, request(name, nbytes=GIB)) for name in ("echo", "echo@v1") * 6]
    mine = await admission.submit(store, request("other"))
    assert [job.job_id for job in await other.claim()] == [mine.job_id]
    held = await first.claim(want=2)
    await other.finish(*(ok(job) for job in other.held.values()), want=16)
    for _ in range(3):
        assert not await other.claim()
        assert not (await other.beat()).has_work
        assert not (await first.beat()).recalls
    await first.finish(*(ok(job) for job in held))
    assert not await other.claim()
    assert await first.run_all() == 10
    views = [await jobs.view(store, each.job_id) for each in asked]
    assert {(view.state, view.card) for view in views} == {("succeeded", "GPU-a")}


async def test_a_dispute_alone_makes_no_ready_card(store: Store) -> None:
    """The first card takes nothing and lives: jobs of its version wait; the second is no place for them."""
    first, other = _pair(store)
    await first.register(state="starting")
    await other.register()
    asked = await admission.submit(store, request())
    await other.beat()
    assert not await other.claim()
    assert (await jobs.view(store, asked.job_id)).why == "no_ready_card"


@pytest.mark.parametrize("how", ["leaves", "is lost", "publishes another version", "agrees", "drops it"])
async def test_a_dispute_ends_by_itself(tuned: Tuned, how: str) -> None:
    """Once no living card publishes the old contract, a beat of the second is enough, and what waits runs
    there.
    """
    store = await tuned()
    first, other = _pair(store)
    await first.register()
    await other.register()
    await first.beat(state="draining")
    asked = await admission.submit(store, request())
    changed = {
        "publishes another version": (hosted(version="v2", takes="image"),),
        "agrees": (TEXT,),
        "drops it": (OTHER,),
    }
    if how == "leaves":
        await cards.leave(store, card="GPU-a", session=first.session)
    elif how == "is lost":

        async def is_lost() -> bool:
            await gateway_beat(store, "w1")
            await other.beat()
            return (await inventory.card(store, "GPU-a")).state == "lost"

        await until("the first card is lost", is_lost)
    else:
        await first.beat(state="draining", models=changed[how])
    before = await _stamp(store)
    await other.beat()
    if how != "is lost":
        assert await _stamp(store) > before, "gateways look again"
    await other.beat()
    assert await _shown(store, "GPU-b") == (True, 4, None)
    (version,) = [
        each
        for view in await inventory.models(store)
        if view.name == "echo"
        for each in view.versions
        if each.version == "v1"
    ]
    assert (version.schema, other.disputed) == (TEXT.schema, {})
    assert [job.job_id for job in await other.claim()] == [asked.job_id]
    await other.run_all()
    await other.finish(*(ok(job) for job in other.held.values()))


async def test_the_first_to_come_back_finds_the_version_taken(store: Store) -> None:
    """The old contract wins nothing by having been there before: now it is the second."""
    first, other = _pair(store)
    await first.register()
    await other.register()
    await cards.leave(store, card="GPU-a", session=first.session)
    await other.beat()
    first.renew()
    await first.register()
    assert await _shown(store, "GPU-a") == (False, 0, WORDS.replace("GPU-a", "GPU-b"))
    assert await _shown(store, "GPU-b") == (True, 4, None)
    assert await _schema(store) == TEXT.schema


@pytest.mark.parametrize("state", ["cordoned", "draining"])
async def test_a_card_that_an_operator_holds_back_keeps_its_versions(
    store: Store, state: OperatorState
) -> None:
    """It may be taken up again at any moment, so its agent's session counts, not its state."""
    first, other = _pair(store)
    await first.register()
    await inventory.set_card_state(store, "GPU-a", state)
    await other.register()
    await other.beat()
    assert await _shown(store, "GPU-b") == (False, 0, WORDS)
    await inventory.set_card_state(store, "GPU-a", "ready")
    assert await _schema(store) == IMAGE.schema


async def test_one_card_alone_may_change_its_contract(store: Store) -> None:
    """An agent that was started again with edited code under a pinned version; also one that lives on."""
    agent = FakeAgent(store, "GPU-a", models=(IMAGE,))
    await agent.register()
    await cards.leave(store, card="GPU-a", session=agent.session)
    agent.renew()
    agent.models = (TEXT,)
    await agent.register()
    assert await _shown(store, "GPU-a") == (True, 4, None)
    assert await _schema(store) == TEXT.schema
    await agent.beat(models=(IMAGE,))
    assert await _schema(store) == IMAGE.schema
    assert not agent.disputed


async def test_a_model_that_was_never_loaded_claims_nothing(store: Store) -> None:
    """Its agent does not know its inputs: it is in no dispute, and what is known of its version stands."""
    unknown = hosted(ready=False)
    first, other = FakeAgent(store, "GPU-a", models=(unknown,)), FakeAgent(store, "GPU-b", models=(IMAGE,))
    await first.register()
    await other.register()
    assert await _shown(store, "GPU-b") == (True, 4, None)
    await first.beat(models=(unknown,))
    assert await _schema(store) == IMAGE.schema
    assert await _shown(store, "GPU-a") == (False, 4, "does not fit")
    assert not first.disputed and not other.disputed


async def test_repeating_changes_nothing(store: Store) -> None:
    """Registered again, beaten again, audited and recovered: the same ledger; and gateways are not told that
    anything had changed.
    """
    first, other = _pair(store)
    await first.register()
    await other.register()
    before = await _everything(store)
    await first.register()
    await other.register()
    await store.run("recover", {"run_id": "another run"})
    await inventory.audit(store)
    assert await _everything(store) == before
    stamp = await _stamp(store)
    for _ in range(3):
        await other.beat()
        await first.beat()
    assert await _stamp(store) == stamp
    assert await _everything(store) == before
    other.renew()
    await cards.leave(store, card="GPU-b", session=before[b"card:GPU-b"][b"sid"])
    await other.register()
    await check_versions(store)
    assert await _shown(store, "GPU-b") == (False, 0, WORDS)


async def test_jobs_that_were_placed_before_the_dispute_go_where_the_version_is(store: Store) -> None:
    """What was not handed out moves at once, what has not started is asked back, what runs may end; a
    reservation for one of them is given up.
    """
    first = FakeAgent(store, "GPU-a", models=(IMAGE,))
    other = FakeAgent(store, "GPU-b", models=(replace(IMAGE, slots=64),), total=100 * GIB, slots=64)
    await first.register(state="starting")
    await other.register()
    asked = [(await admission.submit(store, request())).job_id for _ in range(24)]
    running, started_not = await other.claim(want=2)
    other.start(running)
    await other.beat()
    await first.beat("ready")
    answer = await other.beat(models=(TEXT,))
    while answer.more:
        answer = await other.beat()
    assert answer.recalls == (started_not.job_id,)
    assert (await inventory.card(store, "GPU-b")).jobs == 2
    await other.finish(ok(running), said(started_not, "give_back"))
    assert await first.run_all() == 23
    views = [await jobs.view(store, job_id) for job_id in asked]
    assert {view.state for view in views} == {"succeeded"}
    assert [view.card for view in views].count("GPU-b") == 1
    assert sum(view.crashes + view.losses for view in views) == 0


async def test_a_reservation_on_a_card_in_dispute_is_given_up(tuned: Tuned) -> None:
    """Bytes are not kept for a job that can never be placed there."""
    store = await tuned(placement={"max_passed": 0})
    first = FakeAgent(store, "GPU-a", models=(IMAGE,))
    other = FakeAgent(store, "GPU-b", models=(IMAGE, OTHER), total=4 * GIB)
    await first.register(state="starting")
    await other.register()
    await admission.submit(store, request("other", nbytes=2 * GIB))
    big = await admission.submit(store, request(nbytes=4 * GIB))
    await other.beat()
    assert (await inventory.card(store, "GPU-b")).head == big.job_id
    await other.beat(models=(TEXT, OTHER))
    card = await inventory.card(store, "GPU-b")
    assert (card.head, card.ledger.reserved_for_head) == (None, 0)
    await first.beat("ready")
    assert (await jobs.view(store, big.job_id)).card == "GPU-a"
    assert await first.run_all() + await other.run_all() == 2
