"""Packed records as tests read and write them, by the names and formats of the Lua helpers."""

from __future__ import annotations

import re
import struct
from typing import Any

import msgpack

from scheduler import scripts


def fields(helper: str, constant: str) -> tuple[str, list[str]]:
    """The struct format of a constant of lua/_lib/<helper>.lua and the names that it is unpacked into."""
    text = (scripts.LUA / "_lib" / f"{helper}.lua").read_text()
    layout = re.search(rf"^local {constant} = '<([ds]+)'$", text, re.MULTILINE)
    names = re.search(rf"local ([\w\s,]+?)\s=\s+struct\.unpack\({constant}, packed", text)
    assert layout and names, f"{helper}.lua has no {constant}"
    return layout[1], re.split(r",\s+", names[1])


def unpack(helper: str, constant: str, packed: bytes, at: int = 0) -> tuple[dict[str, Any], int]:
    """What a helper packed with this constant, and where the next begins."""
    layout, names = fields(helper, constant)
    values: dict[str, Any] = {}
    for kind, name in zip(layout, names, strict=False):
        if kind == "d":
            (values[name],) = struct.unpack_from("<d", packed, at)
            at += 8
        else:
            end = packed.index(b"\0", at)
            values[name], at = packed[at:end].decode(), end + 1
    return values, at


def pack(helper: str, constant: str, values: dict[str, Any]) -> bytes:
    layout, _ = fields(helper, constant)
    return b"".join(
        struct.pack("<d", value) if kind == "d" else value.encode() + b"\0"
        for kind, value in zip(layout, values.values(), strict=True)
    )


def unpack_job(packed: bytes) -> dict[str, Any]:
    fixed, at = unpack("job", "FIXED", packed)
    moving, at = unpack("job", "MOVING", packed, at)
    more = msgpack.unpackb(packed[at:]) if at < len(packed) else {}
    return fixed | moving | more


def pack_job(job: dict[str, Any]) -> bytes:
    """As `unpack_job` gave it, with changes."""
    parts = b""
    left = dict(job)
    for constant in ("FIXED", "MOVING"):
        layout, names = fields("job", constant)
        parts += pack("job", constant, {name: left.pop(name) for name in names[: len(layout)]})
    packed: bytes = parts + (msgpack.packb(left) if left else b"")
    return packed
