"""Values of a body as the schema wants them: bytes out of base64 or bin, nested lists out of packed arrays,
and what a part of a form stands for.

Does not own: whether they are valid (`gateway.validation`), or where a schema wants what (`gateway.shapes`).
"""

from __future__ import annotations

import binascii
import itertools
import math
import struct
from collections.abc import Mapping
from types import NoneType
from typing import Any

from gateway.parsing import Allowance, parse_json
from gateway.shapes import ANYTHING, Shape
from vramgate.errors import InvalidInput, Malformed

_SCALARS = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B", "bool": "?",
}  # fmt: skip
_ARRAY = {"dtype", "shape", "data"}
_URL_SAFE = str.maketrans("-_", "+/")
_NUMBERS = frozenset({int, float, bool, NoneType})


def from_json(shape: Shape, value: Any, path: str) -> Any:
    """Bytes in place of base64. Raises InvalidInput."""
    if not shape.leads_to_bytes:
        return value
    # Where text is as welcome as bytes, text is what was sent.
    if isinstance(value, str) and shape.is_bytes and not shape.is_text:
        try:
            return _bounded(shape, binascii.a2b_base64(value.translate(_URL_SAFE), strict_mode=True), path)
        except (binascii.Error, ValueError) as error:
            raise InvalidInput(f"{path} must be base64: {error}", field=path) from None
    if isinstance(value, dict):
        return {name: from_json(shape.of(name), item, f"{path}.{name}") for name, item in value.items()}
    if isinstance(value, list) and shape.items is not None:
        return [from_json(shape.items, item, f"{path}.{at}") for at, item in enumerate(value)]
    return value


def from_binary(shape: Shape, value: Any, path: str, allowance: Allowance) -> Any:
    """Lists in place of {dtype, shape, data}. Raises InvalidInput, and TooLarge for too many elements."""
    if not (shape.leads_to_bytes or shape.leads_to_arrays):
        return value
    if isinstance(value, bytes):
        return _bounded(shape, value, path) if shape.is_bytes else value
    if isinstance(value, str) and shape.is_bytes and not shape.is_text:
        raise InvalidInput(f"{path} must be bytes (bin), got text", field=path)
    if isinstance(value, dict):
        if shape.is_array and value.keys() == _ARRAY:
            return _unpack_array(value, path, allowance)
        return {
            name: from_binary(shape.of(name), item, f"{path}.{name}", allowance)
            for name, item in value.items()
        }
    if isinstance(value, list) and not _NUMBERS.issuperset(map(type, value)):
        items = shape.items or ANYTHING
        return [from_binary(items, item, f"{path}.{at}", allowance) for at, item in enumerate(value)]
    return value


def from_part(shape: Shape, value: Any, path: str, nesting: int, allowance: Allowance) -> Any:
    """A part of a form as the value that the schema wants: bytes, text, or else JSON."""
    if isinstance(value, list):
        items = shape.items or ANYTHING
        return [from_part(items, item, f"{path}.{at}", nesting, allowance) for at, item in enumerate(value)]
    if shape.is_array and shape.items is not None and (isinstance(value, bytes) or shape.items.is_bytes):
        return [from_part(shape.items, value, f"{path}.0", nesting, allowance)]
    if shape.is_bytes:
        return value if isinstance(value, bytes) else value.encode()
    if shape.is_text:
        return value if isinstance(value, str) else _as_text(value, path)
    try:
        content = value if isinstance(value, bytes) else value.encode()
        return parse_json(content, nesting, allowance, what=path)
    except Malformed as error:
        raise InvalidInput(error.detail, field=path) from None


def shadow(shape: Shape, value: Any) -> Any:
    """`value` as the validator can see it:

    text in place of bytes where bytes belong, and no text elsewhere.
    """
    if isinstance(value, bytes):
        return "" if shape.is_bytes else {"bytes": len(value)}
    if not value:
        return value
    if isinstance(value, dict):
        return {name: shadow(shape.of(name), item) for name, item in value.items()}
    if isinstance(value, list) and not _NUMBERS.issuperset(map(type, value)):
        return [shadow(shape.items or ANYTHING, item) for item in value]
    return value


def _bounded(shape: Shape, value: bytes, path: str) -> bytes:
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        most = "any number" if shape.most is None else shape.most
        raise InvalidInput(f"{path} must have {shape.least} to {most} bytes, it has {len(value)}", field=path)
    return value


def _unpack_array(value: Mapping[str, Any], path: str, allowance: Allowance) -> Any:
    """Nested lists out of {dtype, shape, data}: C order, little endian."""
    code = _SCALARS.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    shape, data = value["shape"], value["data"]
    if code is None:
        raise InvalidInput(f"{path}.dtype must be one of {', '.join(_SCALARS)}", field=f"{path}.dtype")
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= 16
        or not all(type(n) is int and n >= 1 for n in shape)
    ):
        raise InvalidInput(f"{path}.shape must be a list of 1 to 16 sizes from 1", field=f"{path}.shape")
    count = math.prod(shape)
    if not isinstance(data, bytes) or len(data) != count * struct.calcsize(f"<{code}"):
        raise InvalidInput(f"{path}.data must be {count} values of {value['dtype']}", field=f"{path}.data")
    # The lists on each level, and the elements.
    allowance.take(sum(itertools.accumulate(shape, lambda lists, size: lists * size)))
    flat: list[Any] = list(struct.unpack(f"<{count}{code}", data))
    if code in "def" and not all(map(math.isfinite, flat)):
        raise InvalidInput(f"{path}.data holds NaN or infinity", field=f"{path}.data")
    for size in reversed(shape[1:]):
        flat = [flat[at : at + size] for at in range(0, len(flat), size)]
    return flat


def _as_text(value: bytes, path: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} must be text in UTF-8", field=path) from None
