"""HTTP in front of the ledger: validate, translate, wait, answer. FastAPI, no torch, no CUDA context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    # Late, because `python -m gateway` passes here first: it has to look for packages that shadow ours, and
    # to set up shared metrics, before anything else is imported.
    if name == "create_app":
        from gateway.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
