"""The real card as torch's CUDA allocator knows it: the child's side.

Owns the measuring of the context's cost and the check that torch sees the card that this process was pinned
to. Reads the driver through `nvml`, which needs no context, because the reading that counts is the one before
there is any.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from gpu_agent.device.canary import canary_holds
from gpu_agent.device.held import map_tensors
from gpu_agent.device.reading import CardUnreadable, MemoryReading
from gpu_agent.device.torch_device import DeviceMismatch, Movable

_QUIET_S = 0.05


class CudaDevice:
    """A `TorchDevice` on `cuda:0` of a process that sees one card only."""

    def __init__(self, uuid: str, *, context_bytes: int) -> None:
        """Take over a card whose context exists already; `open` is how to come by one."""
        self.uuid = uuid
        self.context_bytes = context_bytes
        self.device = torch.device("cuda", 0)
        self.total = int(torch.cuda.get_device_properties(self.device).total_memory)
        self._streams: dict[int, torch.cuda.Stream] = {}

    @classmethod
    def open(cls, environment: Mapping[str, str]) -> CudaDevice:
        """Create the context on the card that CUDA_VISIBLE_DEVICES names by its id, and measure what it
        costs. Raises DeviceMismatch.
        """
        pin = environment.get("CUDA_VISIBLE_DEVICES", "")
        if not pin or "," in pin:
            raise DeviceMismatch(f"CUDA_VISIBLE_DEVICES = {pin!r}: it must name one card, by its id")
        read = _driver_of(pin)
        before = _quiet(read)
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if seen != 1:
            raise DeviceMismatch(f"torch sees {seen} cards behind the pin {pin}; one is needed")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        _check_uuid(pin)
        _check_allocator()
        # The canary brings in cuBLAS, whose handle and kernels are a part of what every later run relies on.
        if not canary_holds(torch.device("cuda", 0)):
            raise DeviceMismatch(f"{pin} does not multiply right; see dmesg for Xid events")
        torch.cuda.synchronize()
        held = torch.cuda.memory_reserved(0)
        context = _context_cost(before, _quiet(read), held=held)
        return cls(pin, context_bytes=context or 0)

    def allocated(self) -> int:
        return int(self._stats()["allocated_bytes"]["all"]["current"])

    def reserved(self) -> int:
        return int(self._stats()["reserved_bytes"]["all"]["current"])

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return int(self._stats()["allocated_bytes"]["all"]["peak"])

    def set_cap(self, reserved_bytes: int) -> None:
        share = min(max(reserved_bytes, 0) / self.total, 1.0)
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def segments(self) -> int:
        # Running totals of what was taken and given back: with expandable segments the number of segments
        # stands still while one of them grows.
        reserved = self._stats()["reserved_bytes"]["all"]
        return int(reserved["allocated"] + reserved["freed"])

    def ooms(self) -> int:
        return int(self._stats()["num_ooms"])

    def adopt(self, held: object) -> int:
        return 0

    def to_device(self, held: Movable) -> Movable:
        return map_tensors(held, lambda tensor: tensor.to(self.device))

    def to_host(self, held: Movable) -> Movable:
        return map_tensors(held, lambda tensor: tensor.to("cpu"))

    def tracking(self, *, lane: int = 0) -> AbstractContextManager[None]:
        return nullcontext() if lane == 0 else self._on_stream(lane)

    def reserve(self, nbytes: int) -> AbstractContextManager[None]:
        return nullcontext()

    def canary(self) -> bool:
        return canary_holds(self.device)

    def _stats(self) -> dict[str, Any]:
        # As the allocator tells them. Each of torch's own readers flattens and sorts all of them, some two
        # hundred, to answer with one; a run needs five.
        return torch.cuda.memory_stats_as_nested_dict(self.device)

    @contextmanager
    def _on_stream(self, lane: int) -> Iterator[None]:
        stream = self._streams.get(lane)
        if stream is None:
            fresh = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream = self._streams.setdefault(lane, fresh)
        with torch.cuda.stream(stream):
            yield


def _driver_of(uuid: str) -> Callable[[], MemoryReading | None]:
    """A reader of the card's memory that answers None where NVML is not there or does not say."""
    try:
        from gpu_agent.device.nvml import NvmlCard
    except ImportError:
        return lambda: None
    card = NvmlCard(uuid, index=0, product="", total=0, is_mig=uuid.startswith("MIG-"))

    def read() -> MemoryReading | None:
        try:
            return card.read()
        except CardUnreadable:
            return None

    return read


def _quiet(read: Callable[[], MemoryReading | None]) -> MemoryReading | None:
    """A reading that stood still for a moment; None where there is none, or the card never rests."""
    for _ in range(10):
        first = read()
        time.sleep(_QUIET_S)
        second = read()
        if first is None or second is None:
            return None
        if first.used == second.used:
            return second
    return None


def _context_cost(before: MemoryReading | None, after: MemoryReading | None, *, held: int) -> int | None:
    """W: what the driver shows beyond the allocator's hold. None where it cannot be told.

    The delta counts only if no other process came, went or changed meanwhile, as far as processes are shown.
    """
    if before is not None and after is not None:
        others = [_without_us(reading) for reading in (before, after)]
        cost = after.used - before.used - held
        if others[0] == others[1] and cost > 0:
            return cost
    if after is not None and after.processes is not None and os.getpid() in after.processes:
        return max(after.processes[os.getpid()] - held, 0)
    return None


def _without_us(reading: MemoryReading) -> dict[int, int] | None:
    if reading.processes is None:
        return None
    return {pid: nbytes for pid, nbytes in reading.processes.items() if pid != os.getpid()}


def _check_uuid(pin: str) -> None:
    """Hold torch's card against the pin. Torch does not show ids of MIG instances, so those go unchecked."""
    if pin.startswith("MIG-"):
        return
    seen = str(torch.cuda.get_device_properties(0).uuid)
    if _plain(seen) != _plain(pin):
        raise DeviceMismatch(f"pinned to {pin}, but torch sees GPU-{_plain(seen)}; is CUDA_DEVICE_ORDER set?")


def _check_allocator() -> None:
    """See that the allocator was given expandable segments before it was made: later it is too late."""
    settings = torch.cuda.memory._snapshot(0).get("allocator_settings", {})
    if not settings.get("expandable_segments", True):
        raise DeviceMismatch(
            "expandable_segments is off: PYTORCH_ALLOC_CONF must be in the environment before exec"
        )


def _plain(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")
