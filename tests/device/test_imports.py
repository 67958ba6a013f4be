"""The supervisor never loads torch, the child of a simulated card nothing of NVML."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _loaded(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["reading", "listing", "nvml", "simulated", "verdict"])
def test_the_supervisors_side_loads_no_torch(module: str) -> None:
    """The supervisor's modules can be imported without torch, so that it never creates a CUDA context."""
    assert "torch" not in _loaded(f"import gpu_agent.device.{module}")


def test_the_childs_side_loads_only_its_own() -> None:
    """The child of a simulated card loads neither the ledger, the gateway nor our driver readings."""
    loaded = _loaded("import gpu_agent.device.sim_torch, gpu_agent.device.verdict")
    assert not {"scheduler", "gateway", "redis", "gpu_agent.device.nvml"} & loaded
