"""What a field of a pydantic class takes, in a few words: `a whole number from 0 to 9`.

For settings and for options of a request, so that both are refused in our words and not in pydantic's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from vramgate.quantities import format_size

_UNIONS = (Union, UnionType)
_KINDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}


def expected(field: FieldInfo) -> str:
    """The words for one field: its examples where it has some, else its kind and its bounds."""
    if field.examples:
        return " or ".join(field.examples)
    choices = get_args(field.annotation) if get_origin(field.annotation) in _UNIONS else (field.annotation,)
    return " or ".join(_kind(choice, field.metadata) for choice in choices if choice is not NoneType)


def _kind(kind: Any, metadata: Sequence[Any]) -> str:
    if get_origin(kind) is Annotated:
        kind, *inner = get_args(kind)
        metadata = [*inner, *metadata]
    if get_origin(kind) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(kind))
    if not any(isinstance(each, BeforeValidator) for each in metadata):
        return _KINDS[kind] + _bounds(metadata, "{:.15g}".format)
    if kind is int:
        return "a size such as 12GiB" + _bounds(metadata, format_size)
    return "a duration such as 30s" + _bounds(metadata, "{:.15g} s".format)


def _bounds(metadata: Sequence[Any], write: Callable[[Any], str]) -> str:
    least = next((bound.ge for bound in metadata if isinstance(bound, Ge)), None)
    most = next((bound.le for bound in metadata if isinstance(bound, Le)), None)
    if least is not None and most is not None:
        return f" from {write(least)} to {write(most)}"
    words = [f"at least {write(least)}"] if least is not None else []
    words += [f"above {write(bound.gt)}" for bound in metadata if isinstance(bound, Gt)]
    words += [f"at most {write(most)}"] if most is not None else []
    words += [f"below {write(bound.lt)}" for bound in metadata if isinstance(bound, Lt)]
    words += [f"matching {bound.pattern}" for bound in metadata if getattr(bound, "pattern", None)]
    return f", {' and '.join(words)}" if words else ""
