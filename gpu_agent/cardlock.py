"""One agent per physical card and host: an advisory lock that the kernel drops when its holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

from vramgate.errors import VramgateError


class CardTakenHere(VramgateError):
    """Another agent on this host holds the card."""


class CardLock:
    """Held from `acquire` until `release` or the end of the process."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    @classmethod
    def acquire(cls, uuid: str, *, host_dir: Path) -> Self:
        """Take the card. Raises CardTakenHere, which names the process that has it."""
        host_dir.mkdir(parents=True, exist_ok=True)
        path = host_dir / f"{_file_name(uuid)}.agent"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise CardTakenHere(
                f"card {uuid} is served by another agent on this host (process {holder}, lock {path}); "
                "stop that one first"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return cls(fd)

    def release(self) -> None:
        """Idempotent. The file stays: removing it would let two agents lock two files of one name."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _file_name(uuid: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in uuid)
