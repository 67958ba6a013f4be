"""Sizes (`12GiB`) and durations (`10m`) as people write them, and back."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_SIZE_UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: int | str) -> int:
    """Bytes of `12GiB`, `512 MiB`, `1.5gb` or a plain number of bytes. Raises ValueError naming the text."""
    if isinstance(value, int) and not isinstance(value, bool):
        number, factor = float(value), 1
    else:
        match = _QUANTITY.fullmatch(str(value))
        factor = _SIZE_UNITS.get((match[2] or "b").lower(), 0) if match else 0
        if not match or not factor:
            raise ValueError(f"{value!r} is not a size; write for example 12GiB, 512MiB or a number of bytes")
        number = float(match[1])
    size = int(number * factor)
    if not 0 <= size < 2**53:
        raise ValueError(f"{value!r} is not a size between 0 and 2**53 bytes")
    return size


def parse_duration(value: float | str) -> float:
    """Seconds of `10m`, `1.5h`, `250ms` or a plain number of seconds. Raises ValueError naming the text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _QUANTITY.fullmatch(str(value))
    factor = _SECONDS.get((match[2] or "s").lower(), 0.0) if match else 0.0
    if not match or not factor:
        raise ValueError(
            f"{value!r} is not a duration; write for example 10m, 30s, 250ms or a number of seconds"
        )
    return float(match[1]) * factor


def seconds_up(ms: int) -> int:
    """Whole seconds that are no less than `ms`: a caller who comes back after them is not too early."""
    return -(-ms // 1000)


def format_size(size: int) -> str:
    """For people: the largest binary unit that keeps the number at 1 or above, two decimals at most."""
    sign, rest = ("-", -size) if size < 0 else ("", size)
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if rest >= factor:
            return f"{sign}{rest / factor:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{sign}{rest} B"


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _duration(value: Any) -> Any:
    return parse_duration(value) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_size)]
Seconds = Annotated[float, BeforeValidator(_duration)]
