"""The simulated card as torch sees it: what counts, what does not, and how it fails."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_agent.device.sim_card import Fault
from gpu_agent.device.sim_torch import SimTorchDevice
from gpu_agent.device.simulated import SimSpec, SimulatedCard, create_cards
from gpu_agent.device.torch_device import DeviceMismatch, TorchDevice, open_device
from gpu_agent.device.verdict import Verdict, classify
from tests.waiting import wait_for

MIB = 1024**2


def _mib(n: float) -> torch.Tensor:
    return torch.empty(int(n * MIB), dtype=torch.uint8)


class Net(torch.nn.Module):
    """8 MiB of weight, a buffer of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1024, 2048))
        self.register_buffer("table", torch.ones(512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


# -- what counts


def test_outputs_count_and_are_freed(device: SimTorchDevice) -> None:
    """A new tensor counts while it lives; its bytes stay reserved until the cache is emptied."""
    with device.tracking():
        x = _mib(4)
        assert (device.allocated(), device.reserved()) == (4 * MIB, 4 * MIB)
        del x
        assert (device.allocated(), device.reserved()) == (0, 4 * MIB)
    device.empty_cache()
    assert device.reserved() == 0


def test_views_and_in_place_count_once(device: SimTorchDevice) -> None:
    """Views, in-place operations and detaching add nothing; a view alone keeps its whole storage counted."""
    with device.tracking():
        x = _mib(4)
        y = x.view(2, -1)[1]
        y.add_(1)
        z = y.detach().reshape(-1)
        assert device.allocated() == 4 * MIB
        del x, y
        assert device.allocated() == 4 * MIB
        del z
        assert device.allocated() == 0


def test_inference_mode_counts(device: SimTorchDevice) -> None:
    """Operations inside inference mode count like all others."""
    with device.tracking(), torch.inference_mode():
        x = torch.ones(MIB)
        y = x * 2
        assert device.allocated() == 8 * MIB
        del x, y
    assert device.allocated() == 0


def test_composites_are_counted_inside(device: SimTorchDevice) -> None:
    """In inference mode, too, an operation made of others counts what those make, and aliases are free."""
    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    device.adopt(attention)
    resident = device.allocated()
    x = torch.ones(1, 2048, 64)
    peaks = []
    for mode in (torch.no_grad, torch.inference_mode):
        device.reset_peak()
        with device.tracking(), mode():
            linear = torch.nn.functional.linear(x, torch.ones(64, 64))
            y = torch.einsum("bik,bjk->bij", linear, linear).softmax(-1)
            assert device.allocated() == resident + x.nbytes + 2048 * 2048 * 4
            same = torch.nn.functional.dropout(y, training=False).contiguous().to(torch.float32)
            assert device.allocated() == resident + x.nbytes + 2048 * 2048 * 4
            peaks.append(device.peak())
            del linear, y, same
    assert peaks[0] == peaks[1] >= resident + 2 * 2048 * 2048 * 4


def test_resize_is_counted_anew(device: SimTorchDevice) -> None:
    """`resize_` grows what a tensor costs, also one that began with nothing, and `out=` does too."""
    with device.tracking():
        x = torch.empty(0)
        x.resize_(MIB)
        assert device.allocated() == 4 * MIB
        x.resize_(2 * MIB)
        assert device.allocated() == 8 * MIB
        out = torch.empty(0)
        torch.add(x, 1, out=out)
        assert device.allocated() == 16 * MIB


def test_torch_tensor_counts(device: SimTorchDevice) -> None:
    """`torch.tensor(list)` is a new tensor of the card."""
    with device.tracking():
        x = torch.tensor([1.0] * 1024)
        assert device.allocated() == 4096
        del x
    assert device.allocated() == 0


def test_host_tensors_and_their_views_do_not_count(device: SimTorchDevice) -> None:
    """What lay on the host before costs nothing, nor does a view of it; what is computed from it does."""
    host = torch.ones(MIB)
    with device.tracking():
        view = host.view(1024, 1024)[3:]
        assert device.allocated() == 0
        computed = host + 1
        assert device.allocated() == 4 * MIB
        del view, computed


def test_several_outputs_count_each(device: SimTorchDevice) -> None:
    """An operation with several outputs costs what they cost together, pieces of one storage once."""
    with device.tracking():
        x = torch.rand(1024, 1024)
        values, indices = x.sort()
        assert device.allocated() == (4 + 4 + 8) * MIB
        pieces = x.chunk(4)
        assert device.allocated() == (4 + 4 + 8) * MIB
        del values, indices, pieces


def test_gradients_count(device: SimTorchDevice) -> None:
    """What the backward pass makes counts, and goes with the graph."""
    with device.tracking():
        x = torch.ones(MIB, requires_grad=True)
        (x * 2).exp().sum().backward()  # type: ignore[no-untyped-call]
        assert device.allocated() == 8 * MIB
        assert device.peak() >= 12 * MIB
        del x
    gc.collect()
    assert device.allocated() == 0


def test_scripted_operations_count(device: SimTorchDevice) -> None:
    """Operations that TorchScript runs count, and its intermediates are freed as it drops them."""
    net = torch.jit.script(Net().eval())
    device.adopt(net)
    resident = device.allocated()
    with device.tracking(), torch.inference_mode():
        for _ in range(3):
            device.reset_peak()
            y = net(torch.ones(256, 1024))
            assert device.allocated() == resident + 2 * MIB
            assert device.peak() == resident + 3 * MIB
            del y
    assert device.allocated() == resident


def test_the_peak_starts_anew(device: SimTorchDevice) -> None:
    """The peak is measured from `reset_peak` on."""
    with device.tracking():
        _mib(20)
        assert device.peak() == 20 * MIB
        device.reset_peak()
        _mib(3)
        assert device.peak() == 3 * MIB


def test_generators_are_counted_around_each_next(device: SimTorchDevice) -> None:
    """A generator's operations count in each step taken under tracking, and its locals stay counted."""

    def steps() -> Generator[int, None, None]:
        held = _mib(2)
        yield device.allocated()
        held = torch.cat([held, held])
        yield device.allocated()

    generator = steps()
    seen = []
    for _ in range(2):
        with device.tracking():
            seen.append(next(generator))
    generator.close()
    assert seen == [2 * MIB, 4 * MIB]
    assert device.allocated() == 0


def test_threads_count_only_under_tracking(device: SimTorchDevice) -> None:
    """Each lane's thread counts once it tracks; a thread that does not is not seen."""
    kept: list[torch.Tensor] = []

    def work(lane: int | None) -> None:
        if lane is None:
            kept.append(_mib(4))
            return
        with device.tracking(lane=lane):
            kept.append(_mib(4))

    with device.tracking():
        for lane in (None, 1, 2):
            thread = threading.Thread(target=work, args=(lane,))
            thread.start()
            thread.join()
    assert device.allocated() == 8 * MIB


def test_lanes_at_once_end_at_nothing(device: SimTorchDevice) -> None:
    """Lanes that allocate and free at the same time leave no byte behind."""

    def work(lane: int) -> None:
        with device.tracking(lane=lane), torch.inference_mode():
            x = torch.ones(64, 64)
            for _ in range(300):
                x = (x @ x).relu() / 64

    lanes = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    assert device.allocated() == 0


def test_a_cache_is_a_lanes_own_until_another_needs_it(device: SimTorchDevice) -> None:
    """What one lane cached is no use to another, but is given up before the other runs out."""
    with device.tracking(lane=1):
        _mib(300)
    with device.tracking(lane=2):
        _mib(100)
        assert device.reserved() == 400 * MIB
        x = _mib(400)
        assert device.reserved() == 400 * MIB
        del x
    assert device.ooms() == 0


def test_declared_workspace_counts_while_held(device: SimTorchDevice) -> None:
    """`reserve` costs its bytes inside its block only, and is in the peak."""
    with device.reserve(50 * MIB):
        assert device.allocated() == 50 * MIB
    assert (device.allocated(), device.peak()) == (0, 50 * MIB)
    with pytest.raises(torch.OutOfMemoryError), device.reserve(600 * MIB):
        pass


# -- the card and its driver


def test_the_driver_sees_context_and_segments(device: SimTorchDevice, card: SimulatedCard) -> None:
    """The driver's figure for the process is its context and what the allocator reserved, no more or less."""
    assert card.read().used == device.context_bytes
    with device.tracking():
        x = _mib(5)
        assert card.read().used == device.context_bytes + device.reserved() == device.context_bytes + 6 * MIB
        del x
    device.empty_cache()
    assert card.read().used == device.context_bytes


_CHILD = """
import os, torch
from gpu_agent.device.torch_device import open_device
device = open_device()
with device.tracking():
    x = torch.empty(64 * 2**20, dtype=torch.uint8)
print("held", flush=True)
input()
"""


def test_a_killed_childs_memory_comes_back(card: SimulatedCard) -> None:
    """A child that is killed with tensors on the card is gone from it after the delay, context and all."""
    environment = {**os.environ, **card.child_environment()}
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        assert card.read().processes == {child.pid: (8 + 64) * MIB}
    finally:
        child.kill()
        child.wait()
    wait_for("context and segments are back", lambda: card.read().used == 0)


def test_segments_change_with_the_allocators_hold(device: SimTorchDevice) -> None:
    """`segments` moves when the allocator grows or shrinks and stands still otherwise."""
    with device.tracking():
        before = device.segments()
        x = _mib(4)
        grown = device.segments()
        del x
        x = _mib(4)
        assert before < grown == device.segments()
        del x
    device.empty_cache()
    assert device.segments() > grown


def test_the_cap_bounds_reserved_memory(device: SimTorchDevice) -> None:
    """Above the cap the allocator refuses although the card has room; raising it lifts that."""
    device.set_cap(100 * MIB)
    with device.tracking():
        with pytest.raises(torch.OutOfMemoryError):
            _mib(120)
        device.set_cap(200 * MIB)
        x = _mib(120)
        device.set_cap(50 * MIB)
        assert device.reserved() == 120 * MIB
        del x


def test_strangers_take_room(device: SimTorchDevice, card: SimulatedCard) -> None:
    """What a stranger holds is not there for torch, and is again when it vanishes."""
    stranger = card.stranger(300 * MIB)
    with device.tracking():
        with pytest.raises(torch.OutOfMemoryError):
            _mib(250)
        stranger.vanish()
        x = _mib(250)
        del x


def test_scale_multiplies_what_a_byte_costs(tmp_path: Path) -> None:
    """With scale 4 a host tensor of 1 MiB costs 4 MiB of the card, also as declared workspace."""
    (card,) = create_cards(SimSpec.parse("1x512MiB,scale=4"), host_dir=tmp_path)
    device = open_device(card.child_environment())
    with device.tracking():
        x = _mib(1)
        assert device.allocated() == 4 * MIB
        with device.reserve(MIB):
            assert device.allocated() == 8 * MIB
        del x


def test_the_pin_is_verified(card: SimulatedCard) -> None:
    """A child that finds another card than it was pinned to refuses to start, and holds nothing of it."""
    spec = card.child_environment()["VRAMGATE_SIM"].replace(card.uuid + '"', 'SIM-00000000-9"')
    with pytest.raises(DeviceMismatch, match="SIM-00000000-9"):
        open_device({"VRAMGATE_SIM": spec})
    assert card.read().used == 0


def test_a_context_that_does_not_fit_is_out_of_memory(card: SimulatedCard) -> None:
    """A full card has no room for another context."""
    with card.stranger(500 * MIB), pytest.raises(torch.OutOfMemoryError):
        open_device(card.child_environment())


# -- running out


def test_out_of_memory_is_typed_and_leaves_nothing(device: SimTorchDevice) -> None:
    """A refusal raises torch.OutOfMemoryError, is counted, and costs nothing."""
    with device.tracking():
        x = _mib(300)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.cat([x, x])
        assert (device.allocated(), device.ooms()) == (300 * MIB, 1)
        del x
    assert device.allocated() == 0


def test_absurd_sizes_are_refused_before_the_host_is_asked(device: SimTorchDevice) -> None:
    """What no card could hold is out of memory at once: a petabyte is neither allocated nor filled."""
    with device.tracking():
        for make in (torch.zeros, torch.ones, torch.rand, torch.randn, torch.empty):
            with pytest.raises(torch.OutOfMemoryError):
                make(2**48)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1).expand(2**48).clone()


def test_scripted_out_of_memory_has_lost_its_type(device: SimTorchDevice) -> None:
    """Inside TorchScript an OOM arrives as a bare RuntimeError with the text, and classify still knows it."""
    net = torch.jit.script(Net().eval())
    device.adopt(net)
    with pytest.raises(RuntimeError) as caught, device.tracking():
        x = torch.ones(40_000, 1024)
        device.set_cap(device.reserved())
        net(x)
    assert type(caught.value) is RuntimeError
    assert "CUDA out of memory" in str(caught.value)
    assert classify(caught.value, device_oom=False) is Verdict.OOM
    assert device.ooms() == 1


def test_a_scripted_failure_of_the_model_is_not_out_of_memory(device: SimTorchDevice) -> None:
    """A script that fails for another reason after an OOM was caught keeps its own text."""
    net = torch.jit.script(Net().eval())
    with pytest.raises(RuntimeError) as caught, device.tracking():
        with pytest.raises(torch.OutOfMemoryError):
            _mib(600)
        net(torch.ones(1, 3))
    assert "mat1 and mat2" in str(caught.value)
    assert classify(caught.value, device_oom=False) is Verdict.MODEL


def test_memory_is_back_once_the_traceback_is_gone(device: SimTorchDevice) -> None:
    """Once the except block is left, what the failed run held is free, and half of the work fits."""

    def run(n: int) -> None:
        held = [_mib(n) for _ in range(4)]
        torch.cat(held)

    with device.tracking():
        failed = False
        try:
            run(100)
        except torch.OutOfMemoryError:
            failed = True
        assert failed
        assert device.allocated() == 0
        run(50)


# -- moving


def test_weights_are_adopted_where_they_lie(device: SimTorchDevice) -> None:
    """`adopt` finds weights in modules, containers and attributes and counts each storage once."""

    class Holder:
        def __init__(self) -> None:
            self.net = Net()
            self.same = self.net
            self.extras = {"a": [torch.ones(MIB)], "b": (self.net.weight,)}
            self.name = "holder"
            self.function = threading.Thread

    holder = Holder()
    assert device.adopt(holder) == (8 + 1 + 4) * MIB
    assert device.adopt(holder) == 0
    del holder
    gc.collect()
    assert device.allocated() == 0


@pytest.mark.parametrize("prepare", [lambda net: net, torch.jit.script], ids=["module", "script"])
def test_parking_frees_and_unparking_counts(device: SimTorchDevice, prepare: Callable[[Any], Any]) -> None:
    """A module on the host costs nothing, comes back at its price, and computes the same."""
    net = prepare(Net().eval())
    x = torch.ones(1, 1024)
    with torch.inference_mode(False):
        expected = net(x).detach().clone()
    assert device.to_device(net) is net
    assert device.allocated() == 9 * MIB
    assert device.to_device(net) is net
    assert device.allocated() == 9 * MIB
    device.to_host(net)
    gc.collect()
    assert device.allocated() == 0
    device.to_device(net)
    assert device.allocated() == 9 * MIB
    with device.tracking():
        assert torch.equal(net(x), expected)


def test_moved_tensors_are_copies(device: SimTorchDevice) -> None:
    """On the card is a copy that counts, back on the host one that does not, in the shape they were given."""
    host = torch.arange(1024)
    with device.tracking():
        moved: Any = device.to_device({"x": [host, (host, 3)]})
        assert device.allocated() == 2 * 8192
        assert moved["x"][0].data_ptr() != host.data_ptr()
        moved["x"][0].zero_()
        back = device.to_host(moved)
        del moved
        assert device.allocated() == 0
    assert torch.equal(back["x"][1][0], host)
    assert int(host.sum()) > 0


def test_a_move_that_does_not_fit_is_out_of_memory(device: SimTorchDevice) -> None:
    """Moving more than the card has raises torch.OutOfMemoryError and counts nothing."""
    host = torch.empty(600 * MIB, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError):
        device.to_device(host)
    assert device.allocated() == 0


# -- breaking


def test_a_poisoned_context_fails_everything(
    device: SimTorchDevice, card: SimulatedCard, tmp_path: Path
) -> None:
    """After poisoning, operations, synchronise and the canary fail, and a new context is whole."""
    assert device.canary()
    card.poison()
    assert not device.canary()
    with pytest.raises(RuntimeError, match="CUDA error") as caught:
        device.synchronize()
    assert classify(caught.value, device_oom=False) is Verdict.STICKY_SUSPECT
    with device.tracking(), pytest.raises(RuntimeError, match="CUDA error"):
        torch.ones(1)
    device.close()
    fresh = SimTorchDevice(tmp_path / f"{card.uuid}.card")
    assert fresh.canary()
    fresh.close()


def test_a_lost_card_fails_the_child_too(device: SimTorchDevice, card: SimulatedCard) -> None:
    """Where the driver has lost the card, torch does not go on computing on it."""
    card.set_fault(Fault.LOST)
    assert not device.canary()
    with device.tracking(), pytest.raises(RuntimeError, match="CUDA error"):
        torch.ones(1)


def test_the_canary_costs_nothing(device: SimTorchDevice) -> None:
    """The canary leaves the sums of the card as they were, also inside tracking."""
    with device.tracking():
        assert device.canary()
    assert (device.allocated(), device.reserved(), device.peak()) == (0, 0, 0)


def test_the_simulated_device_is_a_torch_device(device: SimTorchDevice) -> None:
    """The simulated device has the whole protocol (checked by the type checker here)."""
    as_device: TorchDevice = device
    assert as_device.device.type == "cpu"
