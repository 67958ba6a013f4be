"""A stand-in for a gateway that shows what a proxy did to a request: it records, dies or streams on command.

The verdict is the last word of the path: `echo` answers, `dies` closes without an answer, `silent` never
answers, `streams` sends one event at once and a second one when `release` is set.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body_bytes: int

    @property
    def verdict(self) -> str:
        return self.target.partition("?")[0].rsplit("/", 1)[-1]


@dataclass(slots=True)
class StandIn:
    """One listening stand-in; `left` counts the callers that closed before their answer."""

    name: str
    port: int = 0
    received: list[Received] = field(default_factory=list)
    left: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and cut every connection, as a killed gateway does."""
        if self._server is None:
            return
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()
        self._server = None

    def count(self, verdict: str) -> int:
        return sum(request.verdict == verdict for request in self.received)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while request := await _read(reader):
                self.received.append(request)
                if not await self._answer(request, reader, writer):
                    return
        except ConnectionError:
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer as the path says; whether the connection stays open."""
        if request.verdict == "dies":
            return False
        if request.verdict == "silent":
            await reader.read()
            self.left += 1
            return False
        if request.verdict == "streams":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            writer.write(b"event: queued\ndata: {}\n\n")
            await writer.drain()
            await self.release.wait()
            writer.write(b"event: done\ndata: {}\n\n")
            await writer.drain()
            return False
        body = json.dumps({"gateway": self.name}).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return True


async def _read(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", 0))
    remaining = length
    while remaining:
        remaining -= len(await reader.readexactly(min(remaining, 2**16)))
    return Received(method=method, target=target, headers=headers, body_bytes=length)
