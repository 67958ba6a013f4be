"""The canonical form of inputs, and the fingerprint under which an idempotency key is bound."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import NoneType
from typing import Any

import msgpack

_LEAVES = frozenset({int, float, bool, NoneType, str, bytes})


def canonical(inputs: Mapping[str, Any]) -> bytes:
    """msgpack with sorted keys of decoded inputs; `bytes` fields as raw bytes, so that the encoding of a
    request does not matter.
    """
    packed: bytes = msgpack.packb(_sorted(dict(inputs)), use_bin_type=True)
    return packed


def _sorted(value: Any) -> Any:
    if not value:
        return value
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    # Nothing in a list of numbers or texts can be in another order; most lists are such.
    if isinstance(value, list) and not _LEAVES.issuperset(map(type, value)):
        return [_sorted(item) for item in value]
    return value


def fingerprint(model: str, inputs: bytes) -> str:
    """sha256, as 64 hex characters, of the model's name without a version and the canonical inputs."""
    name = model.split("@", 1)[0]
    return hashlib.sha256(name.encode() + b"\0" + inputs).hexdigest()
