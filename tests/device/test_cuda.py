"""The real card's child side: what can be shown without one, and on one with `pytest -m gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_agent.device import cuda
from gpu_agent.device.listing import list_cards
from gpu_agent.device.reading import MemoryReading
from gpu_agent.device.torch_device import DeviceMismatch, open_device

MIB, GIB = 1024**2, 1024**3


def _reading(used: int, processes: dict[int, int] | None) -> MemoryReading:
    return MemoryReading(total=24 * GIB, driver=0, used=used, free=24 * GIB - used, processes=processes)


def test_the_context_costs_what_the_driver_shows_beyond_the_allocator() -> None:
    """W is the driver's delta less what torch's allocator reserved meanwhile, strangers or not."""
    before, after = _reading(GIB, {7: GIB}), _reading(GIB + 600 * MIB, {7: GIB, os.getpid(): 600 * MIB})
    assert cuda._context_cost(before, after, held=22 * MIB) == 578 * MIB


def test_a_delta_on_a_busy_card_is_not_trusted() -> None:
    """When another process changed meanwhile the process list is asked; without one there is no figure."""
    before, after = _reading(GIB, {7: GIB}), _reading(3 * GIB, {7: 2 * GIB, os.getpid(): 600 * MIB})
    assert cuda._context_cost(before, after, held=100 * MIB) == 500 * MIB
    assert cuda._context_cost(before, _reading(3 * GIB, {7: 2 * GIB}), held=0) is None
    assert cuda._context_cost(None, None, held=0) is None


def test_hidden_processes_leave_the_delta() -> None:
    """In a container the delta of a card at rest is all there is."""
    assert cuda._context_cost(_reading(GIB, None), _reading(2 * GIB, None), held=0) == GIB


def _sequence(*used: int | None) -> Callable[[], MemoryReading | None]:
    waiting = list(used)

    def read() -> MemoryReading | None:
        value = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return None if value is None else _reading(value, None)

    return read


def test_a_reading_counts_only_when_the_card_is_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal readings in a row make one; a silent driver, or one that never rests, gives none."""
    monkeypatch.setattr(cuda, "_QUIET_S", 0.0)
    rested = cuda._quiet(_sequence(1, 2, 3, 3))
    assert rested is not None and rested.used == 3
    assert cuda._quiet(_sequence(None)) is None
    assert cuda._quiet(_sequence(*range(100))) is None


@pytest.mark.parametrize("pin", ["", "GPU-a,GPU-b"])
def test_a_child_is_pinned_to_one_card(pin: str) -> None:
    """Without a pin, or with two, the child refuses to start."""
    with pytest.raises(DeviceMismatch, match="one card"):
        open_device({"CUDA_VISIBLE_DEVICES": pin})


def test_ids_are_compared_as_text() -> None:
    """Two writings of an id may differ in the `GPU-` prefix and in the case of letters, in nothing else."""
    assert cuda._plain("GPU-ABCD-12") == cuda._plain("abcd-12")
    assert cuda._plain("GPU-ABCD-12") != cuda._plain("abcd-13")


_ON_A_CARD = """
import torch
from gpu_agent.device.torch_device import open_device
device = open_device()
assert device.context_bytes > 50 * 2**20, device.context_bytes
before = device.segments()
with device.tracking(lane=1):
    x = torch.ones(64 * 2**20, device=device.device)
assert device.allocated() >= 256 * 2**20 and device.reserved() >= device.allocated()
assert device.segments() != before
device.set_cap(300 * 2**20)
try:
    torch.ones(64 * 2**20, device=device.device)
except torch.OutOfMemoryError:
    pass
else:
    raise SystemExit("the cap did not hold")
assert device.ooms() == 1
del x
device.empty_cache()
assert device.to_host({"x": torch.ones(3, device=device.device)})["x"].device.type == "cpu"
device.synchronize()
assert device.canary()
print("held")
"""


@pytest.mark.gpu
def test_a_child_on_a_real_card(tmp_path: Path) -> None:
    """On a real card a child measures its context, is bound by its cap, and its canary holds."""
    for card in list_cards(None, host_dir=tmp_path):
        environment = {**os.environ, **card.child_environment()}
        done = subprocess.run(
            [sys.executable, "-c", _ON_A_CARD], env=environment, text=True, capture_output=True
        )
        assert done.stdout == "held\n", done.stderr
        card.close()
