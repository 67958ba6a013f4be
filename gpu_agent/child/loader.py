"""From an entry point in the configuration to a `vramgate.Model` class, with every failure in one line.

Owns: where entry points are looked up, the version that a file has, and what a model publishes of itself.
Does not own: loading weights (the model does) and what it costs (`profile`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gpu_agent.text import plain_text
from vramgate.model import Model


class LoadFailed(Exception):
    """A model cannot be served; the message is one line. `is_final`: trying again without a change is of
    no use.
    """

    def __init__(self, reason: str, *, is_final: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_final = is_final


def find_class(entrypoint: str, directories: Sequence[Path]) -> tuple[type[Model], str]:
    """The class named by `module:Class` or `path/file.py:Class`, and the hash of its file as its version.

    `directories` (the configuration's, then the working directory) must already be first on sys.path.
    Raises LoadFailed.
    """
    where, _, name = entrypoint.rpartition(":")
    try:
        module, version = _import_as_it_is(where, directories)
        found = getattr(module, name, None)
    except LoadFailed:
        raise
    except BaseException as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == where.partition(".")[0]
        looked = ", ".join(str(directory) for directory in directories)
        detail = f"there is no {where}; looked in {looked}" if missing else describe(error)
        raise LoadFailed(f"{entrypoint}: cannot be imported: {detail}", is_final=True) from None
    if found is None:
        raise LoadFailed(f"{entrypoint}: {module.__name__} has no {name}", is_final=True)
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise LoadFailed(f"{entrypoint}: {name} is no subclass of vramgate.Model", is_final=True)
    return found, version


_imported: dict[str, str] = {}
"""The versions of the files as they were imported, by the modules' names."""


def _import_as_it_is(where: str, directories: Sequence[Path]) -> tuple[ModuleType, str]:
    """A module and the version of its file. One that was edited since an earlier load is imported again: a
    retry runs what it says that it runs, and meets what was put right.
    """
    module = _import(where, directories)
    version = _file_version(module)
    if _imported.setdefault(module.__name__, version) != version:
        sys.modules.pop(module.__name__, None)
        importlib.invalidate_caches()
        module = _import(where, directories)
        version = _imported[module.__name__] = _file_version(module)
    return module, version


def _import(where: str, directories: Sequence[Path]) -> ModuleType:
    return _import_file(where, directories) if where.endswith(".py") else importlib.import_module(where)


def _import_file(where: str, directories: Sequence[Path]) -> ModuleType:
    path = next((d / where for d in directories if (d / where).is_file()), None)
    if path is None:
        looked = ", ".join(str(directory) for directory in directories)
        raise LoadFailed(f"there is no file {where}; looked in {looked}", is_final=True)
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None:
        # Another module has that name already (the standard library's, or ours): both must stay usable.
        name = f"vramgate_entry_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadFailed(f"{where} is no Python file", is_final=True)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _file_version(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    if not file:
        return "builtin"
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]


def describe(error: BaseException) -> str:
    """An exception in one line, with the place in the user's code where it was raised. Never raises."""
    try:
        return plain_text(_in_one_line(error))
    except BaseException:
        return type(error).__name__


def _in_one_line(error: BaseException) -> str:
    silence = "the host has no memory for it" if isinstance(error, MemoryError) else "no message"
    text = " ".join(plain_text(error).split()) or silence
    if len(text) > 500:
        text = text[:500] + "..."
    kind = type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{kind}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    # The last frame outside of the import machinery, of torch and of ours says most to the model's author.
    own = str(Path(__file__).resolve().parent.parent)
    users = [f for f in frames if not f.filename.startswith((own, "<frozen")) and "/torch/" not in f.filename]
    place = f" ({Path(users[-1].filename).name}, line {users[-1].lineno})" if users else ""
    return f"{kind}: {text}{place}"


def publish(model: type[Model], *, version: str) -> dict[str, Any]:
    """What gateways and the ledger have to know of a model. Raises LoadFailed when its schema cannot be
    made, or is no JSON.
    """
    try:
        schema = model.input_json_schema()
        output = model.output_schema.model_json_schema() if model.output_schema is not None else None
        _check_json(schema, "input")
        _check_json(output, "output")
    except NotJson as error:
        raise LoadFailed(
            f"{model.__name__}: its schema cannot be published: {error}", is_final=True
        ) from None
    except BaseException as error:
        raise LoadFailed(
            f"{model.__name__}: its schema cannot be made: {describe(error)}", is_final=True
        ) from None
    return {
        "version": version,
        "units": model.units,
        "batch_units": model.batch_units,
        "max_batch": model.max_batch,
        "lanes": model.lanes,
        "schema": schema,
        "output_schema": output,
    }


class NotJson(Exception):
    """A schema holds what JSON or msgpack does not; the message names the place."""


def _check_json(value: Any, path: str) -> None:
    """Raise NotJson where a value of a schema would be lost, or change, on its way to those who read it."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise NotJson(f"{path} has the key {plain_text(repr(name))[:80]}, and keys are text")
            _check_json(name, f"a key of {path}")
            _check_json(item, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_json(item, f"{path}[{i}]")
    elif isinstance(value, str):
        if plain_text(value) != value:
            raise NotJson(f"{path} holds half of a surrogate pair, which is no Unicode text")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise NotJson(f"{path} is {value}")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise NotJson(f"{path} is a number of more than 64 bits")
    elif value is not None:
        raise NotJson(f"{path} is a {type(value).__name__}")
