"""The HTTP protocol of a connection, with what uvicorn leaves unbounded bounded.

Owns: how large a request's head may be (431), how long one request may take to arrive (408 while its head is
open, else the connection is cut), and that one request is heard at a time. Does not own: the size of a body
(`gateway.body`), or connections that idle between requests (uvicorn's keep-alive).

A request that is sent before the answer to the one before it is dropped, and the answer says that the
connection closes, upon which a client sends it again elsewhere (RFC 9112, 9.3.2); a stream that has begun can
only close it at its end. uvicorn would stop reading until the first is answered, so that nobody noticed when
the client left, and its bytes stayed leased. Holding the second one back unread in memory was the other way;
hardly any client pipelines, and a bound on what is held would stop the reading again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.joining import JoiningTransport

HEAD_BYTES = 64 * 1024
ARRIVAL_S = 60.0
"""From a request's first byte to its last; also how long a new connection may say nothing."""

LINGER_S = 0.5
"""Closing at once, with unread bytes, resets the connection, and then the client never reads why."""

WATCH = "vramgate.watch"
"""Key in the scope of a function that calls another when the client is gone; a task that waits is dearer."""

Watch = Callable[[Callable[[], None]], Callable[[], object]]


class HeadTooLarge(Exception):
    """Ends the parser's work on a request; never leaves this module."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools that gives up requests too large, too slow or too early."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._fed = 0
        self._counted = 0
        self._is_arriving = False
        self._is_head_open = True
        self._is_deaf = False
        self._alarm: asyncio.TimerHandle | None = None
        self._left: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoiningTransport(transport, self.loop))
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        if self._left is not None:
            self._left()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._fed += len(data)
        super().data_received(data)
        if self._is_deaf:
            return
        # The parser keeps a header to itself until its line ends, so its callbacks cannot count it.
        if self._is_head_open and self._fed > HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self._is_arriving and self._alarm is None:
            self._arm()

    def on_message_begin(self) -> None:
        if self._is_answering():
            self._is_deaf = True
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        self.scope[WATCH] = self._watch  # type: ignore[literal-required]
        self._is_arriving = self._is_head_open = True
        self._counted = 0

    def on_url(self, url: bytes) -> None:
        if self._is_deaf:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_deaf:
            return
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_deaf:
            return
        self._is_head_open = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_deaf:
            return
        super().on_message_complete()
        self._is_arriving, self._is_head_open = False, True
        self._fed = 0
        self._disarm()

    def send_400_response(self, msg: str) -> None:
        if self._is_deaf:
            return
        if self._counted > HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._counted += size
        if self._counted > HEAD_BYTES:
            raise HeadTooLarge

    def _arm(self) -> None:
        self._disarm()
        self._alarm = self.loop.call_later(ARRIVAL_S, self._overdue)

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _overdue(self) -> None:
        self._alarm = None
        if self._is_arriving and self._is_head_open:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.close()

    def _watch(self, left: Callable[[], None]) -> Callable[[], None]:
        """Call `left` when the client of the request under way is gone; returns what ends that."""
        self._left = left
        # A body above the high-water mark has paused reading, and then nobody hears the client leave.
        self.flow.resume_reading()
        if self.cycle.disconnected:
            self.loop.call_soon(left)
        return self._unwatch

    def _unwatch(self) -> None:
        self._left = None

    def _is_answering(self) -> bool:
        """Whether a request that has arrived is still to be answered."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _refuse(self, status: HTTPStatus) -> None:
        self._is_deaf = True
        self._disarm()
        said = status.phrase.encode()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (status, said, len(said), said)
        )
        self.loop.call_later(LINGER_S, self.transport.close)
