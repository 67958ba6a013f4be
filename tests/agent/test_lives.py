"""From an agent's start to its end: loading, draining, dying, and what cannot start at all."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler import admission, gateways, inventory, jobs
from scheduler.settings import load_settings
from scheduler.store import Store
from tests.agent.conftest import Start
from tests.agent.harness import AGENT, Agent, Caller, outputs
from tests.conftest import TestServer
from tests.waiting import is_running, until
from vramgate.errors import StoreUnavailable

SHADOWING = """
import vramgate, scheduler, gateway
class Shadowing(vramgate.Model):
    max_batch = 1
    def load(self, ctx): pass
    def predict(self, batch, ctx): return [scheduler.WHOSE + gateway.WHOSE]
    def sample(self, units): return {}
"""


FATAL = """
import os, pathlib, signal
import vramgate
TRIED = pathlib.Path(__file__).with_suffix(".tried")
class Fatal(vramgate.Model):
    def load(self, ctx):
        if not TRIED.exists():
            TRIED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    def predict(self, batch, ctx): return ["at last"]
    def sample(self, units): return {}
"""


async def test_models_that_cannot_be_served_say_why(
    own_caller: Caller, start_agent: Start, tmp_path: Path
) -> None:
    """Each model that fails has its reason in one line and costs the others nothing; a directory with its own
    scheduler.py and gateway/ is served."""
    folder = tmp_path / "agent"
    (folder / "gateway").mkdir(parents=True)
    (folder / "gateway" / "__init__.py").write_text("WHOSE = 'theirs'\n")
    (folder / "scheduler.py").write_text("WHOSE = 'user'\n")
    (folder / "shadowing.py").write_text(SHADOWING)
    (folder / "broken.py").write_text("import vramgate\n\nclass Broken(vramgate.Model:\n")
    entries = {
        "echo": "models_plain.py:Echo",
        "heavy": "models_plain:Heavy",
        "second": "models_plain.py:Heavy",
        "big": "models_plain.py:TooBig",
        "noload": "models_plain.py:NoLoad",
        "hungrier": "models_plain.py:Kept",
        "missing": "nowhere.py:Thing",
        "broken": "broken:Broken",
        "noclass": "models_plain.py:Nothing",
        "nomodel": "models_plain.py:Text",
        "shadowing": "shadowing.py:Shadowing",
    }
    models = {name: f'entrypoint = "{entry}"' for name, entry in entries.items()}
    start_agent(folder=folder, models=models)
    await own_caller.ready("echo", "heavy", "shadowing")
    reasons = {m.name: m.reason for m in (await own_caller.card()).models if not m.ready}
    expected = {
        "second": "does not fit into",
        "big": "declared to take 100 GiB",
        "noload": "there are no weights",
        "hungrier": "its smallest input does not fit",
        "missing": "there is no file nowhere.py",
        "broken": "SyntaxError",
        "noclass": "has no Nothing",
        "nomodel": "no subclass of vramgate.Model",
    }
    assert reasons.keys() == expected.keys()
    for name, part in expected.items():
        reason = str(reasons[name])
        assert part in reason and "\n" not in reason, reason
    # What did not fit has left nothing behind: 8 MiB of Echo and 300 of Heavy are all that is allocated.
    sample = (await own_caller.card()).sample
    assert sample is not None and sample.allocated <= 320 * 2**20
    assert outputs(await own_caller.run("shadowing")) == "usertheirs"
    assert outputs(await own_caller.run("echo", "x"))["text"] == "x"


async def test_loads_that_kill_their_process_are_tried_again_later(
    own_caller: Caller, start_agent: Start, tmp_path: Path
) -> None:
    """The next child serves the other models; those at fault say when their next try is, and are served once
    one succeeds. However many there are, the card pauses for none of them.
    """
    folder = tmp_path / "agent"
    folder.mkdir()
    fatal = ("first", "second", "third")
    models = {}
    for name in fatal:
        (folder / f"{name}.py").write_text(FATAL)
        models[name] = f'entrypoint = "{name}.py:Fatal"'
    models["echo"] = 'entrypoint = "models_plain.py:Echo"'
    agent = start_agent(folder=folder, models=models)
    await own_caller.ready("echo")
    failed = {event["model"]: event["reason"] for event in agent.events("model_failed")}
    assert failed.keys() == set(fatal)
    for reason in failed.values():
        assert "SIGKILL" in reason and "during its load (tried again at " in reason
    await own_caller.ready("echo", *fatal)
    for name in fatal:
        assert outputs(await own_caller.run(name)) == "at last"
    assert len(agent.events("child_lost")) == len(fatal)
    assert not agent.events("child_backoff")


async def test_concurrency_one_is_plain_one_at_a_time(own_caller: Caller, start_agent: Start) -> None:
    """`concurrency = 1`: at most one lease of the model at a time, and no batches."""
    start_agent(models={"echo": 'entrypoint = "models_plain.py:Echo"\nconcurrency = 1'})
    view = await own_caller.ready("echo")
    assert (view.slots, view.models[0].slots, view.models[0].max_batch) == (1, 1, 1)
    ids = [await own_caller.submit("echo", str(i)) for i in range(6)]
    assert [outputs(await own_caller.outcome(i))["batch"] for i in ids] == [1] * 6


async def test_sigterm_drains(own_caller: Caller, start_agent: Start) -> None:
    """On SIGTERM what runs is finished, what waits is given back and runs elsewhere, and the exit status
    is 0.
    """
    agent = start_agent("Sleeper")
    await own_caller.ready("sleeper")
    ids = [await own_caller.submit("sleeper", "1.0") for _ in range(4)]
    await own_caller.in_state(ids[0], "running")
    assert await asyncio.to_thread(agent.stop) == 0
    assert outputs(await own_caller.outcome(ids[0])) == {"slept": "1.0"}
    view = await jobs.view(own_caller.store, ids[3])
    assert view.state == "queued" and view.crashes == 0 and view.losses == 0
    assert not await inventory.leases(own_caller.store)
    for job in ids[1:]:
        await admission.cancel(own_caller.store, job)


async def test_the_configured_headroom_is_left_free(own_caller: Caller, start_agent: Start) -> None:
    """`agent.headroom` wins over the card's own default."""
    start_agent(agent='headroom = "100MiB"\n')

    async def registered() -> bool:
        return bool(await inventory.cards(own_caller.store))

    await until("the card is known", registered)
    assert (await own_caller.card()).headroom == 100 * 2**20


