"""Records as the scripts pack them: doubles, strings that end with a zero byte, and a msgpack map of what few
jobs have. The same names in the same order as `lua/_lib/job.lua` and `lua/_lib/lease.lua`, held equal by a
test.

The client's part of a job's record is packed here and stored as it is; what a script tells of a job is its
record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgpack

from scheduler.submissions import SubmitRequest
from vramgate import errors

LAYOUT: Final = 1
"""The number of the layout of all that scripts pack: jobs, cards, leases, limits, rates, the clock. Raised
with each change of one; a pool is served in one layout at a time. It ends the name of the field under which
each script notes the time: no call writes more for it, and what forgets the pool forgets it as well."""

CLIENT_NUMBERS: Final = ("n", "u", "p", "pb", "wl", "rl", "tl", "sy")
CLIENT_STRINGS: Final = ("m", "c", "t", "k", "gw", "rq")
FIXED_NUMBERS: Final = ("ct", "sc")
MOVING_NUMBERS: Final = ("ws", "at", "gr", "rs", "lb", "st", "pk", "rt", "rb")
MOVING_STRINGS: Final = ("s", "d", "l", "ve", "w")

Job = Mapping[str, Any]


def other_layouts(meta: Iterable[bytes]) -> list[str]:
    """The layouts but ours that a pool is written in. meta: the names of the fields of its meta key."""
    clocks = (field.decode() for field in meta if field.partition(b":")[0] == b"clock")
    return [clock.partition(":")[2] or "0" for clock in clocks if clock != f"clock:{LAYOUT}"]


def _texts(*values: str) -> bytes:
    """Strings one after the other; a zero byte within one would end it too early."""
    packed = "\0".join((*values, ""))
    if packed.count("\0") > len(values):
        packed = "\0".join((*(value.replace("\0", "") for value in values), ""))
    return packed.encode()


def pack_submit(request: SubmitRequest, digest: str) -> bytes:
    """The arguments of submit. digest: what names the request's idempotency key, empty when it has none."""
    numbers = (
        request.lease_bytes,
        request.units,
        request.priority,
        len(request.inputs),
        request.max_wait_ms,
        request.run_timeout_ms,
        request.total_timeout_ms,
        not request.is_async,
    )
    gateway = "" if request.is_async or digest else request.worker
    model = request.model.partition("@")[0]
    strings = (model, request.model, request.tenant, digest, gateway, request.request_id or "")
    return b"".join(
        [
            struct.pack("<8d", *numbers),
            _texts(*strings, request.worker),
            struct.pack("<d", request.wants_events),
            _texts(request.fingerprint or ""),
        ]
    )


class _Reader:
    """Values one after the other."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def numbers(self, names: tuple[str, ...]) -> dict[str, float]:
        size = 8 * len(names)
        values = struct.unpack(f"<{len(names)}d", self._packed[:size])
        self._packed = self._packed[size:]
        return dict(zip(names, values, strict=True))

    def strings(self, names: tuple[str, ...]) -> dict[str, str]:
        *values, self._packed = self._packed.split(b"\0", len(names))
        return {name: value.decode(errors="replace") for name, value in zip(names, values, strict=True)}

    def rest(self) -> bytes:
        return self._packed


def unpack_job(packed: bytes) -> Job:
    """A job's record by the short names of `lua/_lib/job.lua`. Raises errors.Internal for what is none."""
    reader = _Reader(packed)
    try:
        job: dict[str, Any] = {
            **reader.numbers(CLIENT_NUMBERS),
            **reader.strings(CLIENT_STRINGS),
            **reader.numbers(FIXED_NUMBERS),
            **reader.numbers(MOVING_NUMBERS),
            **reader.strings(MOVING_STRINGS),
        }
        if more := reader.rest():
            job |= msgpack.unpackb(more, raw=False, unicode_errors="replace", strict_map_key=False)
    except (struct.error, ValueError, TypeError) as error:
        raise errors.Internal(f"{len(packed)} bytes are no record of a job: {error}") from None
    return job
