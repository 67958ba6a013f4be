"""Results by stream: one stream per gateway worker, read by one connection, never a connection per request.

The stream is the fast path, the job's record is the truth: after a reconnect, another server, or a stream
that is missing or shorter than what was read, the reader starts at 0 and checks every pending id; at all
times it checks some of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from scheduler import jobs
from scheduler.logs import log_event
from scheduler.silence import Silence
from scheduler.store import Store
from scheduler.submissions import Outcome
from vramgate import errors

logger = logging.getLogger("vramgate.results")

BLOCK_S = 5.0
BATCH = 256
CHECK_INTERVAL_S = 1.0
CHECKED_PER_INTERVAL = 16
SETTLED_EARLY = 4096
"""Outcomes remembered for a caller that asks a moment later: the answer can overtake the reply of submit."""


Waiter = asyncio.Future[Any]
"""Of an Outcome. It belongs to the one who waits, who may end it with something else."""


@dataclass(slots=True)
class _Pending:
    outcome: Outcome | None = None
    waiters: set[Waiter] = field(default_factory=set)
    news: set[asyncio.Event] = field(default_factory=set)


async def put(store: Store, lease_id: str, result: bytes) -> None:
    """Store a large result under the lease of its run; finish adopts it for the job, under the fence."""
    ttl_ms = round(store.settings.retention.result_ttl_s * 1000)
    await store.guarded(lambda: store.redis.set(store.keys.name("up", lease_id), result, px=ttl_ms))


class ResultReader:
    """The waiters of one gateway worker. `expect` after submit, `forget` when the caller is gone."""

    def __init__(self, store: Store, worker: str) -> None:
        self._store = store
        self._stream = store.keys.name("st", worker)
        self._line = store.blocking_line(BLOCK_S)
        self._pending: dict[str, _Pending] = {}
        self._early: OrderedDict[str, Outcome] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._last = "0"
        self._untrimmed = 0
        self._must_check_all = False
        self._is_closing = asyncio.Event()

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._read_forever(), name="results-read"),
            asyncio.create_task(self._check_forever(), name="results-check"),
        ]

    async def close(self) -> None:
        """Stop reading; whoever still waits is told `draining`."""
        self._is_closing.set()
        left = set(self._tasks)
        while left:
            for task in left:
                task.cancel()
            # Again and again, because the client can lose one that arrives together with its answer.
            _, left = await asyncio.wait(left, timeout=0.1)
        for pending in self._pending.values():
            for waiter in pending.waiters:
                if not waiter.done():
                    waiter.set_exception(
                        errors.Draining("this gateway is shutting down; ask again with the same key")
                    )
                    waiter.exception()
        self._pending.clear()
        with contextlib.suppress(RedisError, OSError):
            await self._line.close()

    @property
    def pending(self) -> int:
        """How many jobs somebody of this worker waits for."""
        return len(self._pending)

    def expect(self, job_id: str) -> Waiter:
        """The outcome of a job, once it settles. Pair it with `forget`."""
        pending = self._enter(job_id)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        pending.waiters.add(waiter)
        if pending.outcome is not None:
            waiter.set_result(pending.outcome)
        return waiter

    def forget(self, job_id: str, waiter: Waiter) -> None:
        """One waiter less."""
        pending = self._pending.get(job_id)
        if pending is not None:
            pending.waiters.discard(waiter)
            self._leave(job_id, pending)

    @asynccontextmanager
    async def news(self, job_id: str) -> AsyncIterator[asyncio.Event]:
        """An event that is set whenever something new happened to the job; clear it before looking."""
        pending = self._enter(job_id)
        event = asyncio.Event()
        pending.news.add(event)
        if pending.outcome is not None:
            event.set()
        try:
            yield event
        finally:
            pending.news.discard(event)
            self._leave(job_id, pending)

    def _enter(self, job_id: str) -> _Pending:
        pending = self._pending.get(job_id)
        if pending is None:
            pending = self._pending[job_id] = _Pending()
        if pending.outcome is None:
            pending.outcome = self._early.get(job_id)
        return pending

    def _leave(self, job_id: str, pending: _Pending) -> None:
        if not pending.waiters and not pending.news:
            self._pending.pop(job_id, None)

    async def _read_forever(self) -> None:
        failures = 0
        while not self._is_closing.is_set():
            try:
                await self._read_once()
                failures = 0
            except (RedisError, OSError, errors.VramgateError) as error:
                failures += 1
                self._must_check_all = True
                if failures == 1:
                    log_event(logger, "results_read_failed", level=logging.WARNING, error=str(error))
                await asyncio.sleep(min(0.05 * 2 ** min(failures, 6), 2.0) * random.uniform(0.5, 1.0))

    async def _read_once(self) -> None:
        if self._must_check_all:
            await self._check(list(self._pending))
            self._last = "0"
            self._must_check_all = False
        answer: Any = await self._line.ask(
            "XREAD", "COUNT", BATCH, "BLOCK", round(BLOCK_S * 1000), "STREAMS", self._stream, self._last
        )
        if not answer:
            # Nothing for a whole block: a stream that was lost with its server begins anew with lower ids.
            newest: Any = await self._line.ask("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
            if newest and _order(newest[0][0]) < _order(self._last.encode()):
                self._must_check_all = True
            return
        for entry_id, flat in answer[0][1]:
            self._take(dict(zip(flat[::2], flat[1::2], strict=True)))
            self._last = entry_id.decode()
            self._untrimmed += 1
        if self._untrimmed >= BATCH:
            await self._trim()

    async def _trim(self) -> None:
        """Drop what was read; not after each reading, since a caller waits for the next one."""
        self._untrimmed = 0
        await self._store.guarded(
            lambda: self._store.redis.xtrim(self._stream, minid=_after(self._last), approximate=True)
        )

    def _take(self, fields: dict[bytes, bytes]) -> None:
        for name, record in fields.items():
            if not name.startswith(b"r:"):
                self._hear(name.decode(), record, fields.get(b"r:" + name))

    def _hear(self, job_id: str, record: bytes, result: bytes | None) -> None:
        if not record:
            self._ring(job_id)
            return
        try:
            outcome = jobs.outcome_of(job_id, record, result)
        except errors.Internal as error:
            # One entry must not end, or repeat for ever, the reading of the others; the checks ask for it.
            log_event(logger, "result_unreadable", level=logging.ERROR, job=job_id, error=error.detail)
            return
        if outcome.state == "succeeded" and result is None:
            task = asyncio.create_task(self._fetch(job_id), name=f"result-{job_id[:8]}")
            self._tasks = [other for other in self._tasks if not other.done()] + [task]
            return
        self._settle(outcome)

    async def _fetch(self, job_id: str) -> None:
        try:
            await self._check([job_id])
        except errors.VramgateError:
            self._must_check_all = True

    def _settle(self, outcome: Outcome) -> None:
        pending = self._pending.get(outcome.job_id)
        if pending is None:
            self._early[outcome.job_id] = outcome
            if len(self._early) > SETTLED_EARLY:
                self._early.popitem(last=False)
        elif pending.outcome is None:
            pending.outcome = outcome
            for waiter in pending.waiters:
                if not waiter.done():
                    waiter.set_result(outcome)
        self._ring(outcome.job_id)

    def _ring(self, job_id: str) -> None:
        pending = self._pending.get(job_id)
        for event in pending.news if pending else ():
            event.set()

    async def _check_forever(self) -> None:
        """Some pending ids, round-robin: a stream entry that never came must not leave a caller waiting."""
        turn: list[str] = []
        silence = Silence()
        while not self._is_closing.is_set():
            await asyncio.sleep(CHECK_INTERVAL_S * random.uniform(0.8, 1.2))
            turn = [job_id for job_id in turn if job_id in self._pending] or list(self._pending)
            part, turn = turn[:CHECKED_PER_INTERVAL], turn[CHECKED_PER_INTERVAL:]
            try:
                await self._check(part)
                if self._untrimmed:
                    await self._trim()
                if part:
                    silence.ended()
            except errors.VramgateError as error:
                silent_s = silence.lasts()
                if silent_s is not None:
                    log_event(
                        logger,
                        "results_check_failed",
                        level=logging.WARNING,
                        silent_s=silent_s,
                        error=str(error),
                    )

    async def _check(self, job_ids: list[str]) -> None:
        for job_id in job_ids:
            pending = self._pending.get(job_id)
            if pending is None or pending.outcome is not None:
                continue
            try:
                outcome = await jobs.outcome(self._store, job_id)
            except errors.Refused as error:
                if error.code != "unknown_job":
                    raise
                outcome = _nowhere(job_id)
            if outcome is not None:
                self._settle(outcome)


def _nowhere(job_id: str) -> Outcome:
    """A job that the ledger does not know: told `lost`; nobody resubmits it, because an agent may still run
    it.
    """
    detail = f"job {job_id}: the ledger has no record of it; ask again with the same key"
    return Outcome(
        job_id=job_id,
        state="failed",
        model="",
        version="",
        code="lost",
        detail=detail,
        result=None,
        card=None,
        wait_ms=0,
        run_ms=0,
        total_ms=0,
        leased_bytes=0,
        peak_bytes=0,
        attempts=0,
    )


def _order(entry_id: bytes) -> tuple[int, int]:
    ms, _, part = entry_id.partition(b"-")
    return int(ms), int(part or 0)


def _after(entry_id: str) -> str:
    ms, _, part = entry_id.partition("-")
    return f"{ms}-{int(part or 0) + 1}"
