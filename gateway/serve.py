"""The gateway as a process: one socket, N workers, and an end that loses nobody.

Owns: binding, worker processes, signals, and the order of the end. uvicorn alone closes its listeners first;
here the worker says that it drains while it still listens, so that balancers see it, then stops accepting,
finishes what waits within a grace, and sends away the rest, whose jobs stay in the ledger to be joined by key
at another gateway.

A worker whose parent died stops listening at once, so that a restarted gateway finds its port free.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import multiprocessing
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkProcess

import uvicorn
import uvloop
from prometheus_client.multiprocess import mark_process_dead

from gateway.app import create_app, short_way
from gateway.ledger import Ledger
from gateway.lifecycle import Lifecycle
from gateway.metrics import MULTIPROCESS_DIR
from gateway.protocol import BoundedProtocol
from scheduler.exposure import why_not_served
from scheduler.logs import log_event
from scheduler.settings import Settings
from scheduler.store import BadStore, Store
from vramgate.errors import StoreUnavailable, VramgateError

logger = logging.getLogger("gateway")

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than a proxy keeps an idle connection, so that it is the proxy that closes it."""

COLLECT_EVERY = 20_000
"""Containers made and not yet gone between two searches of the youngest generation."""

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)

BACKSTOP_S = 5.0
RESPAWN_S = 0.5
MAX_RESPAWN_S = 10.0
HEALTHY_S = 10.0


class CannotStart(VramgateError):
    """The gateway cannot serve; one line says why. `exit_code` is the process' own."""

    def __init__(self, detail: str, *, exit_code: int = 1) -> None:
        super().__init__(detail)
        self.exit_code = exit_code


def serve(settings: Settings) -> int:
    """Serve until a signal ends it; the exit code. Raises CannotStart before anything is served."""
    _refuse_open_door(settings)
    listener = _bind(settings.gateway.host, settings.gateway.port)
    _probe_store(settings)
    address = _address_of(listener)
    log_event(
        logger,
        "gateway_listens",
        address=address,
        workers=settings.gateway.workers,
        pool=settings.pool,
        pid=os.getpid(),
    )
    if settings.gateway.workers == 1:
        Worker(settings, listener).run()
    else:
        Parent(settings, listener).run()
    log_event(logger, "gateway_ended", address=address)
    return 0


def _refuse_open_door(settings: Settings) -> None:
    why = why_not_served(settings.gateway)
    if why is not None:
        raise CannotStart(why, exit_code=2)


def _probe_store(settings: Settings) -> None:
    """Refuse a store that will never do; start without one that only does not answer yet."""

    async def probe() -> None:
        store = await Store.connect(settings, max_connections=2)
        await store.close()

    try:
        asyncio.run(probe())
    except BadStore as error:
        raise CannotStart(str(error)) from None
    except StoreUnavailable:
        return  # Each worker says so, and keeps trying.


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(found[0], found[1])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        is_address = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise CannotStart(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            f"choose another with {'--host' if is_address else '--port'}"
        ) from None
    return listener


def _address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Worker:
    """One process that answers requests: a uvicorn server whose end is ours."""

    def __init__(self, settings: Settings, listener: socket.socket, parent: int | None = None) -> None:
        self._settings = settings.gateway
        self._listener = listener
        self._parent = parent
        self._lifecycle = Lifecycle()
        self._ledger = Ledger(settings)
        app = create_app(settings, ledger=self._ledger, lifecycle=self._lifecycle)
        self._server = _Server(
            uvicorn.Config(
                short_way(app),
                log_config=None,
                access_log=False,
                http=BoundedProtocol,
                ws="none",
                lifespan="on",
                server_header=False,
                # Who may operate is judged by the peer itself and by the presence of these headers, never by
                # their text.
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(self._settings.grace_s + BACKSTOP_S),
                backlog=BACKLOG,
            )
        )
        self._first_signal: float | None = None
        self._hurry: asyncio.Event

    def run(self) -> None:
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        _collect_seldom()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self._hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        ending: list[asyncio.Task[None]] = []

        def begin(*, drain_s: float) -> None:
            now = time.monotonic()
            if self._first_signal is None:
                self._first_signal = now
                ending.append(asyncio.create_task(self._end(drain_s), name="gateway-end"))
            elif now - self._first_signal > 0.5:
                # One end can reach a process twice at once: from its group and from its parent.
                self._hurry.set()

        def orphaned() -> None:
            if self._parent is not None:
                loop.remove_reader(self._parent)
            begin(drain_s=0.0)

        loop.add_signal_handler(signal.SIGTERM, lambda: begin(drain_s=self._settings.drain_s))
        if self._parent is None:
            loop.add_signal_handler(signal.SIGINT, lambda: begin(drain_s=self._settings.drain_s))
        else:
            loop.add_reader(self._parent, orphaned)
        await self._server.serve(sockets=[self._listener])
        for task in ending:
            task.cancel()

    async def _end(self, drain_s: float) -> None:
        """Say draining while listening; stop accepting; give those who wait a grace; send the rest away."""
        log_event(logger, "gateway_drains", waiting=self._lifecycle.waiting, drain_s=drain_s)
        self._lifecycle.drain()
        await self._pause(drain_s)
        self._server.should_exit = True
        self._lifecycle.send_listeners_away()
        deadline = time.monotonic() + self._settings.grace_s
        while self._lifecycle.waiting and time.monotonic() < deadline and not self._hurry.is_set():
            await self._pause(0.05)
        if self._lifecycle.waiting:
            log_event(logger, "gateway_sends_away", logging.WARNING, waiting=self._lifecycle.waiting)
        self._lifecycle.close()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), seconds)


