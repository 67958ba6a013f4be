"""What is known of an operation before it runs: whether its outputs are new, and whether it is a kernel.

Owns the reading of torch's operator schemas and of arguments and results. Counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Traits:
    """What an operation is like. All false: a kernel whose outputs are new."""

    composite: bool
    """Made of other operations. In inference mode it comes whole, and would hide what it makes inside."""
    aliasing: bool
    """Outputs may be inputs, or views of them."""
    sized: bool
    """Makes a tensor whose size is the first argument."""


# torch.tensor() fills a storage out of the dispatcher's sight and shows it here first, as an alias of itself.
_FIRST_SIGHT = frozenset({_aten.lift_fresh.default, _aten.lift.default})
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
    aliases = func in _UNDECLARED or any(value.alias_info is not None for value in func._schema.returns)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return Traits(
        composite=composite and func not in _SIZED and func not in _FIRST_SIGHT,
        aliasing=aliases and func not in _FIRST_SIGHT,
        sized=func in _SIZED,
    )


def requested_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes that a sized operation asks for."""
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
