"""Inputs against the schema that an agent published: checked, decoded, measured.

Owns: the compiled validator of one version of a model, where its schema wants bytes or arrays, and the units
of an input. Does not own: what only the pydantic class catches (the child says `rejected_by_model`), nor
bodies.

Bytes are `{"type": "string", "format": "binary"}` in JSON Schema, as pydantic writes them: base64 in JSON,
bin in msgpack, a part of a form. Length bounds of such a field count bytes, not base64 characters, so the
validator is compiled without them and they are checked after decoding.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema_rs
import orjson

from gateway.body import Body
from scheduler.models import HostedModel
from vramgate.errors import InputError, InvalidInput, UnsupportedMediaType
from vramgate.model import schema_defaults
from vramgate.units import compile_units

_BYTES_FORMATS = ("binary", "base64url")
_LENGTHS = ("minLength", "maxLength", "pattern")
_SCALARS = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B", "bool": "?",
}  # fmt: skip
_ARRAY = {"dtype", "shape", "data"}


@dataclass(slots=True)
class _Shape:
    """What one place of a schema wants, as far as decoding goes. Cyclic where the schema is."""

    is_bytes: bool = False
    is_array: bool = False
    is_text: bool = False
    least: int = 0
    most: int | None = None
    fields: dict[str, _Shape] = field(default_factory=dict)
    others: _Shape | None = None
    items: _Shape | None = None


_ANY = _Shape()


class InputReader:
    """Reads the inputs of one version of a model. Compiled once, used for every request."""

    def __init__(self, model: HostedModel) -> None:
        schema = dict(model.schema or {"type": "object"})
        text = orjson.dumps(schema)
        self.model = model
        self._has_bytes = any(f'"{name}"'.encode() in text for name in _BYTES_FORMATS)
        self._root = _ShapeBuilder(schema).build(schema)
        self._validator = jsonschema_rs.validator_for(_without_byte_lengths(schema), retriever=_refuse_remote)
        self._units = compile_units(model.units)
        self._defaults = schema_defaults(schema)
        required = schema.get("required", [])
        self.raw_field: str | None = None
        if len(required) == 1 and self._root.fields.get(required[0], _ANY).is_bytes:
            self.raw_field = required[0]

    def read(self, body: Body) -> dict[str, Any]:
        """Decoded inputs:

        bytes as bytes, arrays as nested lists. Raises InvalidInput, UnsupportedMediaType.
        """
        if body.kind == "json":
            self._validate(body.inputs)
            return self._decode_json(body.inputs) if self._has_bytes else body.inputs
        given = self._named(body)
        decoded = {name: _decode_binary(self._shape(name), value, name) for name, value in given.items()}
        self._validate({name: _shadow(self._shape(name), value) for name, value in decoded.items()})
        return decoded

    def units(self, inputs: Mapping[str, Any]) -> float:
        """Units of decoded inputs. Raises InvalidInput that names the field."""
        try:
            return self._units.evaluate(inputs, defaults=self._defaults)
        except InputError as error:
            prefix = f"{error.field} " if error.field else ""
            raise InvalidInput(prefix + error.detail, field=error.field) from None

    def _shape(self, name: str) -> _Shape:
        return self._root.fields.get(name, self._root.others or _ANY)

    def _named(self, body: Body) -> Mapping[str, Any]:
        if body.kind == "msgpack":
            given: Mapping[str, Any] = body.inputs
            return given
        if body.kind == "fields":
            return {name: _from_part(self._shape(name), value, name) for name, value in body.inputs.items()}
        if self.raw_field is None:
            raise UnsupportedMediaType(
                f"{self.model.name} does not take one input of bytes as its body; send application/json, "
                "application/msgpack or multipart/form-data"
            )
        return {self.raw_field: body.inputs}

    def _validate(self, instance: Any) -> None:
        if self._validator.is_valid(instance):
            return
        for error in self._validator.iter_errors(instance):
            path = ".".join(str(part) for part in error.instance_path)
            at_fault = path
            if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Required):
                at_fault = f"{path}.{error.kind.property}" if path else error.kind.property
            message = error.message if len(error.message) <= 300 else error.message[:297] + "..."
            raise InvalidInput(f"inputs{'.' + path if path else ''}: {message}", field=at_fault or None)

    def _decode_json(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _decode_json(self._shape(name), value, name) for name, value in inputs.items()}


def _refuse_remote(uri: str) -> Any:
    raise ValueError(f"a schema may not refer to {uri}")


def _without_byte_lengths(node: Any) -> Any:
    if isinstance(node, Mapping):
        is_bytes = node.get("type") == "string" and node.get("format") in _BYTES_FORMATS
        return {
            name: _without_byte_lengths(value)
            for name, value in node.items()
            if not (is_bytes and name in _LENGTHS)
        }
    return [_without_byte_lengths(item) for item in node] if isinstance(node, list) else node


class _ShapeBuilder:
    """Walks a schema once; `$ref` into its own `$defs` only, each built once."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._by_ref: dict[str, _Shape] = {}

    def build(self, node: Any) -> _Shape:
        if not isinstance(node, Mapping):
            return _ANY
        if isinstance(reference := node.get("$ref"), str):
            return self._follow(reference)
        shape = _Shape()
        self._fill(shape, node)
        return shape

    def _follow(self, reference: str) -> _Shape:
        if reference not in self._by_ref:
            # Entered before it is filled, so that a schema that refers to itself ends here.
            self._by_ref[reference] = _Shape()
            target: Any = self._schema
            for part in reference.removeprefix("#/").split("/"):
                target = target.get(part) if isinstance(target, Mapping) else None
            if isinstance(target, Mapping):
                self._fill(self._by_ref[reference], target)
        return self._by_ref[reference]

    def _fill(self, shape: _Shape, node: Mapping[str, Any]) -> None:
        if isinstance(reference := node.get("$ref"), str):
            _merge(shape, self._follow(reference))
        kind = node.get("type")
        if kind == "string" and node.get("format") in _BYTES_FORMATS:
            shape.is_bytes = True
            shape.least, shape.most = node.get("minLength", 0), node.get("maxLength")
        elif kind == "string":
            shape.is_text = True
        elif kind == "array":
            shape.is_array, shape.items = True, self.build(node.get("items"))
        for name, child in node.get("properties", {}).items():
            shape.fields[name] = self.build(child)
        if isinstance(node.get("additionalProperties"), Mapping):
            shape.others = self.build(node["additionalProperties"])
        for word in ("anyOf", "oneOf", "allOf"):
            for child in node.get(word, ()):
                _merge(shape, self.build(child))


