"""One call of every operation of the ledger, for tests that look at all of them."""

from __future__ import annotations

from scheduler import admission, cards, inventory, jobs, results
from scheduler.gateways import gateway_beat, gateway_leave
from scheduler.store import Store
from tests.ledger.fake_agent import FakeAgent, failed, ok, request, said


async def do_everything(store: Store) -> None:
    """Jobs through every way of ending, two agents, a gateway, an operator. Leaves the pool in order."""
    first, second = FakeAgent(store, "GPU-1"), FakeAgent(store, "GPU-2")
    await gateway_beat(store, "w1")
    await first.register()
    asked = [request(key=f"k{i}" if i % 2 else None, inputs=i) for i in range(8)]
    stored = [await admission.submit(store, each) for each in asked]
    await admission.submit(store, request(key="k1", inputs=1))
    await jobs.view(store, stored[0].job_id, watch=("w1", "c1"), events=True)
    held = await first.claim(want=4)
    for job in held:
        first.start(job)
    await first.beat()
    for session in (first.session, "none"):
        await cards.emit(
            store,
            card=first.card,
            session=session,
            job_id=held[0].job_id,
            lease_id=held[0].lease_id,
            attempt=1,
            events=[("progress", {"done": 1}), ("output", {"text": "a"})],
        )
    await jobs.read_events(store, held[0].job_id)
    await jobs.unwatch(store, held[0].job_id, client="c1")
    await results.put(store, held[1].lease_id, b"x" * 100_000)
    await first.finish(ok(held[0]), failed(held[1]), want=2)
    await first.down(said(held[2], "crashed"), said(held[3], "killed"))
    await second.register()
    await first.beat("ready")
    await admission.abandon(store, job_id=None, client="f" * 32, tenant="-", key="k9")
    await admission.abandon(store, job_id=stored[4].job_id, client=stored[4].job_id, tenant="-", key=None)
    await admission.cancel(store, stored[5].job_id)
    await inventory.set_card_state(store, "GPU-1", "cordoned")
    await inventory.set_card_state(store, "GPU-1", "ready")
    await first.beat(held=[])
    for agent in (second, first):
        await agent.run_all()
    await jobs.outcome(store, stored[0].job_id)
    await jobs.list_jobs(store)
    await inventory.leases(store)
    await inventory.queue(store)
    await inventory.models(store)
    await inventory.audit(store)
    for agent in (first, second):
        await cards.leave(store, card=agent.card, session=agent.session)
    await gateway_leave(store, "w1")
