"""A box brought up and ended: order, restarts, data that stay, and nothing left behind.

Server and gateways are the real ones; the agent is one without torch. tests/cli/test_up.py runs the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler import admission, inventory, jobs
from scheduler.embedded import free_port
from scheduler.store import Store
from tests.ledger.fake_agent import request
from tests.waiting import until
from vramgate.cli import stack as stack_module
from vramgate.cli import upfile
from vramgate.cli.exits import Failure
from vramgate.cli.main import main
from vramgate.cli.processes import descendants
from vramgate.cli.stack import Plan, Stack

ROOT = Path(__file__).parents[2]


class Started:
    """The processes below this one that a test started: other tests of the session have theirs, and go on
    starting some.
    """

    def __init__(self) -> None:
        self._others = set(self._children())

    def __iter__(self) -> Iterator[int]:
        for child in self._children():
            if child not in self._others:
                yield child
                yield from descendants(child)

    def named(self, name: str) -> int:
        """The first whose command line holds `name`, parents before their children."""
        return next(pid for pid in self if name in Path(f"/proc/{pid}/cmdline").read_text())

    def _children(self) -> Iterator[int]:
        for thread in Path("/proc/self/task").glob("*"):
            with contextlib.suppress(OSError):
                yield from map(int, (thread / "children").read_text().split())


@pytest.fixture(autouse=True)
def started() -> Iterator[Started]:
    """No process that a test started is there after it."""
    found = Started()
    yield found
    assert list(found) == []


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> Plan:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def stub(settings: Any, **_: Any) -> list[str]:
        command = [sys.executable, str(Path(__file__).with_name("stub_agent.py")), "--all"]
        return [*command, "--redis", settings.redis_url, "--pool", settings.pool]

    monkeypatch.setattr(stack_module, "agent_command", stub)
    return Plan(config=None, simulate="1x512MiB", gateways=1, port=unused_tcp_port)


@pytest.fixture
def unused_tcp_port() -> int:
    return free_port()


async def ended(stack: Stack) -> None:
    """Stop it, and see that the file for other commands is gone."""
    await stack.stop()
    assert upfile.read(stack.data_dir) is None


async def is_ready(stack: Stack) -> bool:
    """Its first gateway answers, reaches the ledger, and knows a ready card."""
    async with httpx.AsyncClient(timeout=5) as http:
        try:
            return (await http.get(f"{stack.urls[0]}/readyz")).status_code == 200
        except httpx.RequestError:
            return False


async def test_another_gateway_on_the_port_is_not_taken_for_ours(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that somebody took after it was checked: the start fails, though a stranger answers there."""
    monkeypatch.setattr(stack_module, "check_ports", lambda host, ports: None)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    stack = Stack(plan, say=lambda line: None)
    async with await asyncio.start_server(answer, "127.0.0.1", plan.port):
        try:
            with pytest.raises(Failure, match=f"cannot listen on 127.0.0.1:{plan.port}"):
                await stack.start()
        finally:
            await ended(stack)


async def test_up_serves_and_ends_in_order(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what runs where, leaves that for other commands, and ends gateways, agents and server, in this
    order.
    """
    said: list[str] = []
    stack = Stack(plan, say=said.append)
    try:
        await stack.start()
        assert said[0].startswith("ledger   redis://127.0.0.1:")
        assert said[1:3] == ["logs     .vramgate/logs", f"gateway  {stack.urls[0]}"]
        running = upfile.read(stack.data_dir)
        assert running is not None and running.gateways == stack.urls and running.pid == os.getpid()
        await until("the gateway has seen the card", lambda: is_ready(stack))
        # No option is needed in this directory: commands find what `up` left.
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["infer", "echo", '{"x": 1}']) == 0
        assert json.loads(capsys.readouterr().out) == "ok"
        assert await asyncio.to_thread(main, ["models", "--json"]) == 0
        async with httpx.AsyncClient() as http:
            over_http = (await http.get(f"{stack.urls[0]}/v1/models")).json()
        assert json.loads(capsys.readouterr().out) == over_http
        assert await asyncio.to_thread(main, ["infer", "nothing", "{}"]) == 3
        assert "nothing" in capsys.readouterr().err
        with pytest.raises(Failure, match=r"cannot be used|another"):
            await Stack(plan, say=said.append).start()
    finally:
        await ended(stack)
    logs = stack.data_dir / "logs"
    assert (logs / "agents.log").read_text().splitlines()[-1] == "left", (
        "the server was there for the agent's leave"
    )


async def test_jobs_survive_a_restart_of_everything(plan: Plan) -> None:
    """A job that was accepted and waits is answered after everything was stopped and started again."""
    first = Stack(plan, say=print)
    try:
        await first.start()
        store = await Store.connect(first.settings)
        await inventory.set_card_state(store, "GPU-stub", "cordoned")
        waiting = request(is_async=True, max_wait_ms=600_000, total_timeout_ms=600_000)
        assert (await admission.submit(store, waiting)).state == "queued"
        await store.close()
    finally:
        await ended(first)
    second = Stack(plan, say=print)
    try:
        await second.start()
        store = await Store.connect(second.settings)
        await inventory.set_card_state(store, "GPU-stub", "ready")

        async def is_done() -> bool:
            return (await jobs.view(store, waiting.job_id)).state == "succeeded"

        await until("the job of before the restart is answered", is_done)
        await store.close()
    finally:
        await ended(second)


@pytest.mark.parametrize("victim", ["server", "gateway", "stub_agent"])
async def test_what_is_killed_is_started_again(plan: Plan, started: Started, victim: str) -> None:
    """kill -9 of the server, of a gateway or of an agent: said, and after a while all answers as before."""
    said: list[str] = []
    stack = Stack(plan, say=said.append)
    try:
        await stack.start()
        pid = stack.server_pid if victim == "server" else started.named(victim)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

        async def is_said() -> bool:
            return any("ended with status -9" in line for line in said)

        await until("its end is said", is_said)

        await until("everything answers again", lambda: is_ready(stack))
    finally:
        await ended(stack)


async def test_a_gateway_that_cannot_start_fails_the_command(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own one line is the reason, and nothing is left running."""
    monkeypatch.setenv("VRAMGATE_GATEWAY__HOST", "0.0.0.0")
    stack = Stack(plan, say=print)
    try:
        with pytest.raises(Failure, match=r"there are no keys.*--insecure"):
            await stack.start()
    finally:
        await ended(stack)
