"""`import vramgate` is what every caller pays for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import vramgate

ROOT = Path(vramgate.__file__).parents[1]
HEAVY = {
    "torch", "numpy", "fastapi", "starlette", "uvicorn", "redis", "hiredis", "msgpack", "pydantic_settings",
    "typer", "jsonschema_rs", "orjson", "prometheus_client", "pynvml", "silero_vad", "scheduler", "gateway",
    "gpu_agent", "vramgate.cli",
}  # fmt: skip

PROGRAM = "import sys, json, vramgate; print(json.dumps(sorted(sys.modules)))"


def test_importing_the_face_loads_httpx_and_pydantic_only() -> None:
    """Neither torch nor FastAPI nor redis nor anything of the services is loaded, nor the tools of the
    others."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(json.loads(ran.stdout))
    assert {
        "vramgate.model",
        "vramgate.client",
        "vramgate.errors",
        "vramgate.units",
        "httpx",
        "pydantic",
    } <= loaded
    assert not loaded & HEAVY


def test_every_public_name_is_there() -> None:
    """What `__all__` lists can be imported."""
    for name in vramgate.__all__:
        assert getattr(vramgate, name) is not None
