"""Sizes as people write them (`12GiB`, `512 MiB`, `2e9`), to and from whole bytes. Owns nothing else."""

from __future__ import annotations

import re

MAX_BYTES = 2**53 - 1
"""Above this a byte count is no longer exact in Lua's numbers, so none is accepted."""

_FACTORS = {
    "": 1, "b": 1,
    "k": 1024, "kib": 1024, "kb": 1000,
    "m": 1024**2, "mib": 1024**2, "mb": 1000**2,
    "g": 1024**3, "gib": 1024**3, "gb": 1000**3,
    "t": 1024**4, "tib": 1024**4, "tb": 1000**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d{1,16}(?:\.\d{1,9})?)\s*([a-z]{0,3})\s*", re.ASCII | re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Bytes out of `12GiB`, `1.5 GB`, `512M` (binary) or a plain number.

    Raises ValueError that names the value and the bound.
    """
    if isinstance(size, bool):
        raise ValueError(f"{size!r} is no size: write bytes, or for example '12GiB'")
    if isinstance(size, int):
        nbytes = size
    else:
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in _FACTORS:
            raise ValueError(f"{size!r} is no size: write bytes, or for example '12GiB'")
        nbytes = (
            round(float(match[1]) * _FACTORS[match[2].lower()])
            if "." in match[1]
            else (int(match[1]) * _FACTORS[match[2].lower()])
        )
    if not 0 < nbytes <= MAX_BYTES:
        raise ValueError(f"{size!r} is out of range: a size is from 1 to {MAX_BYTES} bytes")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """The shortest of B, KiB, MiB, GiB, TiB with at most two decimals: `1536 MiB` is `1.5GiB`."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.2f}".rstrip("0").rstrip(".") + unit
