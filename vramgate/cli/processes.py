"""The processes below one of ours, read from /proc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def descendants(pid: int) -> Iterator[int]:
    """Every living process below `pid`, parents before their children. Nothing where there is no /proc."""
    for thread in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            children = (thread / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


def environment(pid: int) -> dict[str, str]:
    """What a process was started with, empty when it is gone or not ours."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in lines if "=" in line)
