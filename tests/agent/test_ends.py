"""Crashes, kills, drains, lost sessions: what an agent does when something ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from redis.exceptions import RedisError

from gpu_agent.device.simulated import SimulatedCard
from scheduler import admission, inventory, jobs
from scheduler.settings import load_settings
from scheduler.store import Store
from tests.agent.conftest import Start
from tests.agent.harness import Agent, Caller, is_running, outputs, until
from tests.conftest import TestServer


def open_card(agent: Agent) -> SimulatedCard:
    (path,) = (agent.folder / "host").glob("*.card")
    return SimulatedCard(path, index=0)


async def test_a_killed_child_is_replaced_and_its_jobs_run_again(
    own_caller: Caller, start_agent: Start
) -> None:
    """kill -9 of the child: the running job and the ones at hand succeed in the next child; nothing is
    counted twice.
    """
    agent = start_agent("Sleeper")
    await own_caller.ready("sleeper")
    ids = [await own_caller.submit("sleeper", "1.0") for _ in range(4)]
    await own_caller.in_state(ids[0], "running")
    os.kill(agent.child_pid, signal.SIGKILL)
    for job in ids:
        assert outputs(await own_caller.outcome(job)) == {"slept": "1.0"}
    assert len(agent.events("child_started")) == 2
    assert agent.events("memory_back")
    # The second child is told what the first measured: its load line is the same.
    first, second = agent.events("model_loaded")
    assert (first["c0"], first["c1"]) == (second["c0"], second["c1"])


async def test_a_job_that_kills_its_process_alone_twice_is_a_dead_letter(
    own_caller: Caller, start_agent: Start
) -> None:
    """One that always crashes ends as `crashed` after at most three runs; its batch mates and the card
    survive it.
    """
    start_agent("Crasher")
    await own_caller.ready("crasher")
    blocker = await own_caller.submit("crasher", "slow:0.5")
    bad = await own_caller.submit("crasher", "die")
    good = await own_caller.submit("crasher", "fine")
    outcome = await own_caller.outcome(bad)
    assert outcome.code == "crashed" and outcome.attempts <= 3
    for job in (blocker, good):
        assert outputs(await own_caller.outcome(job))
    await own_caller.no_leases()


async def test_force_kills_a_run_that_does_not_listen(
    own_caller: Caller, start_agent: Start, tmp_path: Path
) -> None:
    """cancel --force ends a deaf run with its grandchildren; the memory is back before the card is ready
    again.
    """
    agent = start_agent("Forking", "Echo")
    await own_caller.ready("forking", "echo")
    pidfile = tmp_path / "grandchild"
    job = await own_caller.submit("forking", str(pidfile))
    await own_caller.in_state(job, "running")

    async def has_grandchild() -> bool:
        return pidfile.exists() and bool(pidfile.read_text())

    await until("the grandchild runs", has_grandchild)
    beside = await own_caller.submit("echo", "x")
    await admission.cancel(own_caller.store, job, force=True)
    assert (await own_caller.outcome(job)).state == "cancelled"
    assert outputs(await own_caller.outcome(beside))["text"] == "x"
    await own_caller.no_leases()
    assert not is_running(int(pidfile.read_text()))
    assert len(agent.events("child_killed")) == 1
    assert len(agent.events("child_started")) == 2


async def test_a_deaf_run_past_its_clock_is_killed_after_the_grace(
    own_caller: Caller, start_agent: Start
) -> None:
    """A run that ignores its clock is run_timeout for the caller, and is killed; the next job runs in a
    new child.
    """
    agent = start_agent("Deaf")
    await own_caller.ready("deaf")
    assert (await own_caller.run("deaf", "60", run_timeout_ms=300)).code == "run_timeout"
    assert outputs(await own_caller.run("deaf", "0.01")) == {"slept": "0.01"}
    assert len(agent.events("child_killed")) == 1


async def test_a_broken_context_is_found_and_treated_as_a_crash(
    own_caller: Caller, start_agent: Start
) -> None:
    """An error that poisons the context ends the child; its job runs again in a new one. A lone error does
    not.
    """
    agent = start_agent("Sleeper", "Echo")
    await own_caller.ready("sleeper", "echo")
    job = await own_caller.submit("echo", "x", mib=2.0)
    outputs(await own_caller.outcome(job))
    open_card(agent).poison()
    assert outputs(await own_caller.run("echo", "after"))["text"] == "after"
    assert len(agent.events("child_started")) == 2
    assert "broken" in agent.events("child_lost")[0]["reason"]


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


async def test_kill_9_of_the_supervisor_takes_the_child_along(own_caller: Caller, start_agent: Start) -> None:
    """When the supervisor dies, so does its child; the next agent takes the card and runs what was lost."""
    agent = start_agent("Sleeper")
    await own_caller.ready("sleeper")
    job = await own_caller.submit("sleeper", "1.5")
    await own_caller.in_state(job, "running")
    child = agent.child_pid
    agent.process.kill()
    agent.process.wait()

    async def gone() -> bool:
        return not is_running(child)

    await until("the child is gone", gone, patience_s=5)
    start_agent("Sleeper", folder=agent.folder)
    assert outputs(await own_caller.outcome(job)) == {"slept": "1.5"}
    assert (await jobs.view(own_caller.store, job)).losses == 1


async def test_a_second_agent_for_a_card_is_refused(own_caller: Caller, start_agent: Start) -> None:
    """One agent per card and host: the second ends at once with one line that names the first."""
    agent = start_agent("Echo")
    await own_caller.ready("echo")
    second = start_agent("Echo", folder=agent.folder)
    assert await asyncio.to_thread(second.process.wait, 30) == 1
    assert str(agent.process.pid) in agent.events("agent_failed")[-1]["reason"]


async def test_a_lost_session_is_no_crash(
    own_caller: Caller, start_agent: Start, server: TestServer, pool: str
) -> None:
    """An agent that was stopped past its session cannot finish its old job; it registers anew, its models
    stay loaded, and the job runs again."""
    agent = start_agent("Sleeper")
    await own_caller.ready("sleeper")
    job = await own_caller.submit("sleeper", "1.0")
    view = await own_caller.in_state(job, "running")
    agent.process.send_signal(signal.SIGSTOP)
    # Somebody has to look: agents and gateways sweep, and here is neither.
    from scheduler import gateways

    async def reaped() -> bool:
        await gateways.gateway_beat(own_caller.store, "w")
        return (await jobs.view(own_caller.store, job)).state == "queued"

    await until("the job was taken from the stopped agent", reaped)
    agent.process.send_signal(signal.SIGCONT)
    assert outputs(await own_caller.outcome(job)) == {"slept": "1.0"}
    after = await jobs.view(own_caller.store, job)
    assert after.losses == 1 and after.crashes == 0 and after.lease_id != view.lease_id
    assert len(agent.events("card_registered")) == 2
    assert len(agent.events("child_started")) == 1


async def test_silence_of_redis_kills_no_child_and_loses_no_result(
    tmp_path: Path, own_server: TestServer
) -> None:
    """The server is gone while a job runs: the job ends in the same child, and is delivered when the
    server is back.
    """
    agent = Agent(
        tmp_path / "agent",
        redis_url=own_server.url,
        pool="silent",
        models={"sleeper": 'entrypoint = "models_plain.py:Sleeper"'},
    )
    try:
        store = await Store.connect(
            load_settings(redis_url=own_server.url, pool="silent", clocks={"session_s": 2.0, "beat_s": 0.4})
        )
        caller = Caller(store)
        await caller.ready("sleeper")
        job = await caller.submit("sleeper", "1.0")
        await caller.in_state(job, "running")
        await asyncio.sleep(0)
        own_server.kill()

        async def noticed() -> bool:
            return bool(agent.events("ledger_silent"))

        await until("the agent meets the silence", noticed)
        own_server.start()

        async def settled() -> bool:
            try:
                return await jobs.outcome(store, job) is not None
            except (RedisError, Exception):
                return False

        await until("the job settles", settled)
        assert outputs(await caller.outcome(job)) == {"slept": "1.0"}
        assert len(agent.events("child_started")) == 1
        await store.close()
    finally:
        agent.close()


async def test_strangers_shrink_what_is_granted_and_the_allocators_cap(
    own_caller: Caller, start_agent: Start
) -> None:
    """Foreign memory appears in the sample, nothing is granted over it, and when it vanishes the waiting
    job runs.
    """
    agent = start_agent("Echo")
    view = await own_caller.ready("echo")
    free = view.ledger.grantable
    with open_card(agent).stranger(400 * 2**20):

        async def seen() -> bool:
            return (await own_caller.card()).ledger.foreign >= 400 * 2**20

        await until("the stranger is seen", seen)
        job = await own_caller.submit("echo", "big", mib=200.0)
        assert (await own_caller.card()).ledger.grantable < free - 390 * 2**20
        assert (await jobs.view(own_caller.store, job)).state == "queued"
    assert outputs(await own_caller.outcome(job))["text"] == "big"


async def test_a_hardware_xid_cordons_the_card(own_caller: Caller, start_agent: Start) -> None:
    """Xid 79 cordons the card with its reason; 31, a program's fault, does not."""
    agent = start_agent("Echo")
    await own_caller.ready("echo")
    card = open_card(agent)
    card.raise_xid(31)

    async def logged() -> bool:
        return bool(agent.events("xid"))

    await until("Xid 31 is logged", logged)
    assert (await own_caller.card()).operator_state == "ready"
    card.raise_xid(79)

    async def cordoned() -> bool:
        return (await own_caller.card()).operator_state == "cordoned"

    await until("the card is cordoned", cordoned)
    await inventory.set_card_state(own_caller.store, (await own_caller.card()).id, "ready")


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


def test_what_cannot_start_says_so_in_one_line(tmp_path: Path) -> None:
    """No NVML, no such card, a typo in the configuration, a Redis that is not there: one line, and its
    exit status.
    """
    (tmp_path / "bad.toml").write_text("[agent]\ndrian_s = 3\n")
    cases = [
        (["--config", str(tmp_path / "bad.toml"), "--simulate", "1x512MiB"], 2, "drain_s"),
        (["--simulate", "2x512MiB", "--card", "box:7"], 3, "box:7"),
        (["--simulate", "2x512MiB"], 3, "--all"),
        (["--simulate", "two cards"], 2, "2x24GiB"),
    ]
    for arguments, status, word in cases:
        run = subprocess.run(
            [sys.executable, "-m", "gpu_agent", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "VRAMGATE_INTERNAL_HOST_DIR": str(tmp_path / "host")},
            timeout=60,
        )
        assert run.returncode == status, run.stderr
        assert run.stderr.count("\n") == 1 and word in run.stderr
