"""Inputs against the schema that an agent published: checked, decoded, measured.

Owns: the compiled validator of one version of a model, and the units of an input. Does not own: how values
are decoded (`gateway.decoding`), what only the pydantic class catches (the child says `rejected_by_model`),
nor bodies.

Bytes are `{"type": "string", "format": "binary"}` in JSON Schema, as pydantic writes them: base64 in JSON,
bin in msgpack, a part of a form. Length bounds of such a field count bytes, not base64 characters, so the
validator is compiled without them and they are checked after decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema_rs

from gateway import decoding
from gateway.body import Body, not_read
from gateway.parsing import Allowance
from gateway.shapes import ANYTHING, BYTES_FORMATS, shape_of
from scheduler.registration import HostedModel
from vramgate.errors import InputError, InvalidInput
from vramgate.model import schema_defaults
from vramgate.units import compile_units

_TAKEN = "application/json, application/msgpack or multipart/form-data"
_LENGTHS = ("minLength", "maxLength", "pattern")


class InputReader:
    """Reads the inputs of one version of a model. Compiled once, used for every request."""

    def __init__(self, model: HostedModel) -> None:
        schema = dict(model.schema or {"type": "object"})
        self.model = model
        self._root = shape_of(schema)
        self._validator = jsonschema_rs.validator_for(_without_byte_lengths(schema), retriever=_refuse_remote)
        self._units = compile_units(model.units)
        self._defaults = schema_defaults(schema)
        required = schema.get("required", [])
        self.raw_field: str | None = None
        if len(required) == 1 and self._root.fields.get(required[0], ANYTHING).is_bytes:
            self.raw_field = required[0]

    def read(self, body: Body) -> dict[str, Any]:
        """Decoded inputs:

        bytes as bytes, arrays as nested lists. Raises InvalidInput, TooLarge, UnsupportedMediaType.
        """
        if body.kind == "json":
            self._validate(body.inputs)
            return {
                name: decoding.from_json(self._root.of(name), value, name)
                for name, value in body.inputs.items()
            }
        allowance = Allowance(body.limits.values, used=body.values)
        decoded = {
            name: decoding.from_binary(self._root.of(name), value, name, allowance)
            for name, value in self._named(body, allowance).items()
        }
        self._validate({name: decoding.shadow(self._root.of(name), value) for name, value in decoded.items()})
        return decoded

    def units(self, inputs: Mapping[str, Any]) -> float:
        """Units of decoded inputs. Raises InvalidInput that names the field."""
        try:
            return self._units.evaluate(inputs, defaults=self._defaults)
        except InputError as error:
            prefix = f"{error.field} " if error.field else ""
            raise InvalidInput(prefix + error.detail, field=error.field) from None

    def _named(self, body: Body, allowance: Allowance) -> Mapping[str, Any]:
        if body.kind == "msgpack":
            given: Mapping[str, Any] = body.inputs
            return given
        if body.kind == "fields":
            return {
                name: decoding.from_part(self._root.of(name), value, name, body.limits.nesting, allowance)
                for name, value in body.inputs.items()
            }
        if self.raw_field is None:
            raise not_read(body.content_type, _TAKEN, by=f"model {self.model.name}")
        return {self.raw_field: body.inputs}

    def _validate(self, instance: Any) -> None:
        try:
            # The first error alone: a list of a million wrong items has a million, and each costs 25 us.
            self._validator.validate(instance)
        except jsonschema_rs.ValidationError as error:
            path = ".".join(str(part) for part in error.instance_path)
            at_fault = path
            if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Required):
                at_fault = f"{path}.{error.kind.property}" if path else error.kind.property
            message = error.message if len(error.message) <= 300 else error.message[:297] + "..."
            raise InvalidInput(
                f"inputs{'.' + path if path else ''}: {message}", field=at_fault or None
            ) from None


def _refuse_remote(uri: str) -> Any:
    raise ValueError(f"a schema may not refer to {uri}")


def _without_byte_lengths(node: Any) -> Any:
    if isinstance(node, Mapping):
        is_bytes = node.get("type") == "string" and node.get("format") in BYTES_FORMATS
        return {
            name: _without_byte_lengths(value)
            for name, value in node.items()
            if not (is_bytes and name in _LENGTHS)
        }
    return [_without_byte_lengths(item) for item in node] if isinstance(node, list) else node
