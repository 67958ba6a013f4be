"""Four gateway workers and six agents do random things at once; the ledger's sums hold after every burst.

The seed is printed and can be given as VRAMGATE_TEST_SEED.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from scheduler import admission, cards, inventory, jobs
from scheduler.gateways import gateway_beat
from scheduler.handover import HandedJob, OutcomeKind
from scheduler.settings import Settings
from scheduler.states import OperatorState
from scheduler.store import Store
from scheduler.submissions import SubmitRequest
from tests import packed
from tests.conftest import TestServer
from tests.invariants import check_pool, check_sums, check_versions
from tests.ledger.conftest import tune
from tests.ledger.fake_agent import MIB, FakeAgent, failed, hosted, ok, request, said
from vramgate import errors

OPERATIONS = 100_000
BURSTS = 100
CLIENTS_PER_GATEWAY = 30
AGENT_STEPS = 25
REFUSALS = (errors.Refused, cards.SessionLost, cards.CardTaken)
KINDS: tuple[OutcomeKind, ...] = ("ended", "give_back", "oom", "crashed", "killed")
MODELS = ("a", "b", "c")


class World:
    """Everything that the random operations know of one another."""

    def __init__(self, stores: Sequence[Store], chance: random.Random) -> None:
        self.stores = stores
        self.chance = chance
        self.asked: list[SubmitRequest] = []
        self.accepted: dict[str, str] = {}
        self.done: Counter[str] = Counter()

    async def client(self, gateway: int, steps: int) -> None:
        """One client connection of a gateway worker: one call after the other."""
        store, chance = self.stores[gateway], self.chance
        actions = (
            self._submit,
            self._repeat,
            self._abandon,
            self._cancel,
            self._view,
            self._beat,
            self._operate,
        )
        for action in chance.choices(actions, (62, 5, 16, 9, 4, 3, 1), k=steps):
            name = action.__name__.strip("_")
            try:
                await action(store, f"w{gateway}")
            except REFUSALS as refusal:
                name += f" {getattr(refusal, 'code', 'lost')}"
                assert getattr(refusal, "code", "") not in ("internal", "store_unavailable"), refusal
            self.done[name] += 1

    async def _submit(self, store: Store, worker: str) -> None:
        chance = self.chance
        keyed = chance.random() < 0.5
        asked = request(
            chance.choice(MODELS),
            nbytes=chance.choice((1, 10, 10, 40, 150)) * MIB,
            key=f"k{chance.randrange(400)}" if keyed else None,
            inputs=1 if keyed and chance.random() < 0.95 else chance.random(),
            worker=worker,
            priority=chance.randrange(10),
            tenant=f"t{chance.randrange(3)}",
            is_async=chance.random() < 0.1,
            max_wait_ms=chance.choice((1, 200, 60_000, 60_000)),
            run_timeout_ms=chance.choice((100, 60_000, 60_000)),
            total_timeout_ms=chance.choice((400, 120_000, 120_000)),
        )
        self.asked.append(asked)
        await self._send(store, asked)

    async def _send(self, store: Store, asked: SubmitRequest) -> None:
        told = await admission.submit(store, asked)
        self.accepted[asked.job_id] = told.job_id

    async def _repeat(self, store: Store, worker: str) -> None:
        if self.asked:
            await self._send(store, self._recent())

    def _recent(self) -> SubmitRequest:
        return self.chance.choice(self.asked[-300:])

    async def _abandon(self, store: Store, worker: str) -> None:
        if not self.asked:
            return
        asked = self._recent()
        job_id = self.accepted.get(asked.job_id) if self.chance.random() < 0.7 else None
        await admission.abandon(store, job_id=job_id, client=asked.job_id, tenant=asked.tenant, key=asked.key)

    async def _cancel(self, store: Store, worker: str) -> None:
        if self.asked:
            force = self.chance.random() < 0.3
            await admission.cancel(store, self.accepted.get(self._recent().job_id, "0" * 32), force=force)

    async def _view(self, store: Store, worker: str) -> None:
        if self.asked:
            await jobs.view(store, self.accepted.get(self._recent().job_id, "0" * 32), watch=(worker, "v"))

    async def _beat(self, store: Store, worker: str) -> None:
        await gateway_beat(store, worker)

    async def _operate(self, store: Store, worker: str) -> None:
        states: tuple[OperatorState, ...] = ("ready", "ready", "cordoned", "draining")
        card = f"GPU-{self.chance.randrange(6)}"
        await inventory.set_card_state(store, card, self.chance.choice(states))

    async def agent(self, agent: FakeAgent, steps: int) -> None:
        """One agent: numbered calls one at a time, beats beside them, and now and then a death."""
        chance = self.chance
        for _ in range(steps):
            action = chance.choices(
                ("claim", "finish", "beat", "race", "unheld", "edit", "down", "die", "leave"),
                (25, 40, 8, 12, 2, 0.5, 1, 0.4, 0.4),
            )[0]
            self.done[action] += 1
            try:
                await getattr(self, f"_agent_{action}")(agent)
            except cards.SessionLost:
                agent.renew()
                await self._register(agent)
            except cards.CardTaken:
                await self._expire(agent)

    async def _register(self, agent: FakeAgent) -> None:
        try:
            await agent.register()
        except cards.CardTaken:
            await self._expire(agent)
            await agent.register()

    async def _expire(self, agent: FakeAgent) -> None:
        name = agent.store.keys.name("sessions")
        await agent.store.redis.zadd(name, {f"c:{agent.card}": 1}, xx=True)

    async def _agent_claim(self, agent: FakeAgent) -> None:
        for job in await agent.claim(want=self.chance.randrange(1, 17)):
            if self.chance.random() < 0.8:
                agent.start(job)

    async def _agent_finish(self, agent: FakeAgent) -> None:
        chance = self.chance
        held = list(agent.held.values())
        chosen = chance.sample(held, min(len(held), chance.randrange(1, 17)))
        reports = [self._report(job) for job in chosen]
        self.done["reports"] += len(reports)
        agent.seq += 1
        line: Any = {"card": agent.card, "session": agent.session, "seq": agent.seq}
        want = chance.choice((0, 4, 16))
        calls = 2 if chance.random() < 0.1 else 1
        answers = [
            await cards.finish(agent.store, reports=reports, want=want, sample=agent.sample(), **line)
            for _ in range(calls)
        ]
        assert answers[0].verdicts == answers[-1].verdicts
        first, last = ({job.lease_id for job in answer.jobs} for answer in (answers[0], answers[-1]))
        assert last <= first, "the repetition hands out nothing new"
        agent.applied, agent.now_ms = agent.seq, answers[-1].now_ms
        for report in reports:
            agent.held.pop(report.lease_id, None)
        agent.held |= {job.lease_id: job for job in answers[0].jobs}

    def _report(self, job: HandedJob) -> Any:
        draw = self.chance.random()
        if draw < 0.8:
            return ok(job)
        if draw < 0.88:
            return failed(job, self.chance.choice(("model_error", "internal", "non_finite")))
        return said(job, self.chance.choice(KINDS), alone=job.alone)

    async def _agent_beat(self, agent: FakeAgent) -> None:
        agent.foreign = self.chance.choice((0, 0, 0, 30 * MIB))
        await agent.beat()

    async def _agent_race(self, agent: FakeAgent) -> None:
        """A beat with what was held before, beside a claim that hands out more."""
        before, applied = list(agent.held.values()), agent.applied
        await asyncio.gather(agent.beat(applied=applied, held=before), agent.claim(want=8))
        states = await asyncio.gather(
            *(
                agent.store.redis.hexists(agent.store.keys.name("leases", agent.card), each)
                for each in agent.held
            )
        )
        assert all(states) or not await self._holds(agent), (
            "a late beat took a job that a newer reply handed out"
        )

    async def _holds(self, agent: FakeAgent) -> bool:
        record: Any = await agent.store.redis.hget(agent.store.keys.card(agent.card), "r")
        held, _ = packed.unpack("lease", "CARD", record)
        return bool(held["sid"] == agent.session)

    async def _agent_unheld(self, agent: FakeAgent) -> None:
        if agent.held:
            agent.held.pop(next(iter(agent.held)))
        await agent.beat()

    async def _agent_edit(self, agent: FakeAgent) -> None:
        """Its models' code is edited under a pinned version, or put back."""
        edited = (
            replace(model, schema_hash=self.chance.choice(("", "", "edited"))) for model in agent.models
        )
        await agent.beat(models=tuple(edited))

    async def _agent_down(self, agent: FakeAgent) -> None:
        held = list(agent.held.values())[:16]
        await agent.down(*(said(job, self.chance.choice(("crashed", "killed"))) for job in held))
        agent.held.clear()
        await agent.beat("ready")

    async def _agent_die(self, agent: FakeAgent) -> None:
        await self._expire(agent)
        await gateway_beat(agent.store, "w0")
        agent.renew()
        await self._register(agent)

    async def _agent_leave(self, agent: FakeAgent) -> None:
        await cards.leave(agent.store, card=agent.card, session=agent.session)
        agent.renew()
        await self._register(agent)


