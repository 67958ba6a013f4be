"""What a running `vramgate up` leaves for the other commands of its directory: `.vramgate/up.json`.

Owns the file's form and the question whether the `up` that wrote it still runs. A file whose process is gone
(it was killed) counts as no file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vramgate.pids import start_of

NAME = "up.json"


@dataclass(frozen=True, slots=True)
class Running:
    """A running `up`. `started` tells its process from a later one with the same pid."""

    pid: int
    started: int
    redis_url: str
    pool: str
    gateways: tuple[str, ...]
    simulate: str | None


def write(data_dir: Path, running: Running) -> None:
    """Replace the file in one step, so that no reader sees half of it."""
    data_dir.mkdir(parents=True, exist_ok=True)
    draft = data_dir / f"{NAME}.{running.pid}"
    draft.write_text(json.dumps(asdict(running), indent=2) + "\n")
    draft.replace(data_dir / NAME)


def read(data_dir: Path) -> Running | None:
    """The `up` that runs over `data_dir`, None when there is none."""
    try:
        document = json.loads((data_dir / NAME).read_text())
        running = Running(**document | {"gateways": tuple(document["gateways"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return running if start_of(running.pid) == running.started else None


def remove(data_dir: Path) -> None:
    """Take the file away. Idempotent."""
    (data_dir / NAME).unlink(missing_ok=True)
