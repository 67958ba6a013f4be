"""Script calls that are ready at the same time go to the server together.

The Python client is the ceiling of a gateway, not the server: one write and one read for a dozen calls cost
little more than for one. Each call keeps its own answer and its own error; a connection that breaks fails all
calls that it carried, and each caller repeats its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis.asyncio as aioredis
from redis.exceptions import ConnectionError

T = TypeVar("T")
MOST_TOGETHER = 64
MOST_FLIGHTS = 2
LARGE_BYTES = 64 * 1024
"""A call with more than this goes alone: it must not hold up the small ones behind it."""

Argument = bytes | str


async def to_its_end(command: Awaitable[T]) -> T:
    """Await a command in a task of its own, so that a cancel reaches the caller and never the command.

    redis-py sends under asyncio.wait_for, which on Python 3.11 can lose a cancel: the caller's loop would go
    on, and whoever waits for its end would wait for ever. What was begun ends within its own time-outs.
    """
    task = asyncio.ensure_future(command)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise


@dataclass(slots=True)
class _Call:
    sha: str
    keys: int
    arguments: Sequence[Argument]
    answer: asyncio.Future[Any]


class ScriptLine:
    """EVALSHA for any number of concurrent callers of one event loop."""

    def __init__(self, client: aioredis.Redis) -> None:
        self._client = client
        self._waiting: deque[_Call] = deque()
        self._flights: set[asyncio.Task[None]] = set()
        self._alone: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def evalsha(self, sha: str, keys: int, arguments: Sequence[Argument]) -> Any:
        """The script's reply. Raises what redis-py raises, for this call or for its whole connection."""
        if self._is_closed:
            raise _closed()
        call = _Call(sha, keys, arguments, asyncio.get_running_loop().create_future())
        if sum(map(len, arguments)) > LARGE_BYTES:
            self._launch([call], self._alone)
        else:
            self._waiting.append(call)
            self._depart()
        return await call.answer

    def _depart(self) -> None:
        if self._waiting and len(self._flights) < MOST_FLIGHTS and not self._is_closed:
            self._launch(self._board(), self._flights)

    def _launch(self, calls: Sequence[_Call], group: set[asyncio.Task[None]]) -> None:
        flight = asyncio.create_task(self._fly(calls), name="scripts")
        group.add(flight)

        def land(landed: asyncio.Task[None]) -> None:
            group.discard(landed)
            # A flight that was cancelled before it began has answered nobody.
            _fail(calls, _closed())
            self._depart()

        flight.add_done_callback(land)

    async def _fly(self, calls: Sequence[_Call]) -> None:
        if not calls:
            return
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for call in calls:
                    pipe.evalsha(call.sha, call.keys, *call.arguments)
                replies = await pipe.execute(raise_on_error=False)
        except Exception as error:
            _fail(calls, error)
            return
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, Exception):
                _fail([call], reply)
            elif not call.answer.done():
                call.answer.set_result(reply)

    def _board(self) -> list[_Call]:
        boarding = [self._waiting.popleft() for _ in range(min(MOST_TOGETHER, len(self._waiting)))]
        # Callers that have given up meanwhile are not sent.
        return [call for call in boarding if not call.answer.done()]

    async def close(self) -> None:
        """End what flies; whoever waits is told that the connection is gone."""
        self._is_closed = True
        _fail(self._waiting, _closed())
        self._waiting.clear()
        flights = [*self._flights, *self._alone]
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)


def _closed() -> ConnectionError:
    return ConnectionError("this process closes its connections")


def _fail(calls: Iterable[_Call], error: Exception) -> None:
    for call in calls:
        if not call.answer.done():
            call.answer.set_exception(error)
