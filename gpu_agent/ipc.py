"""Messages between supervisor and child: msgpack behind a length, over a socket pair.

Owns the framing, on both sides: blocking for the child's threads; the supervisor, which must never be held
up by a child, takes the pieces as they come. Does not own what the messages mean: `child_process` and
`child.main` do.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

_HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 30
"""Twice the largest input or output that can be configured. What a batch has more of is sent in several."""
_PIECE = 1 << 16


class Broken(Exception):
    """The other end sent something that is no frame."""


def pack_frame(message: Mapping[str, Any]) -> bytes:
    """One message as it goes over the socket. Raises ValueError for one that is too large, and what msgpack
    raises for a value that it cannot hold.
    """
    body: bytes = msgpack.packb(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes; at most {MAX_FRAME} are sent")
    return _HEADER.pack(len(body)) + body


def _length(header: bytes | bytearray, at: int = 0) -> int:
    (length,) = _HEADER.unpack_from(header, at)
    if length > MAX_FRAME:
        raise Broken(f"a frame of {length} bytes is announced; at most {MAX_FRAME} are sent")
    return int(length)


class Channel:
    """The blocking end: `send` from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._frames = Frames()
        self._received: deque[dict[str, Any]] = deque()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError when the other end is gone."""
        frame = pack_frame(message)
        with self._sending:
            self._socket.sendall(frame)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other end closed. Part of one is kept when the time is over."""
        while not self._received:
            piece = self._socket.recv(_PIECE)
            if not piece:
                return None
            self._received.extend(self._frames.feed(piece))
        return self._received.popleft()

    def set_timeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._socket.close()


class Frames:
    """Messages out of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._wanted = _HEADER.size

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages that these bytes complete; take them all before more is fed. Raises Broken."""
        self._held += data
        at = 0
        while len(self._held) - at >= self._wanted:
            begin = at + _HEADER.size
            end = begin + _length(self._held, at)
            if end > len(self._held):
                self._wanted = end - at
                break
            # Closed at once: a buffer that is looked at cannot grow.
            with memoryview(self._held) as held, held[begin:end] as body:
                message: dict[str, Any] = msgpack.unpackb(body, strict_map_key=False)
            at, self._wanted = end, _HEADER.size
            yield message
        del self._held[:at]
