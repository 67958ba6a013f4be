"""A transport that sends the head of an answer together with the body that follows upon it.

uvicorn writes them one by one, and the loop sends each write at once: two system calls, two packets, and a
client that wakes up for a head with nothing behind it.
"""

from __future__ import annotations

import asyncio
from typing import Any


class JoiningTransport(asyncio.Transport):
    """Holds a write back until the next one or the end of the loop's turn. Closing sends what is held."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._held: bytes | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._held is None:
            # A copy of what is none yet: its owner may change it before it is sent.
            self._held = bytes(data)
            self._loop.call_soon(self._send_held)
        else:
            held, self._held = self._held, None
            self._transport.writelines((held, data))

    def _send_held(self) -> None:
        held, self._held = self._held, None
        if held is not None and not self._transport.is_closing():
            self._transport.write(held)

    def close(self) -> None:
        self._send_held()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
