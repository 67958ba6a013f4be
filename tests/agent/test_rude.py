"""Models that raise what is no Exception, publish what cannot be sent, or end their process."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.settings import load_settings
from scheduler.store import Store
from scheduler.submissions import Outcome
from tests.agent.conftest import Start
from tests.agent.harness import Agent, Caller, outputs
from tests.conftest import TestServer
from tests.invariants import check_pool
from tests.waiting import until

MODELS_FILE = Path(__file__).parent / "models_rude.py"
SERVING = ("Rude", "Flowing", "ExitsAtSample", "ExitsAtSecondSample", "ExitsAtUnload", "Calm")
FAILING = {
    "ExitsAtLoad": "there is no licence",
    "ExitsAtBytes": "it does not say",
    "ExitingSchema": "it has no schema",
    "HugeNumber": "input.examples[0].n",
    "SetInside": "examples is a set",
    "NumberedKey": "examples[0] has the key 1",
    "Surrogate": "description",
    "BytesInside": "examples[0] is a bytes",
    "NanDefault": "properties.value.default is nan",
    "Interrupting": "KeyboardInterrupt: at import",
    "Hollow": "SystemExit: nothing by that name",
}
LEAVING: dict[str, tuple[str, str]] = {
    "validate:SystemExit": ("model_error", "SystemExit: it wants to leave (models_rude.py"),
    "validate:KeyboardInterrupt": ("model_error", "KeyboardInterrupt"),
    "validate:ValueError": ("rejected_by_model", "text: Value error, it wants to leave"),
    "units:SystemExit": ("model_error", "SystemExit"),
    "units:GeneratorExit": ("model_error", "GeneratorExit"),
    "predict:SystemExit": ("model_error", "SystemExit"),
    "predict:KeyboardInterrupt": ("model_error", "KeyboardInterrupt"),
    "predict:GeneratorExit": ("model_error", "GeneratorExit"),
    "return:2": ("model_error", "SystemExit: 2"),
    "send:": ("model_error", "SystemExit: 5"),
    "progress:": ("model_error", "SystemExit: 4"),
    "recurse:": ("model_error", "RecursionError"),
    "memory:": ("model_error", "MemoryError: the host has no memory"),
}
INTERRUPTING = "raise KeyboardInterrupt('at import')\n"
HOLLOW = "import sys\n\ndef __getattr__(name):\n    sys.exit('nothing by that name')\n"


def entries() -> dict[str, str]:
    files = {"Interrupting": "interrupting.py", "Hollow": "hollow.py"}
    names = (*FAILING, *SERVING)
    return {name.lower(): f'entrypoint = "{files.get(name, "models_rude.py")}:{name}"' for name in names}


@pytest.fixture(scope="module")
def rude_pool() -> str:
    return "u" + secrets.token_hex(6)


@pytest.fixture(scope="module")
def rude_agent(
    server: TestServer, rude_pool: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Agent]:
    """One agent with models that all want to end its child."""
    folder = tmp_path_factory.mktemp("rude")
    shutil.copy(MODELS_FILE, folder)
    (folder / "interrupting.py").write_text(INTERRUPTING)
    (folder / "hollow.py").write_text(HOLLOW)
    agent = Agent(folder, redis_url=server.url, pool=rude_pool, models=entries())
    yield agent
    agent.close()
    agent.check_no_orphans()
    assert any("it will not let go" in event["text"] for event in agent.events("model_log"))


@pytest.fixture
async def rude(server: TestServer, rude_pool: str, rude_agent: Agent) -> AsyncIterator[Caller]:
    clocks = {"session_s": 2.0, "beat_s": 0.4, "abandon_grace_s": 2.0}
    store = await Store.connect(load_settings(redis_url=server.url, pool=rude_pool, clocks=clocks))
    try:
        caller = Caller(store)
        await caller.ready(*(name.lower() for name in SERVING))
        yield caller
        await check_pool(store)
    finally:
        await store.close()


async def test_a_load_that_leaves_or_cannot_be_published_costs_nobody_else(
    rude: Caller, rude_agent: Agent
) -> None:
    """Each has its reason in one line; the others on the card are served by the first child."""

    async def says_why(name: str) -> str | None:
        # While it is tried again it has no reason.
        reason = (await rude.hosted(name.lower())).reason or ""
        return reason if FAILING[name] in reason else None

    for name in FAILING:
        assert "\n" not in await until(f"{name} says why", lambda name=name: says_why(name), patience_s=20)  # type: ignore[misc]
    assert {m.name for m in (await rude.card()).models if m.ready} == {name.lower() for name in SERVING}
    notes = {e["model"]: e["note"] for e in rude_agent.events("model_loaded") if e.get("note")}
    assert "there is no sample" in notes["exitsatsample"]
    assert "there is no larger sample" in notes["exitsatsecondsample"]
    assert outputs(await rude.run("exitsatsample")) == 1
    assert len(rude_agent.events("child_started")) == 1


async def test_what_wants_to_end_the_process_fails_its_item_alone(rude: Caller, rude_agent: Agent) -> None:
    """The item fails with its reason, its batch mates are answered, and the child lives on."""
    await rude.submit("rude", "slow:0.3")
    pairs = [(await rude.submit("rude", text), await rude.submit("rude", "fine")) for text in LEAVING]
    for (text, (code, part)), (job, mate) in zip(LEAVING.items(), pairs, strict=True):
        outcome = await rude.outcome(job)
        assert (outcome.code, outcome.attempts) == (code, 1) and part in str(outcome.detail), (text, outcome)
        outcome = await rude.outcome(mate)
        assert outputs(outcome) and outcome.attempts == 1
    assert len(rude_agent.events("child_started")) == 1


@pytest.mark.parametrize("text", ["drop:", "thread:", "interrupt:", "fork:"])
async def test_what_only_seems_to_leave_is_answered(rude: Caller, rude_agent: Agent, text: str) -> None:
    """An end in `__del__`, in a thread, in a forked process, or an interrupt of the main thread, is nobody
    else's.
    """
    assert outputs(await rude.run("rude", text)) == 1
    assert len(rude_agent.events("child_started")) == 1


@pytest.mark.parametrize(
    ("text", "part"), [("next", "SystemExit: 6"), ("close", "SystemExit: 7"), ("piece", "SystemExit: 5")]
)
async def test_a_generator_that_leaves_ends_no_lane(
    rude: Caller, rude_agent: Agent, text: str, part: str
) -> None:
    """At next, at its end, or in one item's piece: that run fails, and the lane takes the next one."""
    failed = await rude.run("flowing", text)
    assert failed.code == "model_error" and part in str(failed.detail)
    assert outputs(await rude.run("flowing", "fine")) == [1, 2]
    assert len(rude_agent.events("child_started")) == 1


