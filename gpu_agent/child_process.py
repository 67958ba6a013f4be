"""The torch child as its supervisor sees it: spawn, messages, captured output, and its certain end.

Owns: the process, its group, its sockets and its pipe. Does not own: what the messages mean, or whether
the card is clean afterwards (`release`). Nothing in here waits for the child while the supervisor's
loop has other things to do: a message is queued for writing, an end is seen through a pidfd.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_agent.ipc import Broken, Frames, pack_frame
from scheduler.logs import log_event
from vramgate.errors import VramgateError

_LOG = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
LINES_PER_WINDOW = 200
WINDOW_S = 10.0
LONGEST_LINE = 500
_ROOT = Path(__file__).resolve().parent.parent
# Ours comes last on the path: a user's directory may hold modules of the same names as ours.
_BOOT = "import sys; sys.path.append({root!r}); from gpu_agent.child.main import main; main()"


class ChildFailed(VramgateError):
    """The child could not be started; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a child is started with. directories: where entry points are looked up, first on its path."""

    environment: Mapping[str, str]
    directories: tuple[Path, ...]
    watchdog_s: float
    output_limit: int


@dataclass(frozen=True, slots=True)
class Hello:
    """The child's first word: it sees this card, and its context costs so much."""

    pid: int
    uuid: str
    total: int
    context: int


