"""One service as a process of ours: started, watched, started again with back-off, and ended for certain.

Owns a process and its log file. Does not own which services there are, nor the order in which they end
(`stack`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scheduler.embedded import bound_to_owner, last_lines
from vramgate.cli import background
from vramgate.cli.exits import FAILED, USAGE, Failure

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STEADY_S = 60.0
"""A process that ran for so long was well; its next end starts the back-off anew."""

_KILL_TIMEOUT_S = 10.0

_REASON = re.compile(r' reason=("(?:[^"\\]|\\.)*"|\S+)')

Say = Callable[[str], None]


class ServiceProcess:
    """A service between `start` and `stop`.

    Once `keep_running` was called, each end is said and answered with a new start. It is bound to the
    thread that started it: on Linux it gets SIGTERM when that ends, also by kill -9.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        say: Say,
        stop_timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._log = log
        self._say = say
        self._stop_timeout_s = stop_timeout_s
        self._environment = {**os.environ, **(environment or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Spawn the process. Until `keep_running` its end is left for `refuse_end` to tell."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_bytes(b"")
        await self._spawn()

    def keep_running(self) -> None:
        """From now on start it again whenever it ends."""
        self._watch = asyncio.create_task(self._keep_running(), name=f"watch {self.name}")

    def refuse_end(self) -> None:
        """Raise Failure with the process's last line when it has ended: for the time of a first start."""
        if self._process is not None and self._process.returncode is not None:
            # Our services end with 2 for a wrong option or configuration, as every command does.
            exit_code = USAGE if self._process.returncode == USAGE else FAILED
            raise Failure(f"{self.name} ended at the start: {self.last_words()}", exit_code=exit_code)

    async def stop(self, hurry: asyncio.Event) -> None:
        """SIGTERM, time to drain (none once `hurry` is set), SIGKILL. Returns when the process is gone.
        Idempotent.
        """
        self._is_stopping = True
        if self._watch is not None:
            await background.end(self._watch)
        process = self._process
        if process is None or process.returncode is not None:
            return
        _send(process.pid, signal.SIGTERM)
        ended = asyncio.create_task(process.wait(), name=f"end of {self.name}")
        hurried = asyncio.create_task(hurry.wait(), name=f"hurry {self.name}")
        await asyncio.wait(
            {ended, hurried}, timeout=self._stop_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        hurried.cancel()
        if not ended.done():
            self._say(f"{self.name} did not end in time; it is killed")
            _send_group(process.pid, signal.SIGKILL)
            await asyncio.wait({ended}, timeout=_KILL_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL it and what it started, without waiting."""
        self._is_stopping = True
        if self.pid is not None:
            _send_group(self.pid, signal.SIGKILL)

    def has_said(self, event: str) -> bool:
        """Whether its log holds such an event: nobody else can have written that."""
        return f" {event} ".encode() in self._log.read_bytes()

    def last_words(self) -> str:
        """The last line of its log; of a log event, the reason that it gives."""
        lines = last_lines(self._log)
        return _told(lines[-1]) if lines else f"it said nothing (see {self._log})"

    async def _spawn(self) -> None:
        self.starts += 1
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal reaches `up` alone, which ends services in their
            # order.
            self._process = await asyncio.create_subprocess_exec(
                *bound_to_owner(self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    async def _keep_running(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while self._process is not None and not self._is_stopping:
            began = time.monotonic()
            status = await self._process.wait()
            if self._is_stopping:
                return
            if time.monotonic() - began > STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            self._say(
                f"{self.name} ended with status {status}, again in {backoff_s:.3g} s: {self.last_words()}"
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(LONGEST_BACKOFF_S, backoff_s * 2)
            if not self._is_stopping:
                await self._spawn()


def _told(line: str) -> str:
    match = _REASON.search(line)
    if match is None:
        return line.strip()
    return str(json.loads(match[1])) if match[1].startswith('"') else match[1]


def _send(pid: int, what: signal.Signals) -> None:
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        pass


def _send_group(pid: int, what: signal.Signals) -> None:
    """To the process and whatever it started in its session: nothing of it may stay behind."""
    try:
        os.killpg(pid, what)
    except ProcessLookupError:
        pass
