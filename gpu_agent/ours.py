"""Whether the packages that this process got are ours: their names are common, and a user's folder may
hold the same.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

NAMES = ("scheduler", "gpu_agent", "vramgate")


def shadowed() -> str | None:
    """One line that says what shadows which of our packages; None when all are ours."""
    root = Path(__file__).resolve().parent.parent
    for name in NAMES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or not origin.is_relative_to(root / name):
            return (
                f"the package {name} was taken from {origin or 'nowhere'}, which shadows vramgate's own"
                f" in {root}; start from another directory, or remove it from PYTHONPATH"
            )
    return None