async def _check_burst(store: Store) -> None:
    await check_sums(store)
    await check_versions(store)
    for card in await inventory.cards(store):
        ledger = card.ledger
        assert ledger.jobs + ledger.resident <= ledger.usable, f"{card.id} is over-admitted: {ledger}"
        assert card.peak_leased_bytes <= ledger.usable, (
            f"{card.id} was over-admitted: {card.peak_leased_bytes}"
        )
        assert card.jobs <= card.slots


async def _drain(world: World, agents: list[FakeAgent]) -> None:
    """Everything that was accepted comes to its end."""
    store = world.stores[0]
    for agent in agents:
        await inventory.set_card_state(store, agent.card, "ready")
        agent.foreign = 0
    for _ in range(400):
        for agent in agents:
            try:
                await agent.beat()
                held = list(agent.held.values())
                for at in range(0, len(held), 16):
                    await agent.finish(*(ok(job) for job in held[at : at + 16]))
                await agent.run_all()
            except cards.SessionLost:
                agent.renew()
                await world._register(agent)
        await gateway_beat(store, "w0")
        if not await store.redis.zcard(store.keys.name("deadlines")):
            return
    raise AssertionError("jobs are left that nobody can run")


@pytest.mark.timeout(300)
async def test_four_workers_never_over_admit(server: TestServer, pool: str) -> None:
    """100,000 random operations in concurrent bursts: after each the leased bytes are the sum of the
    leases, an audit finds no drift, no card is above its usable bytes; in the end every accepted job was
    settled once.
    """
    seed = int(os.environ.get("VRAMGATE_TEST_SEED") or secrets.randbits(32))
    print(f"VRAMGATE_TEST_SEED={seed}")
    settings: Settings = tune(
        server,
        pool,
        clocks={"session_s": 5.0, "beat_s": 1.5, "abandon_grace_s": 0.3},
        limits={"queue_jobs": 400, "tenant_jobs": 250, "result_bytes": 2**20},
        placement={"max_passed": 4, "max_passing_s": 0.5},
        retention={"result_ttl_s": 2, "delivered_ttl_s": 1, "tombstone_ttl_s": 1},
    )
    stores = [await Store.connect(settings) for _ in range(4)]
    world = World(stores, random.Random(seed))
    agents = [
        FakeAgent(
            stores[i % 4],
            f"GPU-{i}",
            total=(200 + 50 * i) * MIB,
            models=tuple(hosted(name, slots=6) for name in MODELS[: 1 + i % 3]),
            slots=12,
        )
        for i in range(6)
    ]
    for agent in agents:
        await agent.register()
    each = OPERATIONS // BURSTS // (4 * CLIENTS_PER_GATEWAY)
    bursts = 0
    while sum(world.done.values()) < OPERATIONS:
        clients = (world.client(i % 4, each) for i in range(4 * CLIENTS_PER_GATEWAY))
        await asyncio.gather(*clients, *(world.agent(agent, AGENT_STEPS) for agent in agents))
        await _check_burst(stores[0])
        bursts += 1
    await _drain(world, agents)
    await _check_burst(stores[0])
    await check_pool(stores[0])
    totals = await inventory.totals(stores[0])
    settled = {name: number for name, number in totals.items() if name.startswith("settled.")}
    print(bursts, dict(world.done), settled)
    assert sum(settled.values()) == totals["submitted"]
    assert bursts >= 50
    assert min(settled.values()) > 100, "every way of ending was seen"
    for store in stores:
        await store.close()