async def test_a_drain_ends_at_its_bound(own_caller: Caller, start_agent: Start) -> None:
    """A run that outlasts drain_s is cut off and goes back without a crash count; the agent still ends
    with 0.
    """
    agent = start_agent("Deaf", agent="drain_s = 0.2\n")
    await own_caller.ready("deaf")
    job = await own_caller.submit("deaf", "60")
    await own_caller.in_state(job, "running")
    assert await asyncio.to_thread(agent.stop) == 0
    view = await jobs.view(own_caller.store, job)
    assert (view.state, view.crashes, view.losses) == ("queued", 0, 0)
    await admission.cancel(own_caller.store, job)


async def test_kill_9_of_the_supervisor_takes_the_child_along(own_caller: Caller, start_agent: Start) -> None:
    """When the supervisor dies, so does its child; a second agent is refused before that, and takes the
    card after.
    """
    agent = start_agent("Sleeper")
    await own_caller.ready("sleeper")
    second = start_agent("Sleeper", folder=agent.folder)
    assert await asyncio.to_thread(second.process.wait, 30) == 1
    assert str(agent.process.pid) in agent.events("agent_failed")[-1]["reason"]
    job = await own_caller.submit("sleeper", "1.0")
    await own_caller.in_state(job, "running")
    child = agent.child_pid
    agent.process.kill()
    agent.process.wait()

    async def gone() -> bool:
        return not is_running(child)

    await until("the child is gone", gone, patience_s=5)
    start_agent("Sleeper", folder=agent.folder)
    assert outputs(await own_caller.outcome(job)) == {"slept": "1.0"}
    assert (await jobs.view(own_caller.store, job)).losses == 1


async def test_silence_of_redis_kills_no_child_and_loses_no_result(
    tmp_path: Path, own_server: TestServer
) -> None:
    """The server is gone while a job runs, longer than a session: the job ends in the same child, whose
    models stay loaded, and has one answer when the server is back."""
    agent = Agent(
        tmp_path / "agent",
        redis_url=own_server.url,
        pool="silent",
        models={"sleeper": 'entrypoint = "models_plain.py:Sleeper"'},
    )
    settings = load_settings(
        redis_url=own_server.url, pool="silent", clocks={"session_s": 2.0, "beat_s": 0.4}
    )
    store = await Store.connect(settings)
    try:
        caller = Caller(store)
        await caller.ready("sleeper")
        job = await caller.submit("sleeper", "1.0")
        await caller.in_state(job, "running")
        own_server.kill()
        await caller.logged(agent, "ledger_silent")
        own_server.start()

        async def settled() -> bool:
            try:
                await gateways.gateway_beat(store, "w")
                return await jobs.outcome(store, job) is not None
            except StoreUnavailable:
                return False

        await until("the job settles", settled)
        assert outputs(await caller.outcome(job)) == {"slept": "1.0"}
        assert len(agent.events("child_started")) == 1
        # A stop does not wait for a server that is gone.
        own_server.kill()
        assert await asyncio.to_thread(agent.stop) == 0
    finally:
        await store.close()
        agent.close()


