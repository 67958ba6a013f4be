"""Finding and replacing the tensors that a model holds in modules, containers and attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from gpu_agent.device.torch_device import Movable

_MOST_OBJECTS = 100_000


def tensors_of(held: object) -> Iterator[torch.Tensor]:
    """Every tensor reachable through modules, lists, tuples, sets, dicts and attributes; each object is
    visited once.

    Attributes are followed only of objects with a plain `__dict__` that are no types, functions or imported
    modules.
    """
    seen: set[int] = set()
    waiting: list[object] = [held]
    alive: list[object] = []  # an id is only good while its object lives
    while waiting and len(seen) < _MOST_OBJECTS:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        alive.append(current)
        if isinstance(current, torch.Tensor):
            yield current
        else:
            waiting.extend(_parts_of(current))


def _parts_of(held: object) -> Iterator[object]:
    if isinstance(held, torch.nn.Module):
        yield from held.parameters()
        yield from held.buffers()
    if isinstance(held, torch.jit.ScriptModule):
        return  # its Python attributes are proxies
    if isinstance(held, dict):
        yield from held.values()
    elif isinstance(held, (list, tuple, set, frozenset)):
        yield from held
    elif hasattr(held, "__dict__") and not isinstance(held, type) and not _is_builtin(held):
        yield from vars(held).values()


def _is_builtin(held: object) -> bool:
    """Functions, methods and imported modules: much of the process can be reached through them."""
    return type(held).__module__ == "builtins"


def map_tensors(held: Movable, change: Callable[[torch.Tensor], torch.Tensor]) -> Movable:
    """Replace each tensor. A module is changed in place and returned; containers are built anew."""
    return cast(Movable, _map(held, change))


def _map(held: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(held, torch.nn.Module):
        with torch.no_grad():
            return held._apply(change)  # type: ignore[no-untyped-call]
    if isinstance(held, torch.Tensor):
        return change(held)
    if isinstance(held, dict):
        return {key: _map(value, change) for key, value in held.items()}
    if isinstance(held, tuple) and hasattr(held, "_fields"):
        return type(held)(*(_map(value, change) for value in held))
    if isinstance(held, (list, tuple)):
        return type(held)(_map(value, change) for value in held)
    return held
