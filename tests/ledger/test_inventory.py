"""The pool as it is shown: what is said of models follows what their cards can do."""

from __future__ import annotations

import pytest

from scheduler import documents, inventory
from scheduler.states import OperatorState
from scheduler.store import Store
from tests.ledger.conftest import Tuned
from tests.ledger.fake_agent import FakeAgent, hosted
from tests.waiting import until


async def _shown(store: Store) -> tuple[bool, list[dict[str, object]]]:
    """Whether `echo` is ready, and its cards, as callers see it."""
    (view,) = [view for view in await inventory.models(store) if view.name == "echo"]
    document = documents.model_document(view)
    return document["ready"], document["cards"]


@pytest.mark.parametrize("state", ["cordoned", "draining"])
async def test_a_model_is_not_ready_on_a_card_that_takes_nothing(store: Store, state: OperatorState) -> None:
    """The card's state and its reason stand for it; it is ready as long as one card serves it, and again
    after an uncordon."""
    first, second = FakeAgent(store, "GPU-a"), FakeAgent(store, "GPU-b")
    await first.register()
    await second.register()
    await inventory.set_card_state(store, "GPU-a", state, reason="smells burnt")
    at_rest = {"id": "GPU-a", "version": "v1", "ready": False, "reason": f"the card is {state}: smells burnt"}
    serving = {"id": "GPU-b", "version": "v1", "ready": True, "reason": None}
    assert await _shown(store) == (True, [at_rest, serving])
    await inventory.set_card_state(store, "GPU-b", state)
    ready, (_, last) = await _shown(store)
    assert not ready and last["reason"] == f"the card is {state} by an operator"
    await inventory.set_card_state(store, "GPU-b", "ready")
    await second.beat()
    assert await _shown(store) == (True, [at_rest, serving])


async def test_a_model_is_not_ready_on_a_card_that_is_down_or_lost(tuned: Tuned) -> None:
    """Neither while its agent says down, nor after its session ended without a word; what the agent says
    of the model itself goes first."""
    store = await tuned()
    agent = FakeAgent(store, "GPU-a", models=(hosted(), hosted("other", ready=False)))
    await agent.register()
    await agent.beat(state="down")
    ready, (card,) = await _shown(store)
    assert not ready and str(card["reason"]).startswith("the card is down")
    await agent.beat()
    assert (await _shown(store))[0]
    watcher = FakeAgent(store, "GPU-b", models=(hosted("other", ready=False),))
    await watcher.register()

    async def is_lost() -> bool:
        await watcher.beat()
        return (await inventory.card(store, "GPU-a")).state == "lost"

    await until("the silent card is lost", is_lost)
    ready, (card,) = await _shown(store)
    assert not ready and str(card["reason"]).startswith("the card is lost: ")
    (other,) = [view for view in await inventory.models(store) if view.name == "other"]
    assert [card["reason"] for card in documents.model_document(other)["cards"]] == ["does not fit"] * 2


async def test_a_version_is_known_once_a_card_has_loaded_it(store: Store) -> None:
    """A model that is being loaded is known by its name and its cards; nothing stays of the time before."""
    agent = FakeAgent(store, models=(hosted(version="unknown", ready=False),))
    await agent.register()
    ready, (place,) = await _shown(store)
    assert (ready, place["reason"]) == (False, "does not fit")
    (view,) = await inventory.models(store)
    assert view.versions == ()
    await agent.beat(models=(hosted(version="v7"),))
    (view,) = await inventory.models(store)
    assert [model.version for model in view.versions] == ["v7"]
