"""Loads `lua/`: one operation per file, helpers of `lua/_lib/` expanded where the header's `-- include:` line
names them.

The text is constant: arguments travel in ARGV, never in the script, so that a server's script cache holds one
copy.
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
_CONSTANT = re.compile(r"local (?P<names>[A-Z_, ]+) = (?P<values>'[^']*'|\d+(?:, \d+)*)")
_NAMED = re.compile(r"^local (?P<names>[A-Z_,\s]+?) = unpack\((?P<table>[A-Z]+)\)\n", re.MULTILINE)
_INCLUDE = re.compile(r"^-- include: (?P<names>[a-z_ ]+)$", re.MULTILINE)
_AT_ONCE = re.compile(r"^-- at once: (?P<members>.+(?:\n--   .+)*)$", re.MULTILINE)
_KEY = re.compile(r"\bkey\('(?P<kind>\w+)'(?P<has_name>, )?")
_WORD = re.compile(r"'[^']*'|(?<!\.)\b[A-Z_]+\b")


@dataclass(frozen=True, slots=True)
class Script:
    """One operation. needs_lease_ids: it may grant, so that it takes fresh lease ids."""

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


class _Parts:
    """A helper taken apart for one script: what stands beside its module, the statement that makes the module
    with the members that the script uses at each call, and the branch of `create` that makes the others.
    """

    def __init__(self, name: str, at_once: Collection[str]) -> None:
        module = _module(name)
        self.name = name if module else None
        self.beside: list[str] = []
        made: list[str] = []
        seldom: list[str] = []
        for chunk in _chunks(_helper(name)):
            member = module and re.match(rf"(?P<function>function )?{name}\.(?P<name>\w+)(?: =)?", chunk)
            if member is None:
                self.beside += [chunk] if module is None or chunk != module[0] else []
            elif f"{name}.{member['name']}" in at_once:
                made.append(f"{member['name']} = {member['function'] or ''}{chunk[member.end() :]},\n")
            else:
                made_here = f"{chunk}\nreturn {name}.{member['name']}"
                seldom.append(f"if name == '{member['name']}' then\n{made_here}\n")
        state = f"{module['state']}," if module and module["state"].strip() else ""
        self.table = f"{name} = {{{state}\n{''.join(made)}}}"
        self.branch = f"if module == {name} then\n{'else'.join(seldom)}end\n" if seldom else ""


def _at_once(text: str) -> set[str]:
    """The members that a script's header names under `-- at once:`, as `module.member`."""
    found = _AT_ONCE.search(text)
    listed = re.findall(r"(\w+)\(([^)]*)\)", found["members"].replace("\n--", "")) if found else []
    return {f"{module}.{member}" for module, members in listed for member in members.split()}


def _linked(helpers: Sequence[str], at_once: Collection[str]) -> str:
    """The helpers of a script. Members that its header names are made with their modules, each of the others
    when a call first uses it.

    The server runs the whole text at each call. To make a closure costs it about a thousand instructions, on
    first use twice that, and a call uses a quarter of what there is. One function makes all that are made on
    first use, since to take over a variable costs as much again.
    """
    parts = [_Parts(name, at_once) for name in helpers]
    modules = [part for part in parts if part.name]
    seldom = "else".join(part.branch for part in modules if part.branch)
    return "\n".join(
        [
            *(chunk for part in parts for chunk in part.beside),
            *([f"local {', '.join(part.name or '' for part in modules)}"] if modules else []),
            *(part.table for part in modules),
            *([f"local create = {{ __index = function(module, name)\n{seldom}end\nend }}"] if seldom else []),
            *(f"setmetatable({part.name}, create)" for part in modules if part.branch),
        ]
    )


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
            constants |= zip(found["names"].split(", "), found["values"].split(", "), strict=True)
    whole = _WORD.sub(lambda word: constants.get(word[0], word[0]), "\n".join(lines))
    return _KEY.sub(lambda key: f"(PREFIX .. '{key['kind']}" + (":' .. " if key["has_name"] else "'"), whole)


@cache
def load(name: str) -> Script:
    """The script `lua/<name>.lua` with its helpers. Raises FileNotFoundError where there is none."""
    text = (LUA / f"{name}.lua").read_text(encoding="utf-8")
    found = _INCLUDE.search(text)
    helpers = found["names"].split() if found else []
    at_once = _at_once(text)
    whole = _folded("\n".join([_linked(helpers, at_once), _comments_away(text)]))
    return Script(
        name, whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest(), "place" in helpers
    )


def names() -> tuple[str, ...]:
    """Every operation there is."""
    return tuple(sorted(path.stem for path in LUA.glob("*.lua")))
