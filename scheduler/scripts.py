"""Loads `lua/`: one operation per file, helpers of `lua/_lib/` expanded where the header's `-- include:` line
names them.

The text is constant: arguments travel in ARGV, never in the script, so that a server's script cache holds one
copy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LUA = Path(__file__).resolve().parent.parent / "lua"
_BEGINS = re.compile(r"(?!end\b)[a-z]")
_INCLUDE = re.compile(r"^-- include: (?P<names>[a-z_ ]+)$", re.MULTILINE)


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


def _declared(helpers: Sequence[str]) -> str:
    """All helper modules before the first of them, since they call each other."""
    return "\n".join(found[0] for name in helpers if (found := _module(name)))


def _module(name: str) -> re.Match[str] | None:
    return re.search(rf"^local {name} = {{.*}}$", _helper(name), re.MULTILINE)


def _on_first_use(name: str) -> str:
    """A helper whose members come into being when a call first uses them; its state is there from the start.

    The server runs the whole text at each call, a closure costs it about a thousand instructions, and a call
    uses a quarter of what there is.
    """
    module = _module(name)
    if module is None:
        return _helper(name)
    constants: list[str] = []
    members: list[str] = []
    for chunk in _chunks(_helper(name)):
        member = re.match(rf"(?:function )?{name}\.(\w+)", chunk)
        if member is not None:
            members.append(f"if name == '{member[1]}' then\n{chunk}\nreturn {name}.{member[1]}\n")
        elif chunk != module[0]:
            constants.append(chunk)
    created = "else".join(members)
    return "\n".join(
        [*constants, f"setmetatable({name}, {{ __index = function(_, name)", f"{created}end", "end })"]
    )


@cache
def load(name: str) -> Script:
    """The script `lua/<name>.lua` with its helpers. Raises FileNotFoundError where there is none."""
    text = (LUA / f"{name}.lua").read_text(encoding="utf-8")
    found = _INCLUDE.search(text)
    helpers = found["names"].split() if found else []
    parts = [_on_first_use(helper) for helper in helpers]
    whole = "\n".join([_declared(helpers), *parts, _comments_away(text)])
    return Script(
        name, whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest(), "place" in helpers
    )


def names() -> tuple[str, ...]:
    """Every operation there is."""
    return tuple(sorted(path.stem for path in LUA.glob("*.lua")))
