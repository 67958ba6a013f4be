"""What of a page can be run: the files that it shows, and its console sessions.

A block whose first line is `# NAME` is that file, whole; several blocks of one TOML name are its parts. In a
block of the language `console`, a line that begins with `$ ` is a command, and the lines below are what it
prints; `...` stands for anything, and alone on a line for any lines or none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"# ([\w.-]+\.(?:py|toml))\n")


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a session, and what the page says that it prints. line: where the page has it."""

    line: int
    command: str
    printed: str

    def is_what_was_printed(self, text: str) -> bool:
        """Whether `text` is what the page says, whatever the width of columns."""
        lines = "".join(map(_pattern, _lines(self.printed)))
        return re.fullmatch(lines, "".join(f"{line}\n" for line in _lines(text)), re.DOTALL) is not None


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def _pattern(line: str) -> str:
    return r"(?:[^\n]*\n)*" if line == "..." else ".*?".join(map(re.escape, line.split("..."))) + r"\n"


def files(page: Path) -> dict[str, str]:
    """The files that a page shows."""
    found: dict[str, str] = {}
    for _, _, body in _blocks(page):
        named = _NAMED.match(body)
        if named is not None:
            found[named[1]] = found.get(named[1], "") + body
    return found


def session(page: Path) -> list[Step]:
    """All commands of a page, in its order."""
    return [
        step for language, line, body in _blocks(page) if language == "console" for step in _steps(body, line)
    ]


def _blocks(page: Path) -> Iterator[tuple[str, int, str]]:
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        yield block[1], text.count("\n", 0, block.start(2)) + 1, block[2]


def _steps(body: str, first: int) -> Iterator[Step]:
    lines = body.splitlines()
    begins = [at for at, line in enumerate(lines) if line.startswith("$ ")]
    for at, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        yield Step(first + at, lines[at][2:], "\n".join(lines[at + 1 : end]))
