"""Query parameters by the table of routes: a name that a route does not know is refused, and one given twice.

Does not own: what their values mean (each route), or the options of an infer call (`gateway.options`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from starlette.requests import Request

from gateway.hints import did_you_mean
from vramgate.errors import InvalidInput


def check_names(request: Request, known: Collection[str]) -> None:
    """Raises InvalidInput: what is ignored silently answers another question than the one that was asked."""
    counts = Counter(name for name, _ in request.query_params.multi_items())
    for name, times in counts.items():
        shown = name[:80]
        if name not in known:
            raise InvalidInput(
                f"unknown query parameter {shown!r}; {did_you_mean(name, known, otherwise=_listed(known))}",
                field=shown,
            )
        if times > 1:
            raise InvalidInput(f"query parameter {shown!r} is given {times} times", field=shown)


def _listed(known: Collection[str]) -> str:
    return f"there are {', '.join(known)}" if known else "this route has none"
