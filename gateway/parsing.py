"""Documents out of bytes, JSON and msgpack: strict, and bounded before they cost anything.

Owns: how many values a body may hold, how deep they nest, numbers that are none, members that stand twice.
A value costs about a microsecond and up to 100 bytes on its way to the ledger however few bytes it has in the
body, so that the size of a body bounds nothing: 32 MiB of msgpack hold 33 million empty maps. Does not own:
what a document means (`gateway.body`, `gateway.validation`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from types import NoneType
from typing import Any

import msgpack
import orjson

from vramgate.errors import Malformed, Refused, TooLarge

NAME_VALUES = 4
"""A name counts as so many values: names are hashed, compared and sorted, all of an object in one go."""

_MARKS = b",:[{"
"""Each stands before one value or one name. Inside of strings they stand for nothing."""

_NESTED = frozenset({dict, list})
_TEXT = frozenset({str})
_NUMBERS = frozenset({int, float, bool})
_KINDS = _NUMBERS | _NESTED | {NoneType, str, bytes}


class Allowance:
    """How many values one body may still hold."""

    def __init__(self, most: int, *, used: int = 0) -> None:
        self.most, self.left = most, most - used

    def take(self, count: int) -> None:
        """Raises TooLarge once more was taken than there was."""
        self.left -= count
        if self.left < 0:
            raise self.exceeded()

    def exceeded(self) -> Refused:
        return TooLarge(
            f"the body holds more than {self.most} values (limits.values); send large arrays in several "
            "requests, or as a file in a field of bytes",
            limit_values=self.most,
        )


def count_values(content: bytes) -> int:
    """Values of a JSON text at the speed of a copy; too many where strings hold commas and the like."""
    marks = len(content) - len(content.translate(None, _MARKS))
    return marks + (NAME_VALUES - 1) * content.count(b":")


def parse_json(content: bytes, nesting: int, allowance: Allowance, *, what: str = "the body") -> Any:
    """Strict JSON: no NaN, no number beyond a double, no member twice. Raises Malformed, TooLarge."""
    values = count_values(content)
    allowance.take(values if values <= allowance.left else count_values(_without_strings(content, allowance)))
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"{what} is not JSON: {error}" if content else f"{what} is empty") from None
    members = content.count(b":")
    # As many brackets as levels, at the most: nearly every body is spared most of the walk.
    is_flat = content.count(b"[") + content.count(b"{") <= nesting
    found = _count_members(document, nesting, members if is_flat else None, what)
    if found < members and found < _without_strings(content, allowance).count(b":"):
        raise Malformed(f"{what} has a member twice in one object, and only one of them could be read")
    return document


def _without_strings(content: bytes, allowance: Allowance) -> bytes:
    """A JSON text without its strings."""
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Each string is a value or a name: so many of them are too many, and would take memory to cut out.
    if plain.count(b'"') > 2 * (allowance.most + 1):
        raise allowance.exceeded()
    return b"".join(plain.split(b'"')[::2])


def _count_members(document: Any, nesting: int, enough: int | None, what: str) -> int:
    """Members of all objects. With `enough`, the walk ends where so many were found; there are no more."""
    members = 0
    level: list[Any] = [document]
    for _ in range(nesting):
        below: list[Any] = []
        for value in level:
            if type(value) is dict:
                members += len(value)
                below += value.values()
            elif type(value) is list:
                below += value
        if not below or members == enough:
            return members
        level = below
    if not _NESTED.isdisjoint(map(type, level)):
        raise Malformed(f"{what} is nested deeper than {nesting} levels")
    return members


def parse_msgpack(content: bytes, nesting: int, allowance: Allowance) -> Any:
    """msgpack with text as keys, none of them twice, finite numbers, and no extension types.

    Raises Malformed, TooLarge.
    """
    reading = _Reading(allowance)
    try:
        document = msgpack.unpackb(
            content,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=reading.take_map,
            list_hook=reading.take_array,
            max_array_len=allowance.left,
            max_map_len=allowance.left,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        if "exceeds max_" in str(error):
            raise allowance.exceeded() from None
        raise Malformed(f"the body is not msgpack: {str(error) or type(error).__name__}"[:300]) from None
    _count_members(document, nesting, None, "the body")
    return document


class _Reading:
    """Counts and checks what msgpack has read, container by container from the inside, while it reads on."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance

    def take_array(self, items: list[Any]) -> list[Any]:
        if items:
            self._allowance.take(len(items))
            _check_leaves(items)
        return items

    def take_map(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        members = dict(pairs)
        if members:
            self._allowance.take((1 + NAME_VALUES) * len(pairs))
            if not _TEXT.issuperset(map(type, members)):
                raise Malformed("the body has a map key that is not text")
            if len(members) < len(pairs):
                raise Malformed("the body has a key twice in one map, and only one of them could be read")
            _check_leaves(members.values())
        return members


def _check_leaves(values: Collection[Any]) -> None:
    kinds = set(map(type, values))
    if not kinds <= _KINDS:
        odd = min(kind.__name__ for kind in kinds - _KINDS)
        raise Malformed(f"the body holds a {odd}, which no schema has a word for")
    if float in kinds:
        numbers: Iterable[float] = values
        if not kinds <= _NUMBERS:
            numbers = (value for value in values if type(value) is float)
        if not all(map(math.isfinite, numbers)):
            raise Malformed("the body holds NaN or infinity")
