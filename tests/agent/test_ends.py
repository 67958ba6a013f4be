"""Crashes, kills, cancels: what an agent does when something in its child ends. One agent for all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from gpu_agent.device.sim_card import Fault
from scheduler import admission, gateways, inventory, jobs
from tests.agent.harness import Agent, Caller, outputs
from tests.waiting import is_running, until


async def test_a_killed_child_is_replaced_and_its_jobs_run_again(rough: Caller, rough_agent: Agent) -> None:
    """kill -9 of the child: the running job and the ones at hand succeed in the spare, which need not
    measure its models again."""
    before = len(rough_agent.events("child_started"))
    spare = (await rough.logged(rough_agent, "spare_started"))["pid"]
    ids = [await rough.submit("sleeper", "0.6") for _ in range(4)]
    await rough.in_state(ids[0], "running")
    os.kill(rough_agent.child_pid, signal.SIGKILL)
    for job in ids:
        assert outputs(await rough.outcome(job)) == {"slept": "0.6"}
    assert len(rough_agent.events("child_started")) == before + 1
    assert rough_agent.child_pid == spare
    await rough.logged(rough_agent, "memory_back")
    loads = [(e["c0"], e["c1"]) for e in rough_agent.events("model_loaded") if e["model"] == "deaf"]
    assert len(loads) > 1 and len(set(loads)) == 1


async def test_a_job_that_kills_its_process_alone_twice_is_a_dead_letter(rough: Caller) -> None:
    """One that always crashes ends as `crashed` after at most three runs; its batch mates and the card
    survive it.
    """
    # Three children are started anew: slow where the machine has other things to do.
    patient: dict[str, Any] = {"max_wait_ms": 90_000, "total_timeout_ms": 120_000}
    blocker = await rough.submit("crasher", "slow:0.5")
    bad = await rough.submit("crasher", "die", **patient)
    good = await rough.submit("crasher", "fine", **patient)
    outcome = await rough.outcome(bad)
    assert outcome.code == "crashed" and outcome.attempts <= 3
    for job in (blocker, good):
        assert outputs(await rough.outcome(job))
    await rough.no_leases()


async def test_force_kills_a_run_that_does_not_listen(
    rough: Caller, rough_agent: Agent, tmp_path: Path
) -> None:
    """cancel --force ends a deaf run with its grandchildren, and the card serves again with another child."""
    before, kills = len(rough_agent.events("child_started")), len(rough_agent.events("child_killed"))
    pidfile = tmp_path / "grandchild"
    job = await rough.submit("forking", str(pidfile))
    await rough.in_state(job, "running")

    async def has_grandchild() -> bool:
        return pidfile.exists() and bool(pidfile.read_text())

    await until("the grandchild runs", has_grandchild)
    await admission.cancel(rough.store, job, force=True)
    assert (await rough.outcome(job)).state == "cancelled"
    await rough.logged(rough_agent, "child_killed", kills + 1)
    await rough.logged(rough_agent, "child_started", before + 1)
    assert not is_running(int(pidfile.read_text()))
    await rough.no_leases()


async def test_a_deaf_run_past_its_clock_is_killed_after_the_grace(rough: Caller, rough_agent: Agent) -> None:
    """A run that ignores its clock is run_timeout for the caller, and is killed; the one beside it goes
    back without a crash count and runs in a new child."""
    kills = len(rough_agent.events("child_killed"))
    beside = await rough.submit("sleeper", "2.0")
    await rough.in_state(beside, "running")
    assert (await rough.run("deaf", "60", run_timeout_ms=300)).code == "run_timeout"
    assert outputs(await rough.outcome(beside)) == {"slept": "2.0"}
    assert (await jobs.view(rough.store, beside)).crashes == 0
    assert len(rough_agent.events("child_killed")) == kills + 1


async def test_a_broken_context_is_found_and_treated_as_a_crash(rough: Caller, rough_agent: Agent) -> None:
    """An error that poisons the context ends the child, and the job runs again in a new one."""
    before = len(rough_agent.events("child_lost"))
    rough_agent.open_card().poison()
    assert outputs(await rough.run("echo", "after"))["text"] == "after"
    assert "broken" in (await rough.logged(rough_agent, "child_lost", before + 1))["reason"]


async def test_a_lost_session_is_no_crash(rough: Caller, rough_agent: Agent) -> None:
    """An agent that was stopped past its session cannot finish its old job; it registers anew, its models
    stay loaded, and the job runs again."""
    sessions, children = len(rough_agent.events("card_registered")), len(rough_agent.events("child_started"))
    job = await rough.submit("sleeper", "1.0")
    view = await rough.in_state(job, "running")
    rough_agent.process.send_signal(signal.SIGSTOP)

    async def reaped() -> bool:
        # Somebody has to look: agents and gateways sweep, and here is neither.
        await gateways.gateway_beat(rough.store, "w")
        return (await jobs.view(rough.store, job)).state == "queued"

    await until("the job was taken from the stopped agent", reaped)
    rough_agent.process.send_signal(signal.SIGCONT)
    assert outputs(await rough.outcome(job)) == {"slept": "1.0"}
    after = await jobs.view(rough.store, job)
    assert after.losses == 1 and after.crashes == 0 and after.lease_id != view.lease_id
    assert len(rough_agent.events("card_registered")) == sessions + 1
    assert len(rough_agent.events("child_started")) == children


async def test_strangers_shrink_what_is_granted(rough: Caller, rough_agent: Agent) -> None:
    """Foreign memory appears in the sample, nothing is granted over it, and when it vanishes the waiting
    job runs.
    """
    free = (await rough.card()).ledger.grantable
    with rough_agent.open_card().stranger(350 * 2**20):

        async def seen() -> bool:
            return (await rough.card()).ledger.foreign >= 350 * 2**20

        await until("the stranger is seen", seen)
        job = await rough.submit("echo", "big", mib=200.0)
        assert (await rough.card()).ledger.grantable < free - 340 * 2**20
        assert (await jobs.view(rough.store, job)).state == "queued"
    assert outputs(await rough.outcome(job))["text"] == "big"


async def test_a_hardware_xid_cordons_the_card(rough: Caller, rough_agent: Agent) -> None:
    """Xid 79 cordons the card with its reason; 31, a program's fault, does not."""
    card = rough_agent.open_card()
    card.raise_xid(31)
    await rough.logged(rough_agent, "xid")
    assert (await rough.card()).operator_state == "ready"
    card.raise_xid(79)

    async def cordoned() -> bool:
        view = await rough.card()
        return view.operator_state == "cordoned" and "79" in str(view.reason)

    await until("the card is cordoned", cordoned)
    await inventory.set_card_state(rough.store, (await rough.card()).id, "ready")


