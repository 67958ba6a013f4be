"""Commands that wait in the server: one at a time, on a connection of their own.

redis-py's client takes a connection out of its pool for each command, makes a task for its write and a timer
for its read, and looks after retries and telemetry. Where one such command follows upon the other, that costs
as much as answering an HTTP request does. Here the connection is kept and each command has one deadline.
"""

from __future__ import annotations

import asyncio
import builtins
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import TimeoutError

from scheduler.pipelining import pack_command


class BlockingLine:
    """`client` is its own, and has no socket timeout. timeout_s: of one command, from its sending to its
    reply.
    """

    def __init__(self, client: aioredis.Redis, *, timeout_s: float) -> None:
        self._client = client
        self._pool = client.connection_pool
        self._timeout_s = timeout_s
        self._connection: AbstractConnection | None = None

    async def ask(self, *command: bytes | str | int | float) -> Any:
        """The server's reply as RESP2 has it. Raises what redis-py raises; the next call connects again."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._connection is None:
                    self._connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
                connection = self._connection
                await self._pool.ensure_connection(connection)
                await connection.send_packed_command([pack_command(*command)])
                # Whatever ends this without a reply also ends the connection, so that none is left over.
                return await connection.read_response()
        except builtins.TimeoutError:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from None

    async def close(self) -> None:
        await self._client.aclose()
        await self._pool.disconnect()
