"""Links `lua/` to the one text that a server is given: an operation per file, with the helpers of `lua/_lib/`
that its header's `-- include:` line names.

One text for all operations: what a server has loaded is what its garbage collector walks through. As a text
for each, helpers in every one, it was 2 MB, more than a core's cache holds, and a submit took a third longer.
It is constant: arguments travel in ARGV, never in the script, so that a server's script cache holds one copy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LUA = Path(__file__).resolve().parent.parent / "lua"
_BEGINS = re.compile(r"(?!end\b)[a-z]")
_CONSTANT = re.compile(r"local (?P<names>[A-Z_, ]+) = (?P<values>(?:'[^']*'|\d+)(?:, (?:'[^']*'|\d+))*)")
_NAMED = re.compile(r"^local (?P<names>[A-Z_,\s]+?) = unpack\((?P<table>[A-Z]+)\)\n", re.MULTILINE)
_INCLUDE = re.compile(r"^-- include: (?P<names>[a-z_ ]+)$", re.MULTILINE)
_AT_ONCE = re.compile(r"^-- at once: (?P<members>.+(?:\n--   .+)*)$", re.MULTILINE)
_KEY = re.compile(r"\bkey\('(?P<kind>\w+)'(?P<has_name>, )?")
_WORD = re.compile(r"'[^']*'|(?<!\.)\b[A-Z_]+\b")


@dataclass(frozen=True, slots=True)
class Script:
    """One operation. text, sha: the same of each; its name goes with the settings (`lua/_lib/base.lua`).
    needs_lease_ids: it may grant, so that it takes fresh lease ids.
    """

    name: str
    text: str
    sha: str
    needs_lease_ids: bool


def _comments_away(text: str) -> str:
    """Comments cost nothing when the server runs a script, but they cost its cache and each load."""
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("--"))


@cache
def _helper(name: str) -> str:
    return _comments_away((LUA / "_lib" / f"{name}.lua").read_text(encoding="utf-8"))


def _chunks(text: str) -> Iterator[str]:
    """The top-level statements of a helper: each begins at the left margin, and so does its closing line."""
    chunk: list[str] = []
    for line in text.splitlines():
        if chunk and _BEGINS.match(line):
            yield "\n".join(chunk)
            chunk = []
        chunk.append(line)
    yield "\n".join(chunk)


def _module(name: str) -> re.Match[str] | None:
    """The statement that declares a helper's module and its state; None where a helper is none."""
    return re.search(rf"^local {name} = {{(?P<state>.*)}}$", _helper(name), re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Operation:
    """A file of `lua/`. at_once: members, as module.member, that are made with their modules."""

    name: str
    body: str
    helpers: tuple[str, ...]
    at_once: frozenset[str]


@cache
def _operation(name: str) -> _Operation:
    text = (LUA / f"{name}.lua").read_text(encoding="utf-8")
    included, listed = _INCLUDE.search(text), _AT_ONCE.search(text)
    at_once = re.findall(r"(\w+)\(([^)]*)\)", listed["members"].replace("\n--", "")) if listed else ()
    return _Operation(
        name,
        _folded(_comments_away(text)),
        tuple(included["names"].split()) if included else (),
        frozenset(f"{module}.{member}" for module, members in at_once for member in members.split()),
    )


def _members(name: str) -> dict[str, str]:
    """The members of a module, each the statement that makes it."""
    found = ((re.match(rf"(?:function )?{name}\.(\w+)", chunk), chunk) for chunk in _chunks(_helper(name)))
    return {member[1]: chunk for member, chunk in found if member}


def _on_first_use(modules: Sequence[str]) -> str:
    """The function that makes a member of a module when a call first uses it. One for all modules, since to
    take over a variable costs a function as much as to be made.
    """
    branches = (
        "else".join(
            f"if name == '{member}' then\n{chunk}\nreturn {name}.{member}\n"
            for member, chunk in _members(name).items()
        )
        for name in modules
    )
    made = "else".join(
        f"if module == {name} then\n{branch}end\n" for name, branch in zip(modules, branches, strict=True)
    )
    return f"local create = {{ __index = function(module, name)\n{made}end\nend }}"


def _with_state(name: str, at_once: Collection[str]) -> str:
    """The statements that make a module with its state and some members."""
    module = _module(name)
    parts = [f"{module['state']},"] if module and module["state"].strip() else []
    for member, chunk in _members(name).items():
        if f"{name}.{member}" in at_once:
            value = re.sub(rf"^(function )?{name}\.{member}(?: =)?", r"\1", chunk)
            parts.append(f"{member} = {value},")
    return "\n".join([f"{name} = {{", *parts, "}", f"setmetatable({name}, create)"])


def _branch(operation: _Operation) -> str:
    """An operation, for the end of the text."""
    made = (
        _with_state(name, operation.at_once) if _module(name) else _helper(name)
        for name in operation.helpers
        if name != "base"
    )
    return "\n".join(
        [
            f"if OPERATION == '{operation.name}' then",
            "return (function()",
            *made,
            operation.body,
            "end)()",
            "end",
        ]
    )


@cache
def _text() -> str:
    """All operations.

    The server runs it from the top at each call. To make a closure costs it about a thousand instructions, on
    first use twice that, and a call uses a quarter of what there is.
    """
    operations = sorted(map(_operation, names()), key=lambda operation: -len(operation.at_once))
    modules = [name for name in _helpers() if _module(name)]
    constants = (chunk for name in modules for chunk in _chunks(_helper(name)) if _CONSTANT.fullmatch(chunk))
    shared = [_helper("base"), *constants, f"local {', '.join(modules)}", _on_first_use(modules)]
    return _folded("\n".join([*shared, *map(_branch, operations)]))


def _helpers() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (LUA / "_lib").glob("*.lua")))


def _folded(text: str) -> str:
    """`text` with the values of its constants in place of their names, as well as the places of what a table
    holds, and names of keys put together where they are used. Each variable costs each function that uses it,
    and a call of `key` 500 instructions.
    """
    constants: dict[str, str] = {}
    lines: list[str] = []
    for named in _NAMED.finditer(text):
        names = re.split(r",\s+", named["names"])
        constants |= {name: f"{named['table']}[{at}]" for at, name in enumerate(names, start=1)}
    for line in _NAMED.sub("", text).splitlines():
        if (found := _CONSTANT.fullmatch(line)) is None:
            lines.append(line)
        else:
            for constant, value in zip(found["names"].split(", "), found["values"].split(", "), strict=True):
                if constants.setdefault(constant, value) != value:
                    raise ValueError(f"lua/: {constant} is both {constants[constant]} and {value}")
    whole = _WORD.sub(lambda word: constants.get(word[0], word[0]), "\n".join(lines))
    return _KEY.sub(lambda key: f"(PREFIX .. '{key['kind']}" + (":' .. " if key["has_name"] else "'"), whole)


@cache
def load(name: str) -> Script:
    """The operation `lua/<name>.lua`. Raises FileNotFoundError where there is none."""
    text = _text()
    needs_lease_ids = "place" in _operation(name).helpers
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), needs_lease_ids)


def names() -> tuple[str, ...]:
    """Every operation there is."""
    return tuple(sorted(path.stem for path in LUA.glob("*.lua")))
