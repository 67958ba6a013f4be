"""What is said of a configuration that cannot be used: the key, what was expected of it, what was given.

Owns the words, and the nearest key to one that is misspelt. Does not own the keys (`scheduler.settings`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from scheduler.expectation import expected

Model = type[BaseModel]

NAMED = "models"
"""The one table whose keys the user chooses."""

_LONGEST = 100


def explain(error: ValidationError, file: Path, root: Model) -> str:
    """The first thing that is wrong, in one line."""
    # An unknown key first: the one that is missing beside it is most often the same, misspelt.
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    loc = [str(part) for part in first["loc"]]
    field, depth = _field_at(root, loc)
    key = ".".join(loc[:depth])
    if first["type"] == "extra_forbidden":
        return f"{file}: unknown key {'.'.join(loc)}{_nearest_of(root, loc)}"
    if first["type"] == "missing":
        return f"{file}: {'.'.join(loc)} is missing; write {field.description if field else 'it'}"
    if first["type"] == "value_error":
        # Our own words, which show the value as it may be shown.
        return f"configuration: {key or file}: {first['msg'].removeprefix('Value error, ')}"
    given = first.get("input")
    if loc[-1] == "[key]":
        wanted = f"a name that matches {first['ctx']['pattern']}"
    else:
        wanted = "a table" if field is None else expected(field)
    return f"configuration: {key or file}: expected {wanted}, got {_shown(given)}"


def known_keys(model: Model, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the configuration; `models.*` stands for any model name."""
    for name, field in model.model_fields.items():
        below = _section(field)
        if below is None:
            yield prefix + name
        else:
            yield from known_keys(below, f"{prefix}{name}.{'*.' if name == NAMED and not prefix else ''}")


def nearest(root: Model, word: str) -> str:
    """A suggestion for a key that is not known; empty where none is near."""
    plain = [key.replace("*.", "") for key in known_keys(root)]
    heads = {key.split(".")[0] for key in plain}
    leaf = word.rsplit(".", 1)[-1]
    tails = [
        key
        for key in plain
        if key.rsplit(".", 1)[-1]
        in difflib.get_close_matches(leaf, [k.rsplit(".", 1)[-1] for k in plain], 1, 0.6)
    ]
    found = difflib.get_close_matches(word, [*plain, *heads], 1, 0.6) or tails[:1]
    return f"; did you mean {found[0]}?" if found else ""


def _nearest_of(root: Model, loc: Sequence[str]) -> str:
    if loc[0] != NAMED or len(loc) < 3:
        return nearest(root, ".".join(loc))
    known = [key.rpartition(".")[2] for key in known_keys(root) if key.startswith(f"{NAMED}.*.")]
    near = difflib.get_close_matches(loc[2], known, 1, 0.6)
    return f"; did you mean {NAMED}.{loc[1]}.{near[0]}?" if near else f"; there are {', '.join(known)}"


def _section(field: FieldInfo) -> Model | None:
    """The table below a key; of `models`, the table of each model."""
    kinds = (field.annotation, *get_args(field.annotation)[1:])
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _field_at(root: Model, loc: Sequence[str]) -> tuple[FieldInfo | None, int]:
    """The field that a place in a pydantic error lies in, None for a table; and how much of the place is its
    key: the rest is pydantic's own, such as which choice of a union it tried.
    """
    model, depth = root, 0
    while depth < len(loc) and loc[depth] in model.model_fields:
        field = model.model_fields[loc[depth]]
        below = _section(field)
        depth += 1
        if below is None:
            return field, depth
        if loc[depth - 1] == NAMED and model is root:
            depth = min(depth + 1, len(loc))
        model = below
    return None, depth


def _shown(given: Any) -> str:
    """What was given, short, and never an address with its password."""
    if isinstance(given, Mapping | BaseModel):
        return "a table"
    text = repr(given)
    if isinstance(given, list) and ("://" in text or len(text) > _LONGEST):
        return "a list"
    return text if len(text) < _LONGEST else text[: _LONGEST - 3] + "..."
