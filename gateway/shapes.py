"""Where a schema wants bytes, arrays and text: its shape, walked once when a model's version is compiled.

Does not own: what else a schema demands (the compiled validator of `gateway.validation`), nor what is made of
values in these places (`gateway.decoding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

BYTES_FORMATS = ("binary", "base64url")


@dataclass(slots=True)
class Shape:
    """What one place of a schema wants, as far as decoding goes. Cyclic where the schema is.

    leads_to_bytes, leads_to_arrays: whether this place or one below it wants them.
    """

    is_bytes: bool = False
    is_array: bool = False
    is_text: bool = False
    least: int = 0
    most: int | None = None
    fields: dict[str, Shape] = field(default_factory=dict)
    others: Shape | None = None
    items: Shape | None = None
    leads_to_bytes: bool = False
    leads_to_arrays: bool = False

    def of(self, name: str) -> Shape:
        """The shape of a member."""
        return self.fields.get(name, self.others or ANYTHING)

    def _below(self) -> Iterator[Shape]:
        yield from self.fields.values()
        yield from (shape for shape in (self.others, self.items) if shape is not None)

    def reachable(self) -> list[Shape]:
        """This place and all below it, each once."""
        found = {id(self): self}
        waiting = [self]
        while waiting:
            fresh = [shape for shape in waiting.pop()._below() if id(shape) not in found]
            found |= {id(shape): shape for shape in fresh}
            waiting += fresh
        return list(found.values())


ANYTHING = Shape()


def shape_of(schema: Mapping[str, Any]) -> Shape:
    """The shape of a whole schema."""
    root = _Builder(schema).build(schema)
    for shape in root.reachable():
        below = shape.reachable()
        shape.leads_to_bytes = any(each.is_bytes for each in below)
        shape.leads_to_arrays = any(each.is_array for each in below)
    return root


class _Builder:
    """Walks a schema once; `$ref` into its own `$defs` only, each built once."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._by_ref: dict[str, Shape] = {}

    def build(self, node: Any) -> Shape:
        if not isinstance(node, Mapping):
            return ANYTHING
        if isinstance(reference := node.get("$ref"), str):
            return self._follow(reference)
        shape = Shape()
        self._fill(shape, node)
        return shape

    def _follow(self, reference: str) -> Shape:
        if reference not in self._by_ref:
            # Entered before it is filled, so that a schema that refers to itself ends here.
            self._by_ref[reference] = Shape()
            target: Any = self._schema
            for part in reference.removeprefix("#/").split("/"):
                target = target.get(part) if isinstance(target, Mapping) else None
            if isinstance(target, Mapping):
                self._fill(self._by_ref[reference], target)
        return self._by_ref[reference]

    def _fill(self, shape: Shape, node: Mapping[str, Any]) -> None:
        if isinstance(reference := node.get("$ref"), str):
            _merge(shape, self._follow(reference))
        kind = node.get("type")
        if kind == "string" and node.get("format") in BYTES_FORMATS:
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


def _merge(shape: Shape, other: Shape) -> None:
    shape.is_bytes |= other.is_bytes
    shape.is_array |= other.is_array
    shape.is_text |= other.is_text
    shape.least = max(shape.least, other.least)
    shape.most = other.most if shape.most is None else shape.most
    shape.items = shape.items or other.items
    shape.others = shape.others or other.others
    shape.fields.update(other.fields)
