"""Loads `lua/`: one operation per file, helpers of `lua/_lib/` expanded where the header's `-- include:` line
names them.

The text is constant: arguments travel in ARGV, never in the script, so that a server's script cache holds one
copy.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LUA = Path(__file__).resolve().parent.parent / "lua"
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
def load(name: str) -> Script:
    """The script `lua/<name>.lua` with its helpers. Raises FileNotFoundError where there is none."""
    text = (LUA / f"{name}.lua").read_text(encoding="utf-8")
    found = _INCLUDE.search(text)
    helpers = found["names"].split() if found else []
    parts = [(LUA / "_lib" / f"{helper}.lua").read_text(encoding="utf-8") for helper in helpers]
    whole = _comments_away("\n".join([*parts, text]))
    return Script(
        name, whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest(), "place" in helpers
    )


def names() -> tuple[str, ...]:
    """Every operation there is."""
    return tuple(sorted(path.stem for path in LUA.glob("*.lua")))
