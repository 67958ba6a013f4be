"""Script calls that are ready at the same time go to the server together.

The Python client is the ceiling of a gateway, not the server: one write and one read for a dozen calls cost
little more than for one. Each call keeps its own answer and its own error; a connection that breaks fails all
calls that it carried, and each caller repeats its own.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import deque
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import hiredis
import redis.asyncio as aioredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, MaxConnectionsError, ResponseError, TimeoutError

T = TypeVar("T")
MOST_TOGETHER = 64
MOST_FLIGHTS = 2
LARGE_BYTES = 64 * 1024
"""A call with more than this goes alone: it must not hold up the small ones behind it."""

Argument = bytes | str


def pack_command(*command: bytes | str | int | float) -> bytes:
    """A command as it is sent. In C: redis-py's own packing costs six times as much."""
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


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
    """EVALSHA for any number of concurrent callers of one event loop. `client` is its own, and has no socket
    timeout: one deadline for a flight costs less than one for each write and each read.
    """

    def __init__(self, client: aioredis.Redis, *, timeout_s: float) -> None:
        self._client = client
        self._pool = client.connection_pool
        self._timeout_s = timeout_s
        self._idle: list[AbstractConnection] = []
        self._waiting: deque[_Call] = deque()
        self._flights: set[asyncio.Task[None]] = set()
        self._alone: set[asyncio.Task[None]] = set()
        # However many large calls there are, flights find a connection.
        self._room_alone = asyncio.Semaphore(max(1, self._pool.max_connections - MOST_FLIGHTS))
        self._is_closed = False

    async def evalsha(self, sha: str, keys: int, arguments: Sequence[Argument]) -> Any:
        """The script's reply. Raises what redis-py raises, for this call or for its whole connection."""
        if self._is_closed:
            raise _closed()
        call = _Call(sha, keys, arguments, asyncio.get_running_loop().create_future())
        if sum(map(len, arguments)) > LARGE_BYTES:
            self._launch(self._fly_alone(call), [call], self._alone)
        else:
            self._waiting.append(call)
            self._depart()
        return await call.answer

    def _depart(self) -> None:
        if self._waiting and len(self._flights) < MOST_FLIGHTS and not self._is_closed:
            boarding = self._board()
            self._launch(self._fly(boarding), boarding, self._flights)

    def _launch(
        self, flying: Coroutine[Any, Any, None], calls: Sequence[_Call], group: set[asyncio.Task[None]]
    ) -> None:
        flight = asyncio.create_task(flying, name="scripts")
        group.add(flight)

        def land(landed: asyncio.Task[None]) -> None:
            group.discard(landed)
            if landed.cancelled():
                # Before it began it has answered nobody.
                _fail(calls, _closed())
            self._depart()

        flight.add_done_callback(land)

    async def _fly_alone(self, call: _Call) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._room_alone.acquire()
        except builtins.TimeoutError:
            _fail([call], MaxConnectionsError("large calls before this one have taken all connections"))
            return
        try:
            await self._fly([call])
        finally:
            self._room_alone.release()

    async def _fly(self, calls: Sequence[_Call]) -> None:
        try:
            if calls:
                async with asyncio.timeout(self._timeout_s) as limit:
                    await self._carry(calls, limit)
        except builtins.TimeoutError:
            _fail(calls, TimeoutError(f"no answer within {self._timeout_s:g} s"))
        except Exception as error:
            _fail(calls, error)

    async def _carry(self, calls: Sequence[_Call], limit: asyncio.Timeout) -> None:
        connection = self._idle.pop() if self._idle else await self._from_pool()
        is_whole = False
        try:
            # Here, so that one whose server is gone comes back: it counts in the pool until it is released.
            await self._pool.ensure_connection(connection)
            packed = [pack_command("EVALSHA", call.sha, call.keys, *call.arguments) for call in calls]
            await connection.send_packed_command(packed)
            for call in calls:
                try:
                    reply = await connection.read_response()
                except ResponseError as error:
                    _fail([call], error)
                else:
                    if not call.answer.done():
                        call.answer.set_result(reply)
                self._go_on(limit)
            is_whole = True
        finally:
            if not is_whole:
                # Answers that are still to come belong to nobody any more.
                await connection.disconnect(nowait=True)
            if len(self._idle) < MOST_FLIGHTS:
                self._idle.append(connection)
            else:
                await self._pool.release(connection)

    async def _from_pool(self) -> AbstractConnection:
        connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        return connection

    def _go_on(self, limit: asyncio.Timeout) -> None:
        """The time-out is that of one answer; a flight of many may take longer as long as they come."""
        now, ends = asyncio.get_running_loop().time(), limit.when()
        if ends is not None and ends - now < self._timeout_s / 2:
            limit.reschedule(now + self._timeout_s)

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
        await self._client.aclose()
        await self._pool.disconnect()


def _closed() -> ConnectionError:
    return ConnectionError("this process closes its connections")


def _fail(calls: Iterable[_Call], error: Exception) -> None:
    for call in calls:
        if not call.answer.done():
            call.answer.set_exception(error)