async def test_a_card_that_is_lost_is_down_until_it_is_found(rough: Caller, rough_agent: Agent) -> None:
    """A lost card is down with the driver's reason and its session goes on; found again, it serves with
    the same child.
    """
    children = len(rough_agent.events("child_started"))
    card = rough_agent.open_card()
    card.set_fault(Fault.LOST)

    async def down() -> bool:
        view = await rough.card()
        return view.state == "down" and "lost" in str(view.reason)

    await until("the card is down", down)
    card.set_fault(Fault.NONE)
    assert outputs(await rough.run("echo", "found"))["text"] == "found"
    assert len(rough_agent.events("child_started")) == children


async def test_a_driver_that_hangs_stops_grants_and_not_the_session(
    rough: Caller, rough_agent: Agent
) -> None:
    """While a driver call hangs there are beats without a sample: nothing is granted, nothing is lost."""
    sessions = len(rough_agent.events("card_registered"))
    card = rough_agent.open_card()
    card.set_fault(Fault.HANGING)

    async def stale() -> bool:
        view = await rough.card()
        return view.sample_age_ms is not None and view.sample_age_ms > 2_500

    await until("the sample is old", stale)
    job = await rough.submit("echo", "later")
    assert (await jobs.view(rough.store, job)).state == "queued"
    card.set_fault(Fault.NONE)
    assert outputs(await rough.outcome(job))["text"] == "later"
    assert len(rough_agent.events("card_registered")) == sessions
