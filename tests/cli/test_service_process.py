"""A service's process: kept running, drained, killed when it does not end, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.waiting import is_running, until
from vramgate.cli import service_process
from vramgate.cli.exits import Failure
from vramgate.cli.processes import descendants
from vramgate.cli.service_process import ServiceProcess

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
POLITE = """
import signal, sys, time
def end(*_):
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(60)
"""
REFUSING = "import sys; print('first', file=sys.stderr); sys.exit('port 1 is in use')"

OWNER = """
import asyncio, sys
from pathlib import Path
from vramgate.cli.service_process import ServiceProcess

async def main():
    service = ServiceProcess("it", [sys.executable, "-c", sys.argv[2]], log=Path(sys.argv[1]), say=print,
                             stop_timeout_s=5)
    await service.start()
    print(service.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@asynccontextmanager
async def running(
    source: str, tmp_path: Path, *, stop_timeout_s: float = 5.0
) -> AsyncIterator[tuple[ServiceProcess, list[str], Path]]:
    said: list[str] = []
    log = tmp_path / "service.log"
    service = ServiceProcess(
        "the service", [sys.executable, "-c", source], log=log, say=said.append, stop_timeout_s=stop_timeout_s
    )
    hurry = asyncio.Event()
    await service.start()
    try:
        yield service, said, log
    finally:
        hurry.set()
        await service.stop(hurry)
        assert service.pid is None


async def test_a_stop_lets_it_drain(tmp_path: Path) -> None:
    """SIGTERM comes first, and the process has time to end by itself."""
    async with running(POLITE, tmp_path) as (service, said, log):
        await until("it is ready", lambda: "ready" in log.read_text())
        await service.stop(asyncio.Event())
        assert service.last_words() == "drained" and not said


async def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """After its time it is killed, and that is said."""
    async with running(STUBBORN, tmp_path, stop_timeout_s=0.2) as (service, said, log):
        await until("it is ready", lambda: "ready" in log.read_text())
        pid = service.pid
        await service.stop(asyncio.Event())
        assert pid is not None and not is_running(pid) and "did not end in time" in said[0]


async def test_hurry_cuts_the_drain_short(tmp_path: Path) -> None:
    """A second Ctrl-C does not wait for the stop's time limit."""
    async with running(STUBBORN, tmp_path, stop_timeout_s=3600) as (service, _, log):
        await until("it is ready", lambda: "ready" in log.read_text())
        hurry = asyncio.Event()
        stopping = asyncio.create_task(service.stop(hurry))
        hurry.set()
        await asyncio.wait_for(stopping, 10)
        assert service.pid is None


async def test_a_process_that_dies_is_started_again_with_back_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each end is said with its status and its last line, and the pauses grow up to their bound."""
    monkeypatch.setattr(service_process, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(service_process, "LONGEST_BACKOFF_S", 0.02)
    async with running(REFUSING, tmp_path) as (service, said, _):
        service.keep_running()
        await until("it was started four times", lambda: service.starts >= 4)
    assert "status 1, again in 0.01 s: port 1 is in use" in said[0]
    assert "in 0.02 s" in said[1] and "in 0.02 s" in said[2]


async def test_an_end_at_the_start_is_a_failure_with_its_last_line(tmp_path: Path) -> None:
    """While a service starts for the first time, its end is the command's failure."""
    async with running(REFUSING, tmp_path) as (service, _, _log):
        await until("it has ended", lambda: service.pid is None)
        with pytest.raises(Failure, match="the service ended at the start: port 1 is in use"):
            service.refuse_end()


async def test_no_orphan_when_the_owner_is_killed(tmp_path: Path) -> None:
    """kill -9 of `up` drains its services: each gets SIGTERM from the kernel."""
    log = tmp_path / "log"
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        OWNER,
        str(log),
        POLITE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    await until("the service is ready", lambda: "ready" in log.read_text())
    assert pid in descendants(owner.pid)
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    await until("the service of a killed owner ends", lambda: not is_running(pid))
    assert log.read_text().splitlines()[-1] == "drained"
