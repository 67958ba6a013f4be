"""What is known of an operation before it runs: whether its outputs are new, and whether it is a kernel.

Owns the reading of torch's operator schemas and of arguments and results. Counts nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_aten = torch.ops.aten


class Traits(enum.IntFlag):
    """What an operation is like; none of them: a kernel whose outputs are new."""

    PLAIN = 0
    COMPOSITE = 1
    """Made of other operations. In inference mode it comes whole, and would hide what it makes inside."""
    ALIASING = 2
    """Outputs may be inputs, or views of them."""
    FIRST_SIGHT = 4
    """Shows a storage that was made out of the dispatcher's sight."""
    SIZED = 8
    """Makes a tensor whose size is the first argument."""


_FIRST_SIGHT = frozenset(
    {_aten.lift_fresh.default, _aten.lift.default}
)  # torch.tensor() fills its storage itself
_UNDECLARED = frozenset({_aten._unsafe_view.default})
_SIZED = frozenset(
    {
        _aten.empty.memory_format,
        _aten.zeros.default,
        _aten.ones.default,
        _aten.full.default,
        _aten.rand.default,
        _aten.rand.generator,
        _aten.randn.default,
        _aten.randn.generator,
    }
)
_known: dict[Any, Traits] = {}


def traits_of(func: Any) -> Traits:
    """The traits of an operator overload; worked out once for each."""
    traits = _known.get(func)
    if traits is None:
        traits = _known[func] = _read_traits(func)
    return traits


def _read_traits(func: Any) -> Traits:
    traits = Traits.PLAIN
    if func in _FIRST_SIGHT:
        traits |= Traits.FIRST_SIGHT
    elif func in _SIZED:
        traits |= Traits.SIZED
    elif torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        traits |= Traits.COMPOSITE
    if func in _UNDECLARED or any(returned.alias_info is not None for returned in func._schema.returns):
        traits |= Traits.ALIASING
    return traits


def requested_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes that a SIZED operation asks for."""
    nbytes = int((kwargs.get("dtype") or torch.get_default_dtype()).itemsize)
    for length in args[0]:
        nbytes *= int(length)
    return nbytes


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Tensors among an operation's arguments or results, which nest one list deep at most."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (tuple, list)):
                yield from (inner for inner in value if isinstance(inner, torch.Tensor))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage that costs bytes; None for sparse and meta tensors, whose parts are seen by themselves."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    return tensor.untyped_storage()


def is_among(storage: torch.UntypedStorage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether one of the arguments lies in that storage."""
    given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
    return any((own := storage_of(tensor)) is not None and own._cdata == storage._cdata for tensor in given)