class ChildProcess:
    """One child, from `start` to `ended`."""

    def __init__(self, process: subprocess.Popen[bytes], memory: socket.socket) -> None:
        self._process = process
        self.memory = memory
        self.pid = process.pid
        self.hello: Hello | None = None
        self.poisoned: str | None = None
        self._control: asyncio.Transport | None = None
        self._on_message: Callable[[dict[str, Any]], None] = lambda message: None
        self._first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._lines: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, setup: Setup, *, on_message: Callable[[dict[str, Any]], None]) -> ChildProcess:
        """Spawn a child and let it open its card. Raises ChildFailed."""
        child = await cls.spawn(setup)
        await child.begin(on_message)
        return child

    @classmethod
    async def spawn(cls, setup: Setup) -> ChildProcess:
        """A child that imports torch, and then waits for `begin`: it holds nothing of the card. Ping it
        meanwhile.
        """
        # The kernel's parent-death signal follows the thread that spawns, and this one lives as long as we
        # do.
        assert threading.current_thread() is threading.main_thread()
        ours, theirs = socket.socketpair()
        memory, their_memory = socket.socketpair()
        with theirs, their_memory:
            process = _spawn(setup, control=theirs.fileno(), memory=their_memory.fileno())
        child = cls(process, memory)
        await child._watch(ours)
        return child

    async def begin(self, on_message: Callable[[dict[str, Any]], None]) -> None:
        """Open the card and wait for the child's hello; messages go to `on_message` from then on. Raises
        ChildFailed.
        """
        self._on_message = on_message
        self.send({"t": "begin"})
        waiting: set[asyncio.Future[Any]] = {self._first, self._ended}
        await asyncio.wait(waiting, timeout=HELLO_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        first: dict[str, Any] = self._first.result() if self._first.done() else {"t": "silence"}
        if first["t"] != "hello":
            self.kill()
            code = await self.ended()
            reason = first.get("reason") or f"it ended with {describe_exit(code)} before it was ready"
            raise ChildFailed(f"the torch child did not start: {reason}")
        self.hello = Hello(first["pid"], first["uuid"], first["total"], first["context"])

    @property
    def is_alive(self) -> bool:
        return not self._ended.done()

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message. One to a child that is gone is dropped: its end is being dealt with."""
        # Its socket ends before its process does, by as long as the kernel takes to free what it held.
        if self._control is not None and not self._control.is_closing() and self.is_alive:
            self._control.write(pack_frame(message))

    async def ended(self) -> int:
        """Wait for the end: the exit status, negative for a signal."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """SIGKILL for the child and whatever it has started."""
        if self.is_alive:
            _kill_group(self.pid)

    async def stop(self) -> None:
        """Ask for a clean end, and kill when it takes too long."""
        self.send({"t": "stop"})
        await asyncio.wait({self._ended}, timeout=STOP_TIMEOUT_S)
        self.kill()
        await self.ended()

    def _receive(self, message: dict[str, Any]) -> None:
        if not self._first.done():
            self._first.set_result(message)
        elif message["t"] == "poisoned":
            self.poisoned = str(message["reason"])
        else:
            self._on_message(message)

    async def _watch(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._control, messages = await loop.create_connection(
            lambda: _Messages(self._receive, broken=self.kill), sock=control
        )
        assert self._process.stdout is not None
        output = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), self._process.stdout)
        self._lines = asyncio.create_task(_log_lines(output, self.pid), name="child-output")
        pidfd = os.pidfd_open(self.pid)
        loop.add_reader(pidfd, self._reap, pidfd, messages.ended)

    def _reap(self, pidfd: int, messages_ended: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        # Before the wait: until then the number of the group cannot belong to anybody else.
        _kill_group(self.pid)
        code = self._process.wait()
        self.memory.close()
        self._closing = asyncio.create_task(self._close(code, messages_ended), name="child-close")

    async def _close(self, code: int, messages_ended: asyncio.Future[None]) -> None:
        assert self._control is not None and self._lines is not None
        # What it managed to send before its end still counts: a result that is here needs no second run.
        await asyncio.wait({messages_ended, self._lines}, timeout=1.0)
        self._lines.cancel()
        self._control.close()
        self._ended.set_result(code)


class _Messages(asyncio.Protocol):
    """What the child says. Each message is taken where it arrives: with a task that reads, every answer would
    wait for one more turn of the loop.
    """

    def __init__(self, receive: Callable[[dict[str, Any]], None], *, broken: Callable[[], None]) -> None:
        self._receive = receive
        self._broken = broken
        self._frames = Frames()
        self._is_deaf = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        try:
            for message in self._frames.feed(data):
                self._take(message)
        except (Broken, ValueError) as error:
            # Nothing that follows can be understood either, and its work would hang until a clock ends it.
            self._is_deaf = True
            log_event(_LOG, "child_unintelligible", logging.ERROR, reason=str(error))
            self._broken()

    def _take(self, message: dict[str, Any]) -> None:
        try:
            self._receive(message)
        except Exception:
            # One message that we cannot take must not make us deaf to the rest, least of all to ends.
            _LOG.exception("child_message_failed")


def _spawn(setup: Setup, *, control: int, memory: int) -> subprocess.Popen[bytes]:
    facts = {
        "directories": [str(directory) for directory in setup.directories],
        "watchdog_s": setup.watchdog_s,
        "output_limit": setup.output_limit,
    }
    command = [sys.executable, "-P", "-u", "-c", _BOOT.format(root=str(_ROOT))]
    command += ["--control", str(control), "--memory", str(memory), "--parent", str(os.getpid())]
    return subprocess.Popen(
        [*command, "--setup", json.dumps(facts)],
        env={**os.environ, **setup.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(control, memory),
        process_group=0,
    )


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


async def _log_lines(output: asyncio.StreamReader, pid: int) -> None:
    """Log what the child prints, up to a bound per window; all of it is read, so that it never blocks the
    child.
    """
    window, lines, dropped = time.monotonic(), 0, 0
    while True:
        try:
            line = await output.readline()
        except ValueError:
            # A line longer than the reader's limit: it was discarded.
            dropped += 1
            continue
        now = time.monotonic()
        if now - window > WINDOW_S or not line:
            if dropped:
                log_event(_LOG, "model_output_dropped", logging.WARNING, pid=pid, lines=dropped)
            window, lines, dropped = now, 0, 0
        if not line:
            return
        lines += 1
        if lines > LINES_PER_WINDOW:
            dropped += 1
        else:
            log_event(
                _LOG, "model_output", pid=pid, text=line.decode(errors="replace").rstrip()[:LONGEST_LINE]
            )


def describe_exit(code: int) -> str:
    """`signal 9 (SIGKILL)` or `exit status 1`."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
