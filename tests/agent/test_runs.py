"""What becomes of a job on a real agent with a simulated card."""

from __future__ import annotations

import asyncio
import collections

from scheduler import admission, jobs
from tests.agent.harness import Agent, Caller, outputs
from tests.waiting import until


async def test_a_job_runs_and_its_bytes_are_measured(caller: Caller) -> None:
    """A job comes back with its output, its peak is within its lease, and afterwards nothing is leased."""
    outcome = await caller.run("echo", "hi", mib=4.0)
    assert outputs(outcome) == {"text": "hi", "sum": 2**20, "batch": 1}
    assert 4 * 2**20 <= outcome.peak_bytes <= outcome.leased_bytes
    await caller.no_leases()
    assert (await caller.card()).ledger.jobs == 0


async def test_every_model_is_measured_at_load(caller: Caller, shared_agent: Agent) -> None:
    """Samples run in the same surroundings as jobs do: no model's profile fails, and Echo's slope is its
    true one.
    """
    assert [event["note"] for event in shared_agent.events("model_loaded") if "note" in event] == []
    hosted = await caller.hosted("echo")
    assert 2**20 <= hosted.c1 <= 1.1 * 2**20


async def test_waiting_jobs_are_batched_up_to_max_batch(caller: Caller) -> None:
    """Forty jobs at once all succeed, and some of them ran four together, never more."""
    ids = await asyncio.gather(*(caller.submit("echo", str(i)) for i in range(40)))
    answers = [outputs(await caller.outcome(i)) for i in ids]
    assert [a["text"] for a in answers] == [str(i) for i in range(40)]
    sizes = collections.Counter(a["batch"] for a in answers)
    assert max(sizes) == 4


async def test_every_kind_of_failure_has_its_code(caller: Caller) -> None:
    """What a model does wrong is told by its code, in one line, and the process goes on."""
    expected = {
        "nan": ("non_finite", "NaN"),
        "inf": ("non_finite", "output.deep[0].value"),
        "raise": ("model_error", "ValueError: the model is broken"),
        "input": ("rejected_by_model", "text: is not what I like"),
        "item": ("rejected_by_model", "text: only this one"),
        "surrogate": ("model_error", "ValueError: cannot open '/data/?.png'"),
        "input-surrogate": ("rejected_by_model", "te?xt: cannot open '?.png'"),
        "unspeakable": ("model_error", "Unspeakable: a Unspeakable that cannot be shown"),
        "key-surrogate": ("model_error", "output.? is a object"),
        "large": ("output_too_large", "bytes"),
        "object": ("model_error", "cannot be sent"),
    }
    outcomes = await asyncio.gather(*(caller.run("faulty", text) for text in expected))
    for (text, (code, detail)), outcome in zip(expected.items(), outcomes, strict=True):
        assert (outcome.code, outcome.state) == (code, "failed"), text
        assert outcome.detail is not None and detail in outcome.detail and "\n" not in outcome.detail, text
        at_fault = detail.partition(":")[0] if code == "rejected_by_model" else None
        assert outcome.data.get("field") == at_fault, text
    assert outputs(await caller.run("faulty", "tensor")) == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


async def test_a_failing_item_costs_its_batch_mates_nothing(caller: Caller) -> None:
    """Jobs that were batched with one that raises are answered."""
    texts = ["fine", "raise", "good", "input"] * 3
    outcomes = await asyncio.gather(*(caller.run("faulty", text) for text in texts))
    for text, outcome in zip(texts, outcomes, strict=True):
        if text in ("raise", "input"):
            assert outcome.code == {"raise": "model_error", "input": "rejected_by_model"}[text]
        else:
            assert outputs(outcome) == text


async def test_a_wrong_number_of_outputs_is_the_models_error(caller: Caller) -> None:
    """predict that answers with one output too few fails the job as model_error."""
    outcome = await caller.run("wronglength", "x")
    assert outcome.code == "model_error"
    assert "0 outputs for 1 items" in str(outcome.detail)


async def test_the_child_checks_inputs_and_units_again(caller: Caller) -> None:
    """An input that the schema's class refuses, or that counts more than was leased for, is
    rejected_by_model.
    """
    job = await caller.submit("echo", "x", mib=-1.0)
    assert (await caller.outcome(job)).code == "rejected_by_model"


async def test_out_of_memory_is_retried_alone_and_then_typed(caller: Caller) -> None:
    """A job that never fits ends as `oom` after one more run alone; one that fits alone succeeds; others
    are not hurt.
    """
    never = await caller.submit("hungry", "900")
    beside = [await caller.submit("hungry", "20") for _ in range(3)]
    outcome = await caller.outcome(never)
    assert (outcome.code, outcome.attempts) == ("oom", 2)
    for job in beside:
        assert outputs(await caller.outcome(job))["held"] >= 1
    # Together they would take 500 MiB of a card of 512: the batch halves until it fits.
    halved = await asyncio.gather(*(caller.run("hungry", "125") for _ in range(4)))
    assert all(outputs(o)["batch"] < 4 for o in halved)


