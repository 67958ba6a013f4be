"""Progress and streamed output on their way to those who watch a job, gathered so that a step costs no call.

Owns: gathering, and the pace. Best effort: what cannot be sent is dropped, since the answer does not hang
on it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from scheduler import cards
from scheduler.handover import HandedJob
from scheduler.logs import log_event
from scheduler.store import Store
from vramgate.errors import VramgateError

_LOG = logging.getLogger(__name__)
INTERVAL_S = 0.1
UNWATCHED_INTERVAL_S = 1.0
MOST_GATHERED = 256


@dataclass(slots=True)
class _Job:
    job: HandedJob
    outputs: list[Mapping[str, Any]] = field(default_factory=list)
    progress: Mapping[str, Any] | None = None
    sent_at: float = 0.0
    is_fenced: bool = False
    dropped: int = 0


class Emitter:
    """Events of the running jobs of one session."""

    def __init__(self, store: Store, *, card: str, session: str) -> None:
        self._store = store
        self._card = card
        self._session = session
        self._jobs: dict[str, _Job] = {}
        self._news = asyncio.Event()
        self._sending = asyncio.Lock()

    def add(self, job: HandedJob, kind: str, data: Mapping[str, Any]) -> None:
        """Take an event; only the newest progress of a job is kept until it is sent."""
        entry = self._jobs.get(job.lease_id)
        if entry is None:
            entry = self._jobs[job.lease_id] = _Job(job)
        if entry.is_fenced:
            return
        if kind == "progress":
            entry.progress = data
        elif len(entry.outputs) < MOST_GATHERED:
            entry.outputs.append({"data": msgpack.unpackb(data["data"], strict_map_key=False)})
        else:
            entry.dropped += 1
        self._news.set()

    def forget(self, lease_id: str) -> None:
        """The job is over."""
        self._jobs.pop(lease_id, None)

    async def run(self) -> None:
        """Send what was gathered, at most every INTERVAL_S, until cancelled."""
        while True:
            await self._news.wait()
            await asyncio.sleep(INTERVAL_S)
            self._news.clear()
            await self.flush(only_due=True)

    async def flush(self, *, only_due: bool = False) -> None:
        """Send everything that waits, after what is on its way already: events may not come after the report
        that settles their job.
        """
        async with self._sending:
            now = time.monotonic()
            for entry in list(self._jobs.values()):
                # Nobody watches it as yet: somebody may come, and then a figure of the last second will do.
                is_due = (
                    entry.job.wants_events or entry.outputs or now - entry.sent_at >= UNWATCHED_INTERVAL_S
                )
                if (entry.outputs or entry.progress) and (is_due or not only_due) and not entry.is_fenced:
                    await self._send(entry, now)

    async def _send(self, entry: _Job, now: float) -> None:
        events: list[tuple[str, Mapping[str, Any]]] = [("output", data) for data in entry.outputs]
        if entry.progress is not None:
            events.append(("progress", entry.progress))
        entry.outputs, entry.progress, entry.sent_at = [], None, now
        if entry.dropped:
            reason = f"more than {MOST_GATHERED} at a time"
            self._log_dropped(entry, number=entry.dropped, reason=reason)
            entry.dropped = 0
        try:
            entry.is_fenced = not await cards.emit(
                self._store,
                card=self._card,
                session=self._session,
                job_id=entry.job.job_id,
                lease_id=entry.job.lease_id,
                attempt=entry.job.attempt,
                events=events,
            )
        except VramgateError as error:
            self._log_dropped(entry, number=len(events), reason=error.detail)

    def _log_dropped(self, entry: _Job, *, number: int, reason: str) -> None:
        log_event(_LOG, "events_dropped", logging.WARNING, job=entry.job.job_id, number=number, reason=reason)
