"""This worker's tie to the ledger: its connection, its session, its result reader, and the clients it lost.

Owns: connecting (again and again where there is no server yet), the beat that keeps the session, counting of
waiters per job, and telling the ledger of clients that left, in the background and until it is told. Does not
own: any rule; every call goes on to `scheduler`.

The beat runs in the event loop and not in a thread: a loop that cannot beat within a session cannot answer
anybody either, and its clients should then count as left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway import metrics
from scheduler import admission, gateways, inventory, jobs, results
from scheduler.logs import log_event
from scheduler.settings import Settings
from scheduler.silence import Silence
from scheduler.states import OperatorState
from scheduler.store import BadStore, Store
from scheduler.submissions import Outcome, SubmitRequest, Submitted
from scheduler.views import CardView, JobView, LeaseView, ModelView, Page, QueueView
from vramgate.errors import StoreUnavailable

logger = logging.getLogger("gateway")

BEAT_S = 1.0
MAX_SWEEPS = 64
FAREWELL_S = 2.0
RETRY_AFTER_S = 2
NOT_REACHED = "the ledger in Redis has not been reached since this gateway started; it keeps trying"


@dataclass(frozen=True, slots=True)
class _Departure:
    """A client that left, or whose submit has an unknown outcome (job_id None)."""

    job_id: str | None
    client: str
    tenant: str
    key: str | None
    since: float


class Ledger:
    """One per worker process.

    `start` returns also while there is no server; calls raise StoreUnavailable until then.
    """

    def __init__(self, settings: Settings) -> None:
        self.worker = secrets.token_hex(16)
        self.ready_cards = 0
        self.is_answering = False
        self._silence = Silence()
        self._settings = settings
        self._store: Store | None = None
        self._reader: results.ResultReader | None = None
        self._stamp: int | None = None
        self._on_models: Callable[[], Awaitable[None]] | None = None
        self._departures: deque[_Departure] = deque()
        self._has_departures = asyncio.Event()
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # Life

    async def start(self, on_models: Callable[[], Awaitable[None]]) -> None:
        """Connect and keep beating.

        `on_models` is awaited whenever the pool's models changed. Raises BadStore.
        """
        self._on_models = on_models
        await self._beat_once()
        self._tasks = [
            asyncio.create_task(self._keep_beating(), name="gateway-beat"),
            asyncio.create_task(self._keep_telling(), name="gateway-departures"),
        ]

    async def close(self) -> None:
        """Leave, so that this worker's clients do not count as having left, and close the connections."""
        self._stop.set()
        self._has_departures.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=FAREWELL_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._store is None:
            return
        with contextlib.suppress(StoreUnavailable):
            await gateways.gateway_leave(self._store, self.worker)
        if self._reader is not None:
            await self._reader.close()
        await self._store.close()
        self._store = None

    @property
    def store(self) -> Store:
        if self._store is None:
            raise StoreUnavailable(NOT_REACHED, retry_after_s=RETRY_AFTER_S)
        return self._store

    async def _keep_beating(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), BEAT_S * random.uniform(0.8, 1.0))
            if self._stop.is_set():
                return
            try:
                await self._beat_once()
            except BadStore as error:
                self._mark_silent(error)
            except Exception:
                metrics.BEAT_FAILURES.inc()
                logger.exception("gateway_beat_failed")

    async def _beat_once(self) -> None:
        try:
            if self._store is None:
                self._store = await Store.connect(
                    self._settings, max_connections=self._settings.redis.max_connections
                )
            stamp = self._stamp
            for _ in range(MAX_SWEEPS):
                beat = await gateways.gateway_beat(self._store, self.worker)
                self.ready_cards, stamp = beat.ready_cards, beat.models_stamp
                if not beat.more:
                    break
            if self._reader is None:
                # After the first beat: the stream belongs to a session that lives.
                reader = results.ResultReader(self._store, self.worker)
                await reader.start()
                self._reader = reader
            if stamp != self._stamp and self._on_models is not None:
                await self._on_models()
                self._stamp = stamp
            self._mark_answering()
        except StoreUnavailable as error:
            metrics.BEAT_FAILURES.inc()
            self._mark_silent(error)

    def _mark_answering(self) -> None:
        silent_s = self._silence.ended()
        if not self.is_answering:
            self.is_answering = True
            log_event(
                logger, "store_answers", worker=self.worker, pool=self._settings.pool, silent_s=silent_s
            )

    def _mark_silent(self, error: Exception) -> None:
        silent_s = self._silence.lasts()
        if silent_s is not None:
            log_event(logger, "store_unavailable", logging.WARNING, silent_s=silent_s, detail=str(error))
        self.is_answering = False

    # Jobs

    async def submit(self, request: SubmitRequest) -> Submitted:
        """Store, join or replay.

        Where the outcome of the call is unknown, the job is given up in the background.
        """
        # Nothing is stored for a caller to whom nobody would bring the result.
        self._require_reader()
        try:
            return await admission.submit(self.store, request)
        except StoreUnavailable:
            if self._store is not None:
                self.give_up(None, client=request.job_id, tenant=request.tenant, key=request.key)
            raise

    def give_up(self, job_id: str | None, *, client: str, tenant: str, key: str | None) -> None:
        """This client waits no more. Returns at once; the ledger is told as soon as it answers."""
        self._departures.append(_Departure(job_id, client, tenant, key, time.monotonic()))
        self._has_departures.set()

    async def _keep_telling(self) -> None:
        while not (self._stop.is_set() and not self._departures):
            if not self._departures:
                self._has_departures.clear()
                await self._has_departures.wait()
                continue
            gone = self._departures[0]
            try:
                await admission.abandon(
                    self.store,
                    job_id=gone.job_id,
                    client=gone.client,
                    tenant=gone.tenant,
                    key=gone.key,
                )
            except StoreUnavailable:
                # A submit that is still under way by then has been refused by its own clocks.
                if (
                    time.monotonic() - gone.since < self._settings.retention.tombstone_ttl_s
                    and not self._stop.is_set()
                ):
                    await asyncio.sleep(random.uniform(0.3, 0.6))
                    continue
            except Exception:
                logger.exception("abandon_failed")
            self._departures.popleft()

    async def cancel(self, job_id: str, *, tenant: str | None, force: bool) -> JobView:
        return await admission.cancel(self.store, job_id, tenant=tenant, force=force)

    async def view(
        self, job_id: str, *, tenant: str | None, client: str | None = None, events: bool = False
    ) -> JobView:
        """The job; with `client`, this worker is told of its end from now on."""
        watch = None if client is None else (self.worker, client)
        return await jobs.view(self.store, job_id, tenant=tenant, watch=watch, events=events)

    async def unwatch(self, job_id: str, *, client: str) -> None:
        """Best effort: a watch that stays is cleared with its job."""
        with contextlib.suppress(StoreUnavailable):
            await jobs.unwatch(self.store, job_id, client=client)

    async def outcome(self, job_id: str, *, tenant: str | None) -> Outcome | None:
        return await jobs.outcome(self.store, job_id, tenant=tenant)

    async def list_jobs(
        self, *, state: str | None, model: str | None, tenant: str | None, cursor: str | None, limit: int
    ) -> Page[JobView]:
        return await jobs.list_jobs(
            self.store, state=state, model=model, tenant=tenant, cursor=cursor, limit=limit
        )

    async def read_events(self, job_id: str, *, after: str) -> Sequence[tuple[str, Mapping[str, object]]]:
        return await jobs.read_events(self.store, job_id, after=after)

    # Results

    def _require_reader(self) -> results.ResultReader:
        if self._reader is None:
            raise StoreUnavailable(NOT_REACHED, retry_after_s=RETRY_AFTER_S)
        return self._reader

    def expect(self, job_id: str) -> results.Waiter:
        """The future of a stored job's outcome. Pair it with `forget`."""
        return self._require_reader().expect(job_id)

    def forget(self, job_id: str, waiter: results.Waiter) -> None:
        """Nobody waits on this future any more."""
        if self._reader is not None:
            self._reader.forget(job_id, waiter)

    @contextlib.asynccontextmanager
    async def news(self, job_id: str) -> AsyncIterator[asyncio.Event]:
        """An event that is set whenever something happened to the job, its end included."""
        async with self._require_reader().news(job_id) as event:
            yield event

    # The pool

    async def models(self) -> tuple[ModelView, ...]:
        return await inventory.models(self.store)

    async def cards(self) -> tuple[CardView, ...]:
        return await inventory.cards(self.store)

    async def card(self, card: str) -> CardView:
        return await inventory.card(self.store, card)

    async def set_card_state(self, card: str, state: OperatorState, *, reason: str) -> CardView:
        return await inventory.set_card_state(self.store, card, state, reason=reason)

    async def leases(self) -> tuple[LeaseView, ...]:
        return await inventory.leases(self.store)

    async def queue(self) -> tuple[QueueView, ...]:
        return await inventory.queue(self.store)

    async def totals(self) -> Mapping[str, int]:
        return await inventory.totals(self.store)
