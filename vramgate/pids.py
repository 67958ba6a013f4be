"""Telling a process from a later one to which the kernel gave the same number."""

from __future__ import annotations

import os
from pathlib import Path


def start_of(pid: int) -> int | None:
    """When a live process started, in the kernel's ticks; None where there is none, zombies included.

    With the pid it names one process among all that ever had that pid. Without /proc every start is 0.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else _start_without_proc(pid)
    # The command's name is in parentheses and may hold anything: count from the last one.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _start_without_proc(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