async def test_a_piece_that_cannot_be_sent_fails_its_item_alone(rude: Caller, rude_agent: Agent) -> None:
    """Also where others of its batch have streamed already, so that nothing of it can be run again."""
    mates = await _together(rude, "flowing", "piece")
    assert [outputs(mate) for mate in mates[1:]] == [[1, 2]] * 2
    assert mates[0].code == "model_error" and "SystemExit: 5" in str(mates[0].detail)
    assert len(rude_agent.events("child_started")) == 1


@pytest.mark.parametrize("text", ["kill:", "shout:"])
async def test_leaving_the_process_is_a_crash(
    own_caller: Caller, start_agent: Start, tmp_path: Path, text: str
) -> None:
    """os._exit ends the child, with status 0 too, and so does what breaks its line to the supervisor: the job
    runs again alone and fails as crashed after at most three runs; its batch mates succeed.
    """
    folder = tmp_path / "agent"
    folder.mkdir()
    shutil.copy(MODELS_FILE, folder)
    start_agent(folder=folder, models={"rude": 'entrypoint = "models_rude.py:Rude"'})
    await own_caller.ready("rude")
    bad, *mates = await _together(own_caller, "rude", text)
    assert bad.code == "crashed" and bad.attempts <= 3
    for mate in mates:
        assert outputs(mate)


async def _together(caller: Caller, model: str, text: str) -> list[Outcome]:
    """The outcome of `text` and of two that it shared a batch with, behind one that held the lane."""
    blocker = await caller.submit(model, "slow" if model == "flowing" else "slow:0.3")
    # A child takes long to start on a machine that has other things to do, and some of these end it.
    patient: dict[str, Any] = {"max_wait_ms": 90_000, "total_timeout_ms": 120_000}
    ids = [await caller.submit(model, each, **patient) for each in (text, "fine", "fine")]
    assert outputs(await caller.outcome(blocker))
    return [await caller.outcome(job) for job in ids]
