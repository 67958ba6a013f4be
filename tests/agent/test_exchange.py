"""The jobs of one card against a real ledger, with a child that the test plays: no torch, no process."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgpack
import pytest

from gpu_agent.clock import ServerClock
from gpu_agent.events import Emitter
from gpu_agent.exchange import Exchange
from gpu_agent.held import Held
from gpu_agent.hosting import CardModels
from gpu_agent.intake import Intake, Surroundings
from scheduler import admission, cards, inventory, jobs, results
from scheduler.fingerprint import canonical
from scheduler.handover import Beat
from scheduler.registration import CardRegistration, Sample
from scheduler.settings import Settings, load_settings
from scheduler.store import Store
from scheduler.submissions import SubmitRequest
from tests.waiting import until
from vramgate.errors import StoreUnavailable

MIB = 2**20
CARD = "SIM-test-0"


class Bench:
    """Intake and exchange as the supervisor puts them together; `sent` is what the child was told."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.store = store
        self.session = secrets.token_hex(16)
        self.clock = ServerClock()
        self.sent: list[Mapping[str, Any]] = []
        self.kills: list[str] = []
        self.total = 1024 * MIB
        self.is_silent = False
        self.models = CardModels(settings, uuid=CARD, name="box:0")
        self.models["m"].loaded(
            {
                "model": "m",
                "line": [MIB, float(MIB), 100.0],
                "weights": 0,
                "buffers": 0,
                "descriptor": {
                    "version": "1",
                    "units": "1",
                    "batch_units": "sum",
                    "max_batch": 4,
                    "lanes": 1,
                    "schema": {"type": "object"},
                },
            }
        )
        self.held = Held(lambda: self.exchange.kick())
        around = Surroundings(
            kill=self.kills.append,
            event=lambda job, kind, data: self.emitter.add(job, kind, data),
            sample=self.sample,
            is_silent=lambda: self.is_silent,
            cancel_grace_s=0.2,
            headroom=0,
        )
        self.intake = Intake(self.models, self.held, around)
        self.emitter = Emitter(store, card=CARD, session=self.session)
        self.exchange = Exchange(
            store,
            card=CARD,
            session=self.session,
            held=self.held,
            intake=self.intake,
            sampler=self,  # type: ignore[arg-type]
            clock=self.clock,
            emitter=self.emitter,
            applied_changed=lambda: None,
        )

    def sample(self) -> Sample:
        now_ms = self.clock.now_ms() or 0
        return Sample(now_ms, self.total, 0, 0, 0, 0, 0, 0, used_by_lease={})

    async def after_run(self, *, timeout_s: float) -> Sample:
        return self.sample()

    async def begin(self) -> None:
        registration = CardRegistration(
            card=CARD,
            session=self.session,
            host="box",
            name="box:0",
            index=0,
            product="test",
            pid=1,
            headroom=0,
            slots=self.models.slots,
            models=self.models.published(),
            sample=None,
        )
        self.clock.hear(await cards.register(self.store, registration, state="starting"))
        self.intake.open(self.sent.append)
        await self.beat()
        self.task = asyncio.create_task(self.exchange.run())

    async def beat(self) -> None:
        beat = Beat("ready", None, self.exchange.applied, self.held.pairs, self.held.starts(), self.sample())
        answer = await cards.heartbeat(self.store, card=CARD, session=self.session, beat=beat)
        self.held.starts_are_known(beat.starts)
        self.intake.cancel(answer.cancels)
        self.intake.recall(answer.recalls)
        if answer.has_work:
            self.exchange.hint()

    async def submit(self, *, nbytes: int = 2 * MIB, size: int = 1, **options: Any) -> str:
        request = SubmitRequest(
            job_id=secrets.token_hex(16),
            model="m",
            inputs=canonical({"x": "y" * size}),
            lease_bytes=nbytes,
            units=1.0,
            worker="w",
            is_async=True,
            **options,
        )
        submitted = await admission.submit(self.store, request)
        self.exchange.hint()
        return submitted.job_id

    async def batch(self, number: int = 1) -> Mapping[str, Any]:
        """The number-th batch that the child was told to run."""

        async def check() -> Mapping[str, Any] | None:
            runs = [message for message in self.sent if message["t"] == "run"]
            return runs[number - 1] if len(runs) >= number else None

        return await until(f"{number} batches were sent", check, patience_s=10)

    def done(
        self, batch: Mapping[str, Any], *, kind: str = "ok", peak: int = MIB, shared: bool = False
    ) -> None:
        self.intake.on_done(
            {
                "t": "done",
                "batch": batch["batch"],
                "items": [[kind, msgpack.packb(job[0]), None, None, None] for job in batch["jobs"]],
                "run_ms": 1,
                "peak": peak,
                "shared": shared,
                "buffers": 0,
            }
        )

    def last_piece(self, batch: Mapping[str, Any]) -> None:
        """What the child says of the first job of a batch just before it is done."""
        self.intake.on_event(
            {"t": "output", "batch": batch["batch"], "item": 0, "data": msgpack.packb("the end")}
        )

    async def state(self, job_id: str, state: str) -> None:
        async def check() -> bool:
            return (await jobs.view(self.store, job_id)).state == state

        await until(f"job is {state}", check, patience_s=10)


