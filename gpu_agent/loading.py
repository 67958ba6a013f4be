"""Loads the card's models into a child, one after the other, and again later where a load failed.

Owns: the order, the bound of a load, and whom a child that dies while loading is blamed on. Does not own
the state of each model (`hosting`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gpu_agent.child_process import ChildProcess
from gpu_agent.hosting import CardModel, CardModels
from gpu_agent.intake import Intake
from scheduler.logs import log_event

_LOG = logging.getLogger(__name__)

Room = Callable[[], Awaitable[int]]


class Loader:
    """One load at a time: two cold loads on one card would misread each other's memory."""

    def __init__(self, models: CardModels, intake: Intake, *, timeout_s: float) -> None:
        self._models = models
        self._intake = intake
        self._timeout_s = timeout_s
        self._loading: CardModel | None = None
        self._answer: asyncio.Future[Mapping[str, Any]] | None = None

    async def load_all(self, child: ChildProcess, *, room: Room, stopping: asyncio.Event) -> None:
        """Load what has not failed. What has comes with `load_due`, however long this child took to start: a
        load that ended the last one must not end this one before it has served anybody.
        """
        for model in self._models.all:
            if model.is_due and not model.failures and child.is_alive and not stopping.is_set():
                await self._load(child, model, room=await room(), stopping=stopping)

    async def load_due(self, child: ChildProcess, *, room: Room, stopping: asyncio.Event) -> None:
        """Try failed loads again, with nothing running beside them: a peak that others share measures
        nothing.
        """
        self._intake.close()
        while not self._intake.is_idle and child.is_alive and not stopping.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for model in self._models.all:
            if model.retry_at is not None and model.is_due and child.is_alive and not stopping.is_set():
                await self._load(child, model, room=await room(), stopping=stopping)

    def next_retry_s(self) -> float | None:
        """Seconds until a failed load is due again; None when none is."""
        due = [model.retry_at for model in self._models.all if model.retry_at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def on_message(self, message: Mapping[str, Any]) -> None:
        """`loaded` or `load_failed`."""
        model = self._models.get(str(message["model"]))
        if model is None:
            return
        if message["t"] == "loaded":
            model.loaded(message)
            known = model.known
            assert known is not None
            log_event(
                _LOG,
                "model_loaded",
                logging.INFO if message["note"] is None else logging.WARNING,
                model=model.name,
                version=message["descriptor"]["version"],
                resident_bytes=known.resident,
                c0=known.c0,
                c1=round(known.c1, 3),
                seen_units=known.seen_units,
                note=message["note"],
            )
        else:
            self._failed(model, str(message["reason"]), is_final=bool(message["final"]))
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def blame_load(self, how: str) -> bool:
        """The child died: of a load, if one was going on. Its model has pauses of its own, and a last try."""
        model, self._loading = self._loading, None
        if model is None or model.state != "loading":
            return False
        self._failed(model, f"{model.name}: the child died of {how} during its load", is_final=False)
        return True

    async def _load(
        self, child: ChildProcess, model: CardModel, *, room: int, stopping: asyncio.Event
    ) -> None:
        model.state, model.reason, model.retry_at = "loading", None, None
        self._loading = model
        self._answer = asyncio.get_running_loop().create_future()
        known = model.known
        child.send(
            {
                "t": "load",
                "model": model.name,
                "entrypoint": model.settings.entrypoint,
                "version": model.settings.version,
                "concurrency": model.settings.concurrency,
                "room": room,
                "known": None if known is None else [known.c0, known.c1, known.seen_units],
                "busy_s": self._timeout_s,
            }
        )
        ended = asyncio.ensure_future(child.ended())
        stop = asyncio.ensure_future(stopping.wait())
        waiting: set[asyncio.Future[Any]] = {self._answer, ended, stop}
        done, _ = await asyncio.wait(waiting, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        stop.cancel()
        if not done:
            self._failed(model, f"{model.name}: not loaded within {self._timeout_s:g} s", is_final=False)
            child.kill()
            await child.ended()
        if child.is_alive:
            self._loading = None

    def _failed(self, model: CardModel, reason: str, *, is_final: bool) -> None:
        model.load_failed(reason, is_final=is_final)
        log_event(_LOG, "model_failed", logging.ERROR, model=model.name, reason=model.reason)
