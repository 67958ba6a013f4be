"""Where one gateway worker stands between its start and its end.

Owns: whether it drains, and the moment at which those who still wait are sent away. Does not own: signals and
sockets (`gateway.serve`), nor what the ones who are sent away are told (`gateway.infer`).
"""

from __future__ import annotations

from collections.abc import Callable


class Lifecycle:
    """started -> draining (still listening, says so on /readyz) -> closing (nobody waits any more)."""

    def __init__(self) -> None:
        self.is_started = False
        self.is_draining = False
        self.is_closing = False
        self._is_refusing_listeners = False
        self._waiting: dict[int, Callable[[], None]] = {}
        self._listening: dict[int, Callable[[], None]] = {}

    @property
    def waiting(self) -> int:
        """How many requests wait here for an outcome that nobody else will tell them."""
        return len(self._waiting)

    def drain(self) -> None:
        self.is_draining = True

    def send_listeners_away(self) -> None:
        """Those who only listen go on at another gateway; the end need not wait for them."""
        self.is_draining = self._is_refusing_listeners = True
        for send_away in tuple(self._listening.values()):
            send_away()

    def close(self) -> None:
        """Send everybody away who waits, and whoever comes to wait after this."""
        self.send_listeners_away()
        self.is_closing = True
        for send_away in tuple(self._waiting.values()):
            send_away()

    def wait_here(self, send_away: Callable[[], None], *, is_listener: bool = False) -> int:
        """Enter the list of those who wait; returns the ticket to `leave` with."""
        ticket = id(send_away)
        (self._listening if is_listener else self._waiting)[ticket] = send_away
        if self.is_closing or (is_listener and self._is_refusing_listeners):
            send_away()
        return ticket

    def leave(self, ticket: int) -> None:
        self._waiting.pop(ticket, None)
        self._listening.pop(ticket, None)
