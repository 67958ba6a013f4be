"""What a refusal of a name says to help: the nearest of the names that are known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 80
ALIKE = 0.5


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """The known name that is most like this one, or `otherwise` where none is."""
    near = difflib.get_close_matches(name[:LONGEST], list(known), 1, ALIKE)
    return f"did you mean {near[0]}?" if near else otherwise
