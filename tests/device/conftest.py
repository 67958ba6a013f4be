"""Simulated cards of 512 MiB in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_agent.device.sim_torch import SimTorchDevice
from gpu_agent.device.simulated import SimSpec, SimulatedCard, create_cards

MIB = 1024**2


@pytest.fixture
def card(tmp_path: Path) -> Iterator[SimulatedCard]:
    """One card of 512 MiB: 8 MiB of driver, 8 MiB per context, bytes of the dead back after 50 ms."""
    (card,) = create_cards(SimSpec.parse("1x512MiB,delay_ms=50"), host_dir=tmp_path)
    yield card
    card.close()


@pytest.fixture
def device(card: SimulatedCard) -> Iterator[SimTorchDevice]:
    """The card as torch sees it from this process."""
    device = SimTorchDevice.open(card.child_environment()["VRAMGATE_SIM"])
    yield device
    device.close()