@pytest.fixture
async def bench(store: Store, settings: Settings) -> AsyncIterator[Bench]:
    """A registered, ready card whose child is the test."""
    configured = load_settings(
        redis_url=settings.redis_url, pool=settings.pool, models={"m": {"entrypoint": "m:M"}}
    )
    built = Bench(store, configured)
    await built.begin()
    yield built
    built.task.cancel()
    await asyncio.gather(built.task, return_exceptions=True)
    built.intake.session_lost()
    await cards.leave(store, card=CARD, session=built.session)


Call = Callable[..., Awaitable[Any]]


def lose_replies(monkeypatch: pytest.MonkeyPatch, name: str, *, times: int) -> list[int]:
    """Let calls of scheduler.cards.<name> happen, and their first answers get lost. Returns the numbers
    used.
    """
    real: Call = getattr(cards, name)
    numbers: list[int] = []

    async def lossy(*args: Any, seq: int, **kwargs: Any) -> Any:
        numbers.append(seq)
        answer = await real(*args, seq=seq, **kwargs)
        if len(numbers) <= times:
            raise StoreUnavailable("the answer was lost")
        return answer

    monkeypatch.setattr(cards, name, lossy)
    return numbers


async def test_a_lost_answer_to_a_claim_is_asked_again_by_number(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim whose answer is lost twice is repeated under one number and hands each job out once."""
    numbers = lose_replies(monkeypatch, "claim", times=2)
    ids = {await bench.submit() for _ in range(3)}
    handed: list[str] = []
    at = 1
    while len(handed) < 3:
        batch = await bench.batch(at)
        handed += [job[0] for job in batch["jobs"]]
        bench.done(batch)
        at += 1
    assert sorted(handed) == sorted(ids)
    assert numbers[0] == numbers[1] == numbers[2]
    for job in ids:
        await bench.state(job, "succeeded")


async def test_a_lost_answer_to_finish_settles_once_and_hands_out_nothing_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finish whose answer is lost is repeated: its jobs settle once, and its next jobs come once."""
    numbers = lose_replies(monkeypatch, "finish", times=1)
    first = await bench.submit()
    batch = await bench.batch()
    rest = [await bench.submit() for _ in range(3)]
    bench.done(batch)
    await bench.state(first, "succeeded")
    handed: list[str] = []
    at = 2
    while len(handed) < 3:
        batch = await bench.batch(at)
        handed += [job[0] for job in batch["jobs"]]
        bench.done(batch)
        at += 1
    assert sorted(handed) == sorted(rest)
    for job in rest:
        await bench.state(job, "succeeded")
    assert numbers[0] == numbers[1]
    totals = await inventory.totals(bench.store)
    assert totals.get("settled_twice", 0) == 0


async def test_what_would_exceed_the_measured_budget_is_handed_back(bench: Bench) -> None:
    """When the card's measure shrank behind the ledger's back, the agent's own sum hands a granted job
    back.
    """
    view = await inventory.card(bench.store, CARD)
    assert view.ledger.grantable == 1024 * MIB
    job = await bench.submit(nbytes=600 * MIB)
    # What the ledger granted by, the card no longer has; no beat has told it so.
    bench.total = 500 * MIB

    async def handed_back() -> bool:
        view = await jobs.view(bench.store, job)
        return view.attempt >= 1 and view.state == "queued"

    await until("the job was handed back", handed_back, patience_s=10)
    assert not bench.sent
    assert (await jobs.view(bench.store, job)).crashes == 0
    bench.total = 1024 * MIB
    await bench.beat()
    bench.done(await bench.batch())
    await bench.state(job, "succeeded")


async def test_nothing_is_started_while_the_ledger_is_silent(bench: Bench) -> None:
    """Jobs at hand wait while the ledger says nothing, and start with its next word."""
    bench.is_silent = True
    job = await bench.submit()

    async def at_hand() -> bool:
        return bool(bench.held.pairs)

    await until("the job is at hand", at_hand, patience_s=10)
    assert not bench.sent
    bench.is_silent = False
    bench.intake.dispatch()
    bench.done(await bench.batch())
    await bench.state(job, "succeeded")


async def test_a_cancel_before_the_start_never_reaches_the_child(bench: Bench) -> None:
    """A job that waits in the agent behind another is dropped when it is cancelled; its lease ends at
    once.
    """
    first = await bench.submit()
    batch = await bench.batch()
    second = await bench.submit()

    async def at_hand() -> bool:
        return len(bench.held.pairs) == 2

    await until("both are held", at_hand, patience_s=10)
    await admission.cancel(bench.store, second)
    await bench.beat()

    async def one_lease() -> bool:
        return [lease.job_id for lease in await inventory.leases(bench.store)] == [first]

    await until("its lease has ended", one_lease, patience_s=10)
    bench.done(batch)
    await bench.state(first, "succeeded")
    assert len(bench.sent) == 1


async def test_a_recalled_job_goes_back_when_it_has_not_begun(bench: Bench) -> None:
    """A recall takes the job that waits and leaves the one that runs."""
    first = await bench.submit()
    batch = await bench.batch()
    second = await bench.submit()

    async def at_hand() -> bool:
        return len(bench.held.pairs) == 2

    await until("both are held", at_hand, patience_s=10)
    bench.intake.recall([first, second])

    async def handed_again() -> bool:
        return (await jobs.view(bench.store, second)).attempt == 2

    await until("the second was given back and granted anew", handed_again, patience_s=10)
    bench.done(batch)
    bench.done(await bench.batch(2))
    await bench.state(second, "succeeded")
    assert (await jobs.view(bench.store, first)).attempt == 1


async def test_a_large_result_passes_a_full_server(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the server has no room to store a large result beside, it goes along with finish, which frees
    memory.
    """

    async def full(*args: Any, **kwargs: Any) -> None:
        raise StoreUnavailable("full")

    monkeypatch.setattr(results, "put", full)
    job = await bench.submit()
    batch = await bench.batch()
    answer = msgpack.packb("z" * 100_000)
    message = {"batch": batch["batch"], "run_ms": 1, "peak": 0, "shared": True, "buffers": 0}
    bench.intake.on_done(message | {"t": "done", "items": [["ok", answer, None, None, None]]})
    await bench.state(job, "succeeded")
    outcome = await jobs.outcome(bench.store, job)
    assert outcome is not None and outcome.result == answer


async def test_results_that_a_full_server_does_not_store_go_call_by_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they could be more than the server takes in one call; each is delivered all the same."""

    async def full(*args: Any, **kwargs: Any) -> None:
        raise StoreUnavailable("full")

    monkeypatch.setattr(results, "put", full)
    monkeypatch.setattr("gpu_agent.exchange.MOST_CARRIED_BYTES", 150_000)
    calls: list[int] = []
    finish = cards.finish

    async def counted(*args: Any, reports: Any, **kwargs: Any) -> Any:
        calls.append(len(reports))
        return await finish(*args, reports=reports, **kwargs)

    monkeypatch.setattr(cards, "finish", counted)
    blocker = await bench.submit()
    first = await bench.batch()
    ids = [await bench.submit() for _ in range(3)]

    async def at_hand() -> bool:
        return len(bench.held.pairs) == 4

    await until("all are held", at_hand, patience_s=10)
    bench.done(first)
    await bench.state(blocker, "succeeded")
    batch = await bench.batch(2)
    calls.clear()
    answers = [msgpack.packb(str(i) * 100_000) for i in range(3)]
    number = batch["batch"]
    bench.intake.on_result({"t": "result", "batch": number, "item": 0, "data": answers[0]})
    items = [["ok", None if i == 0 else answer, None, None, None] for i, answer in enumerate(answers)]
    message = {"batch": number, "run_ms": 1, "peak": 0, "shared": True, "buffers": 0}
    bench.intake.on_done(message | {"t": "done", "items": items})
    for job_id, answer in zip(ids, answers, strict=True):
        await bench.state(job_id, "succeeded")
        outcome = await jobs.outcome(bench.store, job_id)
        assert outcome is not None and outcome.result == answer
    assert calls == [1, 1, 1]


async def test_the_grace_of_a_cancel_spares_batch_mates(bench: Bench) -> None:
    """A cancelled item whose batch mate is wanted is never killed for; when both are cancelled, the grace
    ends it.
    """
    blocker = await bench.submit()
    first = await bench.batch()
    ids = [await bench.submit() for _ in range(2)]

    async def at_hand() -> bool:
        return len(bench.held.pairs) == 3

    await until("all are held", at_hand, patience_s=10)
    bench.done(first)
    await bench.batch(2)
    await bench.beat()
    await admission.cancel(bench.store, ids[0])
    await bench.beat()
    cancels = [message for message in bench.sent if message["t"] == "cancel"]
    assert len(cancels) == 1
    since = time.monotonic()

    async def grace_passed() -> bool:
        return time.monotonic() - since > 0.5

    await until("the grace has passed twice", grace_passed)
    assert not bench.kills
    await admission.cancel(bench.store, ids[1])
    await bench.beat()

    async def killed() -> bool:
        return bool(bench.kills)

    await until("the child is to be killed", killed, patience_s=10)
    bench.intake.child_ended("killed", detail="test")
    await bench.state(blocker, "succeeded")


async def test_an_exclusive_job_runs_alone_and_in_turn(bench: Bench) -> None:
    """After an OOM the job comes back alone: it starts when the child is empty, and nothing starts beside
    it.
    """
    job = await bench.submit()
    bench.done(await bench.batch(), kind="oom")
    batch = await bench.batch(2)
    assert [j[0] for j in batch["jobs"]] == [job]
    view = await inventory.card(bench.store, CARD)
    assert view.ledger.jobs == 1024 * MIB, "an exclusive lease holds all that the card has"
    other = await bench.submit()
    assert (await jobs.view(bench.store, other)).state == "queued"
    bench.done(batch)
    bench.done(await bench.batch(3))
    await bench.state(other, "succeeded")


async def test_only_what_ran_alone_teaches(bench: Bench) -> None:
    """A peak above the lease raises the estimate, but not one that was shared with other lanes."""
    for shared, raised in ((True, False), (False, True)):
        job = await bench.submit()
        batch = await bench.batch(1 if shared else 2)
        bench.done(batch, peak=50 * MIB, shared=shared)
        await bench.state(job, "succeeded")
        known = bench.models["m"].known
        assert known is not None and (known.batch_bytes([1.0], "sum") >= 50 * MIB) is raised


async def test_inputs_over_the_inline_limit_are_read(bench: Bench) -> None:
    """Jobs whose inputs are too large to travel with the claim reach the child whole."""
    job = await bench.submit(size=200_000)
    batch = await bench.batch()
    assert msgpack.unpackb(batch["jobs"][0][1]) == {"x": "y" * 200_000}
    bench.done(batch)
    await bench.state(job, "succeeded")


async def test_no_job_is_settled_before_its_last_events(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that ends while the events of another are on their way is not reported ahead of its own."""
    real: Call = cards.emit
    is_under_way, may_go_on = asyncio.Event(), asyncio.Event()
    taken: list[str] = []

    async def emit(*args: Any, job_id: str, **kwargs: Any) -> bool:
        is_under_way.set()
        await may_go_on.wait()
        if is_taken := bool(await real(*args, job_id=job_id, **kwargs)):
            taken.append(job_id)
        return is_taken

    monkeypatch.setattr(cards, "emit", emit)
    first = await bench.submit()
    first_batch = await bench.batch()
    second = await bench.submit()
    await until("the second job is at hand", lambda: bench.held.unreported == 2, patience_s=10)
    bench.last_piece(first_batch)
    bench.done(first_batch)
    await is_under_way.wait()
    second_batch = await bench.batch(2)
    bench.last_piece(second_batch)
    bench.done(second_batch)
    may_go_on.set()
    await bench.state(second, "succeeded")
    assert taken == [first, second]


async def test_a_batch_whose_end_is_not_understood_ends_by_its_clock(bench: Bench) -> None:
    """A child that answers fewer items than it was given is killed when the run has passed its limit: no job
    stays held for ever.
    """
    job_id = await bench.submit(run_timeout_ms=300)
    batch = await bench.batch()
    with pytest.raises(ValueError):
        bench.intake.on_done(
            {"batch": batch["batch"], "items": [], "run_ms": 1, "peak": 0, "shared": False, "buffers": 0}
        )
    await until("the child is to be killed", lambda: bool(bench.kills), patience_s=10)
    bench.intake.child_ended("killed", detail=bench.kills[0])
    await bench.state(job_id, "failed")
    await until("nothing is held", lambda: not bench.held.pairs, patience_s=10)