def _collect_seldom() -> None:
    """Let a body of a million lists be built without being searched for cycles a thousand times meanwhile.

    Documents hold no cycles; with Python's own threshold the search takes three quarters of their parsing,
    and holds up everybody else.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Parent:
    """Starts the workers, starts again the one that died, and passes signals on."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        self._context = multiprocessing.get_context("fork")
        # Held open by this process alone: its end is how a worker learns that it is an orphan.
        self._alive_read, self._alive_write = os.pipe()
        self._signal_read, self._signal_write = os.pipe()
        self._workers: dict[int, ForkProcess] = {}
        self._born: dict[int, float] = {}
        self._pause_s: dict[int, float] = {}
        self._is_ending = False

    def run(self) -> None:
        os.set_blocking(self._signal_write, False)
        signal.set_wakeup_fd(self._signal_write)
        for number in END_SIGNALS:
            signal.signal(number, self._pass_on)
        for slot in range(self._settings.gateway.workers):
            self._start(slot)
        while self._workers:
            ready = wait_for_any([self._signal_read, *(worker.sentinel for worker in self._workers.values())])
            if self._signal_read in ready:
                os.read(self._signal_read, 1024)
            for slot, worker in tuple(self._workers.items()):
                if worker.sentinel in ready:
                    self._bury(slot, worker)

    def _start(self, slot: int) -> None:
        """Start a worker, unless this is the end."""
        worker = self._context.Process(target=self._work, name=f"gateway-worker-{slot}")
        # One that came in between would miss a worker that is not yet on the list, or meet this process'
        # handler in the worker. One that came before has been handled once this returns.
        signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        try:
            if not self._is_ending:
                worker.start()
                self._workers[slot], self._born[slot] = worker, time.monotonic()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)

    def _work(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Ctrl-C reaches the whole group; workers go by what the parent passes on.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        for descriptor in (self._alive_write, self._signal_read, self._signal_write):
            os.close(descriptor)
        random.seed()
        parent = os.getppid()
        Worker(self._settings, self._listener, self._alive_read).run()
        if os.getppid() != parent:
            # Nobody else is left to remove it.
            shutil.rmtree(os.environ[MULTIPROCESS_DIR], ignore_errors=True)

    def _bury(self, slot: int, worker: ForkProcess) -> None:
        worker.join()
        del self._workers[slot]
        _forget_metrics(worker.pid)
        if self._is_ending:
            return
        log_event(logger, "gateway_worker_died", logging.ERROR, pid=worker.pid, exit_code=worker.exitcode)
        was_healthy = time.monotonic() - self._born[slot] > HEALTHY_S
        pause_s = RESPAWN_S if was_healthy else min(MAX_RESPAWN_S, 2 * self._pause_s.get(slot, RESPAWN_S / 2))
        self._pause_s[slot] = pause_s
        # A signal ends the pause, so that nobody who ends this gateway waits for it.
        wait_for_any([self._signal_read], pause_s)
        self._start(slot)

    def _pass_on(self, number: int, _: object) -> None:
        if not self._is_ending:
            self._is_ending = True
            # No longer ours: once the workers have closed it, new connections are refused and not left
            # waiting.
            self._listener.close()
        for worker in self._workers.values():
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, signal.SIGTERM)


def _forget_metrics(pid: int | None) -> None:
    if pid is not None:
        mark_process_dead(pid)  # type: ignore[no-untyped-call]
