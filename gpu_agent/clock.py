"""Redis time, as far as an agent can know it between two answers.

Owns: the last time that the server told, and how long it has said nothing. Written by two threads, so that
the pair is replaced as one object.
"""

from __future__ import annotations

import time


class ServerClock:
    """The server's last word plus what the monotonic clock says has passed: never ahead of the server."""

    def __init__(self) -> None:
        self._told: tuple[int, float] | None = None

    def hear(self, now_ms: int) -> None:
        """An answer came that carries the server's time; the newest wins."""
        told = self._told
        if told is None or now_ms >= told[0]:
            self._told = (now_ms, time.monotonic())

    def now_ms(self) -> int | None:
        """The server's time; None before its first word."""
        told = self._told
        return None if told is None else told[0] + int((time.monotonic() - told[1]) * 1000)

    def silence_s(self) -> float:
        """Seconds since the server's last word; 0 before the first."""
        told = self._told
        return 0.0 if told is None else time.monotonic() - told[1]
