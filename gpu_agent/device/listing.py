"""Which cards this host has: the one place that chooses between the driver and the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpu_agent.device.reading import DriverCard


def list_cards(simulate: str | None, *, host_dir: Path) -> Sequence[DriverCard]:
    """Every card of this host, in the driver's order; one that is lost is left out and does not hide the
    others.

    `simulate` ("2x24GiB") makes simulated cards, whose state is kept under `host_dir` so that other processes
    of this host share it. Raises NoNvml when there is no driver or it shows no card, ValueError for a bad
    `simulate`.
    """
    if simulate is not None:
        from gpu_agent.device.simulated import SimSpec, create_cards

        return create_cards(SimSpec.parse(simulate), host_dir=host_dir)
    from gpu_agent.device.nvml import list_nvml_cards

    return list_nvml_cards()
