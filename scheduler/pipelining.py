"""Script calls that are ready at the same time go to the server together.

The Python client is the ceiling of a gateway, not the server: one write and one read for a dozen calls cost
little more than for one. Each call keeps its own answer and its own error; a connection that breaks fails all
calls that it carried, and each caller repeats its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio as aioredis

MOST_TOGETHER = 64
MOST_FLIGHTS = 2
LARGE_BYTES = 64 * 1024
"""A call with more than this goes alone: it must not hold up the small ones behind it."""

Argument = bytes | str


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

    async def evalsha(self, sha: str, keys: int, arguments: Sequence[Argument]) -> Any:
        """The script's reply. Raises what redis-py raises, for this call or for its whole connection."""
        if sum(map(len, arguments)) > LARGE_BYTES:
            return await self._client.evalsha(sha, keys, *arguments)
        call = _Call(sha, keys, arguments, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._depart()
        return await call.answer

    def _depart(self) -> None:
        if self._waiting and len(self._flights) < MOST_FLIGHTS:
            flight = asyncio.create_task(self._fly(), name="scripts")
            self._flights.add(flight)
            flight.add_done_callback(self._land)

    def _land(self, flight: asyncio.Task[None]) -> None:
        self._flights.discard(flight)
        self._depart()

    async def _fly(self) -> None:
        # Callers that have given up meanwhile are not sent.
        calls = [call for call in self._board() if not call.answer.done()]
        if not calls:
            return
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for call in calls:
                    pipe.evalsha(call.sha, call.keys, *call.arguments)
                replies = await pipe.execute(raise_on_error=False)
        except BaseException as error:
            for call in calls:
                _fail(call, error)
            if not isinstance(error, Exception):
                raise
            return
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, Exception):
                _fail(call, reply)
            elif not call.answer.done():
                call.answer.set_result(reply)

    def _board(self) -> list[_Call]:
        return [self._waiting.popleft() for _ in range(min(MOST_TOGETHER, len(self._waiting)))]

    async def close(self) -> None:
        """Fail what waits; end what flies."""
        for flight in list(self._flights):
            flight.cancel()
        await asyncio.gather(*self._flights, return_exceptions=True)
        while self._waiting:
            self._waiting.popleft().answer.cancel()


def _fail(call: _Call, error: BaseException) -> None:
    if call.answer.done():
        return
    if isinstance(error, Exception):
        call.answer.set_exception(error)
    else:
        call.answer.cancel()
