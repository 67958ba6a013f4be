"""From what a model returns to bytes that may leave: plain values, finite, of bounded size.

Owns: the conversion of tensors, arrays and objects, and the check for NaN and infinity, done on the card
before a tensor leaves it. Its two refusals become `non_finite` and `output_too_large`; everything else
that cannot be sent is the model's error. Keys become what JSON makes of them, whatever form the caller takes:
text stays, numbers, booleans and None are written out; nothing else is a key, and no two may become one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

import msgpack
import pydantic
import torch

DEEPEST = 64
_AS_THEY_ARE = (bool, str, int)
_BYTES = (bytes, bytearray, memoryview)
_MAPS = (dict, Mapping)
_LISTS = (list, tuple, set, frozenset)
_HAS_EXTREMES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Unfit(Exception):
    """An output that must not leave. `code` is the job's error code."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def pack_output(value: Any, *, check_finite: bool, limit: int) -> bytes:
    """The msgpack of one output. Raises Unfit."""
    plain = to_plain(value, check_finite=check_finite, limit=limit)
    try:
        packed: bytes = msgpack.packb(plain)
    except (ValueError, OverflowError, TypeError) as error:
        raise Unfit("model_error", f"the output cannot be sent: {error}") from None
    if len(packed) > limit:
        raise Unfit("output_too_large", f"the output has {len(packed)} bytes; at most {limit} may leave")
    return packed


def to_plain(value: Any, *, check_finite: bool, limit: int, depth: int = 0, path: str = "output") -> Any:
    """JSON-able values and bytes out of tensors, arrays, pydantic models and dataclasses."""
    if value is None or isinstance(value, _AS_THEY_ARE):
        return value
    if isinstance(value, float):
        if check_finite and not math.isfinite(value):
            raise Unfit("non_finite", f"{path} is {value}")
        return float(value)
    if isinstance(value, _BYTES):
        return bytes(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value, check_finite=check_finite, limit=limit, path=path)
    if depth >= DEEPEST:
        raise Unfit("model_error", f"{path} is nested deeper than {DEEPEST}")
    # Most answers are dicts and lists: whether they are something rarer need not be asked first.
    if type(value) is not dict and type(value) is not list:
        if isinstance(value, pydantic.BaseModel):
            # A root model's value may be of any kind.
            return to_plain(
                value.model_dump(), check_finite=check_finite, limit=limit, depth=depth + 1, path=path
            )
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, _MAPS):
        plain: dict[str, Any] = {}
        for name, item in value.items():
            key = _key(name, path)
            if key in plain:
                raise Unfit("model_error", f"{path} has two keys that are both sent as {key!r}")
            plain[key] = to_plain(
                item, check_finite=check_finite, limit=limit, depth=depth + 1, path=f"{path}.{key}"
            )
        return plain
    if isinstance(value, _LISTS):
        return [
            to_plain(item, check_finite=check_finite, limit=limit, depth=depth + 1, path=f"{path}[{i}]")
            for i, item in enumerate(value)
        ]
    if hasattr(value, "__array__"):
        return _tensor(torch.as_tensor(value), check_finite=check_finite, limit=limit, path=path)
    raise Unfit("model_error", f"{path} is a {type(value).__name__}, which cannot be sent")


def _key(name: Any, path: str) -> str:
    """A key as JSON has it. Raises Unfit where there is no such."""
    if isinstance(name, str):
        # Without the text that a subclass (an enum) shows of itself.
        return str.__str__(name)
    if name is None or isinstance(name, bool | int | float):
        return json.dumps(name)
    if isinstance(name, numbers.Integral):
        return str(int(name))
    if isinstance(name, numbers.Real):
        return json.dumps(float(name))
    raise Unfit("model_error", f"{path} has a {type(name).__name__} as a key; keys are text or numbers")


def _tensor(tensor: torch.Tensor, *, check_finite: bool, limit: int, path: str) -> Any:
    # Every element takes a byte at least: refused here, before a list of Python objects fills the host.
    if tensor.numel() > limit:
        raise Unfit(
            "output_too_large", f"{path} has {tensor.numel()} elements; at most {limit} bytes may leave"
        )
    tensor = tensor.detach()
    if check_finite and not is_finite(tensor):
        raise Unfit("non_finite", f"{path}, a tensor of shape {tuple(tensor.shape)}, holds NaN or infinity")
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.tolist()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, by its extremes: isfinite would cost 1.75 times the tensor."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if values.dtype not in _HAS_EXTREMES:
        # The smallest type with the range of all of these: none of their finite values becomes infinite.
        values = values.to(torch.bfloat16)
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())