async def test_memory_that_does_not_come_back_cordons_the_card(
    own_caller: Caller, start_agent: Start
) -> None:
    """A killed child whose memory stays used past the bound cordons the card; it serves again when it is
    back.
    """
    agent = start_agent(
        "Echo",
        simulate="1x512MiB,delay_ms=4000,processes=off",
        agent="release_timeout_s = 1\ncancel_grace_s = 0.5\n",
    )
    await own_caller.ready("echo")
    os.kill(agent.child_pid, signal.SIGKILL)

    async def cordoned() -> bool:
        return (await own_caller.card()).operator_state == "cordoned"

    await until("the card is cordoned", cordoned)
    assert agent.events("card_cordoned")
    await inventory.set_card_state(own_caller.store, (await own_caller.card()).id, "ready")
    await own_caller.ready("echo")
    assert outputs(await own_caller.run("echo", "again"))["text"] == "again"


async def test_all_runs_one_agent_per_card_and_starts_it_again(
    own_caller: Caller, start_agent: Start
) -> None:
    """`--all`: both cards serve; kill -9 of one agent takes nothing from the other, and it is started
    again.
    """
    fleet = start_agent("Echo", simulate="2x256MiB", arguments=("--all",))

    async def both_ready() -> bool:
        found = await inventory.cards(own_caller.store)
        return len(found) == 2 and all(c.state == "ready" and c.models for c in found)

    await until("both cards are ready", both_ready)
    pids = _children(fleet.process.pid)
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGKILL)
    await own_caller.logged(fleet, "agent_ended")
    await until("both cards are ready again", both_ready)
    assert await asyncio.to_thread(fleet.stop) == 0
    assert not any(is_running(pid) for pid in pids)


async def test_kill_9_of_a_fleet_ends_its_agents(own_caller: Caller, start_agent: Start) -> None:
    """Agents that nobody would watch any more drain and end by themselves."""
    fleet = start_agent(simulate="2x256MiB", arguments=("--all",))

    async def both_registered() -> bool:
        return len(await inventory.cards(own_caller.store)) == 2

    await until("both cards are registered", both_registered)
    pids = _children(fleet.process.pid)
    fleet.process.kill()
    fleet.process.wait()

    async def all_gone() -> bool:
        return not any(map(is_running, pids))

    await until("the agents have ended", all_gone)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["--config", "bad.toml", "--simulate", "1x512MiB"], 2, "drain_s"),
        (["--simulate", "2x512MiB", "--card", "box:7"], 3, "box:7"),
        (["--simulate", "2x512MiB"], 3, "--all"),
        (["--simulate", "two cards"], 2, "2x24GiB"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(
    tmp_path: Path, arguments: list[str], status: int, word: str
) -> None:
    """A typo in the configuration, no such card, several cards and no choice: one line, and its exit
    status.
    """
    (tmp_path / "bad.toml").write_text("[agent]\ndrian_s = 3\n")
    run = subprocess.run(
        [sys.executable, "-m", "gpu_agent", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "VRAMGATE_INTERNAL_HOST_DIR": str(tmp_path / "host")},
        timeout=60,
    )
    assert run.returncode == status, run.stderr
    assert run.stderr.count("\n") == 1 and word in run.stderr


def test_a_folder_that_shadows_our_packages_is_named(tmp_path: Path) -> None:
    """Started from a folder with its own scheduler.py, the agent says in one line what shadows it."""
    (tmp_path / "scheduler.py").write_text("WHOSE = 'user'\n")
    run = subprocess.run(
        [sys.executable, "-m", "gpu_agent", "--simulate", "1x512MiB"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert str(tmp_path / "scheduler.py") in run.stderr


async def test_a_child_that_hangs_at_nothing_is_replaced(own_caller: Caller, start_agent: Start) -> None:
    """A stopped idle child answers for no memory and runs nothing: within the watchdog it is ended, and the
    card
    serves again; a child that runs a long job is left alone meanwhile.
    """
    agent = start_agent("Sleeper", agent=f"{AGENT}watchdog_s = 5\n")
    await own_caller.ready("sleeper")
    assert outputs(await own_caller.run("sleeper", "6")) == {"slept": "6"}
    first = agent.child_pid
    os.kill(first, signal.SIGSTOP)
    await own_caller.logged(agent, "child_killed")
    assert "has not answered" in agent.events("child_killed")[0]["reason"]
    await own_caller.ready("sleeper")
    assert agent.child_pid != first and not is_running(first)
    assert outputs(await own_caller.run("sleeper", "0.1")) == {"slept": "0.1"}
    assert len(agent.events("child_killed")) == 1
