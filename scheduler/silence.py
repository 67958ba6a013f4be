"""A server that does not answer: said when it falls silent, again now and then, and when it is back.

Does not own: what is logged, and how it is found out.
"""

from __future__ import annotations

import time

REMIND_S = 30.0
"""Between two lines of one silence: whoever looks at the end of a log sees that it lasts."""


class Silence:
    """One silence after another of one server."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._said = 0.0

    def lasts(self) -> int | None:
        """There was no answer. Seconds of this silence where it is time to say so, else None."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._said < REMIND_S:
            return None
        self._said = now
        return round(now - self._since)

    def ended(self) -> int | None:
        """There was an answer. Seconds of the silence that it ends, None where there was none."""
        since, self._since = self._since, None
        return None if since is None else round(time.monotonic() - since)
