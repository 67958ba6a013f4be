"""Simulated cards of 512 MiB in a folder of the test's own, and waiting for a claim to become true."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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


@pytest.fixture
def until() -> Callable[[str, Callable[[], bool]], None]:
    """Wait until a claim holds; fails with the claim after 20 s."""

    def wait(claim: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < deadline, f"never came true: {claim}"
            time.sleep(0.005)

    return wait
