"""The child process by itself, spoken to as its supervisor does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gpu_agent.child_process import ChildFailed, ChildProcess, Setup, describe_exit
from gpu_agent.clock import ServerClock
from gpu_agent.device.simulated import SimSpec, create_cards
from gpu_agent.sampler import Sampler
from tests.agent.harness import MODELS_FILE
from tests.waiting import is_running, until

MIB = 2**20


def setup_of(folder: Path, *, watchdog_s: float = 30.0, **environment: str) -> Setup:
    (card,) = create_cards(SimSpec.parse("1x256MiB"), host_dir=folder)
    return Setup(
        environment=card.child_environment() | environment,
        directories=(MODELS_FILE.parent,),
        watchdog_s=watchdog_s,
        output_limit=MIB,
    )


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[ChildProcess]:
    """A child that has said hello, with a watchdog of two seconds."""
    started = await ChildProcess.start(setup_of(tmp_path, watchdog_s=2.0), on_message=lambda message: None)
    yield started
    started.kill()
    await started.ended()


async def test_a_child_that_hears_nothing_ends_itself(child: ChildProcess) -> None:
    """Without a message for the watchdog's time the kernel ends the child, whatever its threads do."""
    assert describe_exit(await asyncio.wait_for(child.ended(), 20)) == "signal 14 (SIGALRM)"


def test_a_message_to_a_child_whose_socket_has_ended_is_dropped() -> None:
    """A process that is being torn down has closed its socket and is not gone as yet: what is sent to it
    then must not end the agent, whose loop refuses to write there.
    """

    process = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, process_group=0)

    async def send_into_nothing() -> None:
        ours, theirs = socket.socketpair()
        memory, their_memory = socket.socketpair()
        child = ChildProcess(process, memory)
        with their_memory:
            await child._watch(ours)
            theirs.close()
            control = child._control
            assert control is not None
            await until("the end of the socket is seen", control.is_closing)
            for _ in range(3):
                await asyncio.sleep(0)
                child.send({"t": "ping"})
            assert child.is_alive
            child.kill()
            await child.ended()

    uvloop.run(send_into_nothing())


async def test_a_child_lives_on_messages_and_stops_when_told(tmp_path: Path) -> None:
    """Each message re-arms the watchdog; work that may hold the GIL extends it; `stop` ends the child with
    0.
    """
    started = await ChildProcess.start(setup_of(tmp_path, watchdog_s=1.0), on_message=lambda message: None)
    for _ in range(4):
        started.send({"t": "ping"})
        await asyncio.wait({asyncio.ensure_future(started.ended())}, timeout=0.5)
        assert started.is_alive
    started.send({"t": "ping", "busy_s": 30})
    await asyncio.wait({asyncio.ensure_future(started.ended())}, timeout=1.5)
    assert started.is_alive
    await started.stop()
    assert await started.ended() == 0


async def test_samples_read_own_driver_own(child: ChildProcess, tmp_path: Path) -> None:
    """A sample is stamped with Redis time, counts the child's context as its own, and strangers as
    neither.
    """
    (card,) = create_cards(SimSpec.parse("1x256MiB"), host_dir=tmp_path)
    clock = ServerClock()
    clock.hear(1_000_000)
    sampler = Sampler(card, clock, timeout_s=2.0)
    assert await sampler.take() is None
    assert child.hello is not None
    sampler.attach(child.memory, context=child.hello.context)
    with card.stranger(20 * MIB):
        sample = await sampler.take()
    assert sample is not None
    assert sample.own == child.hello.context and sample.used - sample.own == 20 * MIB
    assert sample.read_ms >= 1_000_000 and sample.total == 256 * MIB
    sampler.detach()
    assert await sampler.take() is None


async def test_a_child_without_its_card_says_so(tmp_path: Path) -> None:
    """A child that cannot open the card it is pinned to is one line, and no process is left."""
    (card,) = create_cards(SimSpec.parse("1x256MiB"), host_dir=tmp_path)
    pinned = json.loads(card.child_environment()["VRAMGATE_SIM"]) | {"uuid": "SIM-other-0"}
    with pytest.raises(ChildFailed, match="SIM-other-0") as caught:
        await ChildProcess.start(
            setup_of(tmp_path, VRAMGATE_SIM=json.dumps(pinned)), on_message=lambda message: None
        )
    assert "\n" not in caught.value.detail


def test_the_child_imports_nothing_of_ours_that_a_user_may_shadow(tmp_path: Path) -> None:
    """After its imports a child has no `scheduler` and no `gateway` of ours in its modules."""
    code = (
        "import sys; sys.path.append('.');"
        "import gpu_agent.child.main, gpu_agent.child.hosting, gpu_agent.device.torch_device;"
        "import gpu_agent.device.sim_torch;"
        "ours = {'scheduler', 'gateway', 'redis', 'fastapi'};"
        "print(sorted(n for n in sys.modules if n.split('.')[0] in ours))"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_supervisor_imports_no_torch() -> None:
    """The supervisor's process never loads torch: it would cost a CUDA context's worth of memory."""
    code = "import sys; import gpu_agent.main; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


PARENT = """
import asyncio, json, os, signal, sys
from pathlib import Path
from gpu_agent.child_process import ChildProcess, Setup
async def main():
    spec = json.loads(sys.argv[1])
    setup = Setup(spec["environment"], (Path("."),), 600.0, 1000)
    child = await ChildProcess.start(setup, on_message=lambda m: None)
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def test_a_child_dies_with_its_supervisor(tmp_path: Path) -> None:
    """kill -9 of the supervisor: the kernel ends the child at once, long before any watchdog."""
    environment: dict[str, Any] = dict(setup_of(tmp_path).environment)
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, json.dumps({"environment": environment}), stdout=subprocess.PIPE
    )
    output, _ = await run.communicate()
    assert run.returncode == -signal.SIGKILL
    pid = int(output)

    async def gone() -> bool:
        return not is_running(pid)

    await until("the child is gone", gone, patience_s=5)
    assert pid != os.getpid()