async def test_what_was_seen_raises_the_estimate(caller: Caller) -> None:
    """A run that took more than its lease raises the published estimate, so that the next lease covers it."""
    await caller.run("hungry", "64", mib=2.0)

    async def raised() -> bool:
        hosted = await caller.hosted("hungry")
        return hosted.c0_item + hosted.c1 * 2.0 >= 64 * 2**20

    await until("the estimate covers what was seen", raised)


async def test_a_streamed_answer_is_emitted_and_joined(caller: Caller) -> None:
    """The chunks of a generator come as events in order, before the end, and together they are the answer."""
    job = await caller.submit("streamer", "one two three", wants_events=True)
    assert outputs(await caller.outcome(job)) == ["one", "two", "three"]
    events = [event for _, event in await jobs.read_events(caller.store, job)]
    assert [e["data"]["data"] for e in events if e["type"] == "output"] == ["one", "two", "three"]
    assert outputs(await caller.run("streamer", "single")) == "single"


async def test_a_stream_over_the_output_limit_is_ended(caller: Caller) -> None:
    """The pieces of an answer are bounded together: a generator without an end fails at the limit."""
    outcome = await caller.run("streamer", "endless")
    assert (outcome.state, outcome.code) == ("failed", "output_too_large")
    assert outputs(await caller.run("streamer", "single")) == "single"


async def test_pieces_of_an_answer_are_kept_for_those_who_may_listen(caller: Caller) -> None:
    """A caller who waits for the answer alone has no output events written; of an asynchronous job they are
    kept, for a listener who comes later. The answer is the same.
    """
    for is_async, pieces in ((False, 0), (True, 3)):
        job = await caller.submit("streamer", "one two three", is_async=is_async)
        assert outputs(await caller.outcome(job)) == ["one", "two", "three"]
        events = [event for _, event in await jobs.read_events(caller.store, job)]
        assert len([event for event in events if event["type"] == "output"]) == pieces


async def test_progress_reaches_the_events(caller: Caller) -> None:
    """ctx.progress of a watched job is written to its events."""
    job = await caller.submit("sleeper", "0.6", wants_events=True)

    async def progress() -> bool:
        events = await jobs.read_events(caller.store, job)
        return any(e["type"] == "progress" and e["data"]["total"] == 30 for _, e in events)

    await until("progress was seen", progress)
    outputs(await caller.outcome(job))


async def test_a_cancelled_run_stops_at_its_next_step(caller: Caller, shared_agent: Agent) -> None:
    """A cancel ends a run that listens, its bytes return, and the child lives on."""
    child = shared_agent.child_pid
    job = await caller.submit("sleeper", "30")
    await caller.in_state(job, "running")
    await admission.cancel(caller.store, job)
    assert (await caller.outcome(job)).state == "cancelled"
    await caller.no_leases()
    assert shared_agent.child_pid == child


async def test_a_cancelled_item_costs_its_batch_mate_nothing(caller: Caller) -> None:
    """Of two jobs in one batch, the one that is cancelled is cancelled and the other gets its answer."""
    first = await caller.submit("sleeper", "1.0")
    await caller.in_state(first, "running")
    pair = [await caller.submit("sleeper", "1.5") for _ in range(2)]
    await caller.in_state(pair[1], "running")
    await admission.cancel(caller.store, pair[0])
    assert outputs(await caller.outcome(first)) and outputs(await caller.outcome(pair[1]))
    assert (await caller.outcome(pair[0])).state == "cancelled"


async def test_a_run_past_its_clock_ends_on_the_card(caller: Caller) -> None:
    """A run over its limit is settled as run_timeout, and its lease ends soon after."""
    outcome = await caller.run("sleeper", "20", run_timeout_ms=300)
    assert outcome.code == "run_timeout"
    await caller.no_leases()


async def test_input_buffers_are_kept_and_padded(caller: Caller) -> None:
    """ctx.tensor gives zero-padded views, and what the buffers keep is part of the resident bytes."""
    for text in ("abc", "zz"):
        assert outputs(await caller.run("buffered", text)) == {"sum": sum(text.encode()), "padding": 0}
    hosted = await caller.hosted("buffered")
    assert hosted.resident_bytes > 8 * 2**20


async def test_what_a_model_prints_is_captured(caller: Caller, shared_agent: Agent) -> None:
    """A model's stdout becomes log events of the agent."""
    await caller.run("faulty", "print")

    async def logged() -> bool:
        return any(e["text"] == "hello from the model" for e in shared_agent.events("model_output"))

    await until("the line is in the log", logged)


async def test_large_inputs_and_results_go_by_reference(caller: Caller) -> None:
    """A text of 300 KiB arrives at the model and comes back whole."""
    text = "x" * 300_000
    assert outputs(await caller.run("faulty", text)) == text


async def test_lanes_run_at_the_same_time(caller: Caller) -> None:
    """A model with two lanes runs two jobs at once; a peak that both had a part in is not shown as
    either's own.
    """
    outcomes = await asyncio.gather(*(caller.run("laned", "wait") for _ in range(2)))
    assert [outputs(o)["seen"] for o in outcomes] == [2, 2]
    assert [o.peak_bytes for o in outcomes] == [0, 0]
    assert outputs(await caller.run("laned", "alone"))["seen"] == 1
