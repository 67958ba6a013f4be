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
    layout = re.search(rf"^local (?:[A-Z]+, )*?{constant}\b.* = .*?'<([ds]+)'", text, re.MULTILINE)
    names = re.search(rf"local ([\w\s,]+?)\s=\s+struct\.unpack\({constant}, packed", text)
    assert layout and names, f"{helper}.lua has no {constant}"
    return layout[1], re.split(r",\s+", names[1])


def places() -> tuple[str, list[str]]:
    """The struct format of a job's record and its fields in order, as lua/_lib/job.lua names their places."""
    text = (scripts.LUA / "_lib" / "job.lua").read_text()
    layout = re.search(r"^local JOB, BEGUN = '<([ds]+)'", text, re.MULTILINE)
    named = re.findall(r"^local ([A-Z, ]+) = ([\d, ]+)$", text, re.MULTILINE)
    numbers = {
        int(at): name.lower()
        for names, ats in named[:2]
        for name, at in zip(names.split(", "), ats.split(", "), strict=True)
    }
    assert layout and list(numbers) == list(range(1, len(layout[1]) + 1))
    return layout[1], list(numbers.values())


def unpack(helper: str, constant: str, packed: bytes) -> tuple[dict[str, Any], int]:
    """What a helper packed with this constant, and where the next begins."""
    return _unpack(*fields(helper, constant), packed)


def _unpack(layout: str, names: list[str], packed: bytes) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    at = 0
    for kind, name in zip(layout, names, strict=False):
        if kind == "d":
            (values[name],) = struct.unpack_from("<d", packed, at)
            at += 8
        else:
            end = packed.index(b"\0", at)
            values[name], at = packed[at:end].decode(), end + 1
    return values, at


def pack(helper: str, constant: str, values: dict[str, Any]) -> bytes:
    return _pack(fields(helper, constant)[0], values)


def _pack(layout: str, values: dict[str, Any]) -> bytes:
    return b"".join(
        struct.pack("<d", value) if kind == "d" else value.encode() + b"\0"
        for kind, value in zip(layout, values.values(), strict=True)
    )


def unpack_job(packed: bytes) -> dict[str, Any]:
    values, at = _unpack(*places(), packed)
    more = msgpack.unpackb(packed[at:]) if at < len(packed) else {}
    return values | more


def pack_job(job: dict[str, Any]) -> bytes:
    """As `unpack_job` gave it, with changes."""
    layout, names = places()
    more = {name: value for name, value in job.items() if name not in names}
    packed: bytes = _pack(layout, {name: job[name] for name in names}) + (
        msgpack.packb(more) if more else b""
    )
    return packed
