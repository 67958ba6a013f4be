"""The small language that says what a model's memory grows with: `height * width`, `seconds(audio)`.

Owns: its grammar, its evaluation from decoded inputs, and the bounds of the result. The gateway evaluates it
before anything is queued, and the child once more, so it must be cheap, and safe on hostile inputs: the text
is parsed once into closures out of a closed list of node kinds, and nothing of it is ever executed as Python.
Does not own: reading of media headers (`vramgate.media`), or what one unit costs in bytes (estimates).

    expression := number | field | expression (+ - * /) expression | ( expression ) | function ( field )
    function   := len (text, bytes, list) | pixels (PNG, JPEG, GIF, WebP, BMP) | seconds (WAV, FLAC)
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vramgate import media
from vramgate.errors import InputError

MAX_UNITS = 2**53
MAX_TEXT = 200

_Inputs = Mapping[str, Any]
_Node = Callable[[_Inputs], float]


class UnitsError(ValueError):
    """A `units` text that is not of this language. The message names the offending part."""


@dataclass(frozen=True, slots=True)
class Units:
    """A compiled expression: `text`, the `fields` it reads, and `evaluate`."""

    text: str
    fields: frozenset[str]
    _root: _Node = field(repr=False, compare=False)

    def evaluate(self, inputs: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None) -> float:
        """Units of one input: finite, over 0, at most 2**53.

        `defaults`, those of the model's schema, stand in for absent fields. Raises `InputError` naming the
        field that is missing, of the wrong kind, negative, or whose media header is absent, truncated or
        absurd.
        """
        value = self._root({**defaults, **inputs} if defaults else inputs)
        if not math.isfinite(value) or not 0 < value <= MAX_UNITS:
            raise self._out_of_bounds(value)
        return value

    def _out_of_bounds(self, value: float) -> InputError:
        """What takes no memory cannot be leased, nor what takes more than there can be."""
        said = (
            f"is too small: {self.text} is {value:g}, and must be above 0"
            if value <= 0
            else f"is too large: {self.text} is {value:g}, and may be 2**53 at most"
        )
        if len(self.fields) == 1:
            return InputError(said, field=min(self.fields))
        return InputError(f"the input {said}")


@functools.lru_cache(maxsize=1024)
def compile_units(text: str) -> Units:
    """Parse `text`. Raises `UnitsError` that names the part which is not of the language."""
    if not isinstance(text, str) or not text.strip():
        raise UnitsError('units must be an expression such as "1" or "height * width"')
    if len(text) > MAX_TEXT:
        raise UnitsError(f"an expression has at most {MAX_TEXT} characters, this one has {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        fields: set[str] = set()
        root = _compile(tree.body, text.strip(), fields)
    except SyntaxError as error:
        raise UnitsError(f"{text!r} is no expression: {error.msg}") from None
    except (RecursionError, MemoryError, OverflowError) as error:
        raise UnitsError(f"{text!r} is nested too deeply ({type(error).__name__})") from None
    if not fields and not 0 < root({}) <= MAX_UNITS:
        raise UnitsError(f"{text!r} is {root({}):g}; units must be over 0 and at most 2**53")
    return Units(text=text, fields=frozenset(fields), _root=root)


def _compile(node: ast.expr, text: str, fields: set[str]) -> _Node:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _constant(float(number))
        case ast.Name(id=name):
            fields.add(name)
            return functools.partial(_number, name)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
            return _binary(type(op), _compile(left, text, fields), _compile(right, text, fields))
        case ast.Call(func=ast.Name(id=name), args=[ast.Name(id=argument)], keywords=[]) if (
            name in _FUNCTIONS
        ):
            fields.add(argument)
            return functools.partial(_FUNCTIONS[name], argument)
    raise UnitsError(
        f"{ast.get_source_segment(text, node) or text!r} in {text!r} is not understood; there are numbers, "
        f"fields, + - * /, and {', '.join(f'{name}(field)' for name in _FUNCTIONS)}"
    )


def _constant(number: float) -> _Node:
    return lambda inputs: number


def _binary(op: type[ast.operator], left: _Node, right: _Node) -> _Node:
    if op is ast.Add:
        return lambda inputs: left(inputs) + right(inputs)
    if op is ast.Sub:
        return lambda inputs: left(inputs) - right(inputs)
    if op is ast.Mult:
        return lambda inputs: left(inputs) * right(inputs)
    return lambda inputs: _divide(left(inputs), right(inputs))


def _divide(dividend: float, divisor: float) -> float:
    # Not an exception: the bounds check in evaluate() refuses the infinity, with the text of the expression.
    return dividend / divisor if divisor else math.inf


def _read(name: str, inputs: _Inputs) -> Any:
    value = inputs.get(name)
    if value is None:
        raise InputError("is needed to know how much memory the request takes, and is missing", field=name)
    return value


def _number(name: str, inputs: _Inputs) -> float:
    value = _read(name, inputs)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"must be a number, got {type(value).__name__}", field=name)
    # Two negatives would multiply to a plausible size, and an int can be too large for a float.
    if not 0 <= value <= MAX_UNITS:
        raise InputError("must be a finite number from 0 to 2**53", field=name)
    return float(value)


def _length(name: str, inputs: _Inputs) -> float:
    value = _read(name, inputs)
    if not isinstance(value, str | bytes | bytearray | memoryview | list | tuple):
        raise InputError(f"must be text, bytes or a list, got {type(value).__name__}", field=name)
    return float(len(value))


def _from_header(measure: Callable[[bytes], float], name: str, inputs: _Inputs) -> float:
    value = _read(name, inputs)
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InputError(f"must be bytes, got {type(value).__name__}", field=name)
    try:
        return measure(bytes(value) if not isinstance(value, bytes) else value)
    except media.HeaderError as error:
        raise InputError(str(error), field=name) from None


_FUNCTIONS: dict[str, Callable[[str, _Inputs], float]] = {
    "len": _length,
    "pixels": functools.partial(_from_header, media.count_pixels),
    "seconds": functools.partial(_from_header, media.count_seconds),
}