def _merge(shape: _Shape, other: _Shape) -> None:
    shape.is_bytes |= other.is_bytes
    shape.is_array |= other.is_array
    shape.is_text |= other.is_text
    shape.least = max(shape.least, other.least)
    shape.most = other.most if shape.most is None else shape.most
    shape.items = shape.items or other.items
    shape.others = shape.others or other.others
    shape.fields.update(other.fields)


def _decode_json(shape: _Shape, value: Any, path: str) -> Any:
    # Where text is as welcome as bytes, text is what was sent.
    if isinstance(value, str) and shape.is_bytes and not shape.is_text:
        try:
            return _bounded(shape, binascii.a2b_base64(value.translate(_URL_SAFE), strict_mode=True), path)
        except (binascii.Error, ValueError) as error:
            raise InvalidInput(f"{path} must be base64: {error}", field=path) from None
    if isinstance(value, dict) and (shape.fields or shape.others):
        return {
            name: _decode_json(shape.fields.get(name, shape.others or _ANY), item, f"{path}.{name}")
            for name, item in value.items()
        }
    if isinstance(value, list) and shape.items is not None:
        return [_decode_json(shape.items, item, f"{path}.{at}") for at, item in enumerate(value)]
    return value


_URL_SAFE = str.maketrans("-_", "+/")


def _bounded(shape: _Shape, value: bytes, path: str) -> bytes:
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        most = "any number" if shape.most is None else shape.most
        raise InvalidInput(f"{path} must have {shape.least} to {most} bytes, it has {len(value)}", field=path)
    return value


def _decode_binary(shape: _Shape, value: Any, path: str) -> Any:
    if isinstance(value, bytes):
        return _bounded(shape, value, path) if shape.is_bytes else value
    if isinstance(value, str) and shape.is_bytes and not shape.is_text:
        raise InvalidInput(f"{path} must be bytes (bin), got text", field=path)
    if isinstance(value, dict):
        if shape.is_array and value.keys() == _ARRAY:
            return _unpack_array(value, path)
        return {
            name: _decode_binary(shape.fields.get(name, shape.others or _ANY), item, f"{path}.{name}")
            for name, item in value.items()
        }
    if isinstance(value, list):
        items = shape.items or _ANY
        return [_decode_binary(items, item, f"{path}.{at}") for at, item in enumerate(value)]
    return value


def _unpack_array(value: Mapping[str, Any], path: str) -> Any:
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
    count = 1
    for size in shape:
        count *= size
    if not isinstance(data, bytes) or len(data) != count * struct.calcsize(f"<{code}"):
        raise InvalidInput(f"{path}.data must be {count} values of {value['dtype']}", field=f"{path}.data")
    flat = struct.unpack(f"<{count}{code}", data)
    # NaN is the only value that differs from itself; an infinity survives no subtraction from itself.
    if code in "def" and any(number - number != 0 for number in flat):
        raise InvalidInput(f"{path}.data holds NaN or infinity", field=f"{path}.data")
    return _nest(iter(flat), shape)


def _nest(flat: Iterator[Any], shape: list[int]) -> list[Any]:
    if len(shape) == 1:
        return [next(flat) for _ in range(shape[0])]
    return [_nest(flat, shape[1:]) for _ in range(shape[0])]


def _shadow(shape: _Shape, value: Any) -> Any:
    """`value` as the validator can see it:

    text in place of bytes where bytes belong, and no text elsewhere.
    """
    if isinstance(value, bytes):
        return "" if shape.is_bytes else {"bytes": len(value)}
    if isinstance(value, dict):
        return {
            name: _shadow(shape.fields.get(name, shape.others or _ANY), item) for name, item in value.items()
        }
    if isinstance(value, list):
        return [_shadow(shape.items or _ANY, item) for item in value]
    return value


def _from_part(shape: _Shape, value: Any, path: str) -> Any:
    """A part of a form as the value that the schema wants: bytes, text, or else JSON."""
    if isinstance(value, list):
        return [_from_part(shape.items or _ANY, item, f"{path}.{at}") for at, item in enumerate(value)]
    if shape.is_array and shape.items is not None and (isinstance(value, bytes) or shape.items.is_bytes):
        return [_from_part(shape.items, value, f"{path}.0")]
    if shape.is_bytes:
        return value if isinstance(value, bytes) else value.encode()
    if shape.is_text:
        return value if isinstance(value, str) else _as_text(value, path)
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"{path} is not JSON: {error}", field=path) from None


def _as_text(value: bytes, path: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} must be text in UTF-8", field=path) from None
