"""`python -m gateway` as a process of its own, as operators start it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import until

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Service:
    """A running gateway and every line that it has logged."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    reading: asyncio.Task[None] = field(init=False)

    async def collect(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.lines.append(line.decode().rstrip())

    @property
    def url(self) -> str:
        found = re.search(r"gateway_listens address=(\S+)", "\n".join(self.lines))
        assert found is not None, self.lines
        return found[1]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def said(self, event: str) -> list[str]:
        return [line for line in self.lines if f" {event} " in f"{line} "]

    def workers(self) -> list[int]:
        """Pids of its worker processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    async def end(self, number: int = signal.SIGTERM, *, timeout_s: float = 20.0) -> int:
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), timeout_s)


async def start(*arguments: str, cwd: Path | None = None) -> Service:
    """Start; the caller waits for what it wants to see."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "gateway",
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    service = Service(process)
    service.reading = asyncio.create_task(service.collect())
    return service


@contextlib.asynccontextmanager
async def run_service(*arguments: str) -> AsyncIterator[Service]:
    """A gateway that listens; killed at the end where it has not ended by itself."""
    service = await start(*arguments)
    try:
        await until("the gateway listens", lambda: bool(service.said("gateway_listens")))
        yield service
    finally:
        if service.process.returncode is None:
            service.process.kill()
        await service.process.wait()


async def refused(*arguments: str, cwd: Path | None = None) -> tuple[int, str]:
    """Exit code and the whole of stderr of a gateway that does not start."""
    service = await start(*arguments, cwd=cwd)
    code = await asyncio.wait_for(service.process.wait(), 20)
    await service.reading
    return code, "\n".join(service.lines)
