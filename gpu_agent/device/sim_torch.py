"""The simulated card as torch would see it: the child's side.

Owns the counting of operations (a dispatch mode per thread), the moves between host and card, and the faults
that a real card would answer with. Tensors stay in host memory; what they would cost is booked by
`sim_storages`.

Not seen, and so not counted: temporaries inside a kernel (declare them with `reserve`), what threads allocate
that never entered `tracking`, and storages changed behind the dispatcher until an operation next returns
them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_agent.device.canary import canary_holds
from gpu_agent.device.held import map_tensors, tensors_of
from gpu_agent.device.sim_allocator import CachingAllocator
from gpu_agent.device.sim_card import CardFull, Holder, SimCardFile
from gpu_agent.device.sim_operations import (
    Traits,
    is_among,
    requested_bytes,
    storage_of,
    tensors_in,
    traits_of,
)
from gpu_agent.device.sim_storages import StorageRegistry
from gpu_agent.device.torch_device import DeviceMismatch, Movable
from vramgate.quantities import format_size

_ILLEGAL_ADDRESS = 700
_ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered (simulated fault)"
_HOST_REFUSED = "DefaultCPUAllocator"
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class _Thread(threading.local):
    """What one thread does: its lane, how deep it tracks and pauses, why its last operation failed."""

    lane = 0
    depth = 0
    paused = 0
    failure: str | None = None


class _CardBacking:
    """The process's slot in the card's file, as the allocator asks for it."""

    def __init__(self, file: SimCardFile, slot: int) -> None:
        self._file = file
        self._slot = slot

    def grow(self, nbytes: int) -> bool:
        return self._file.grow(self._slot, nbytes)

    def shrink(self, nbytes: int) -> None:
        self._file.shrink(self._slot, nbytes)


class SimTorchDevice:
    """A `TorchDevice` without a device. One per process and card; opening it pays for the context."""

    def __init__(self, path: Path) -> None:
        """Open the card whose file is at `path`. Raises OutOfMemoryError if the context does not fit."""
        self._file = SimCardFile(path)
        self._config = self._file.config
        try:
            self._slot = self._file.claim(Holder.CHILD, self._config.context)
        except CardFull as error:
            raise torch.OutOfMemoryError(f"CUDA error: out of memory ({error})") from None
        allocator = CachingAllocator(_CardBacking(self._file, self._slot), cap=self._config.total)
        self._storages = StorageRegistry(allocator, scale=self._config.scale)
        self._thread = _Thread()
        self.device = torch.device("cpu")

    @classmethod
    def open(cls, spec: str) -> SimTorchDevice:
        """Open what `DriverCard.child_environment` put into VRAMGATE_SIM. Raises DeviceMismatch."""
        pinned = json.loads(spec)
        device = cls(Path(pinned["card"]))
        if device.uuid != pinned["uuid"]:
            device.close()
            raise DeviceMismatch(f"pinned to {pinned['uuid']}, but {pinned['card']} is {device.uuid}")
        return device

    def close(self) -> None:
        """Give everything back at once, context included; a process that just ends does so after a delay."""
        if not self._file.closed:
            self._file.drop(self._slot)
            self._file.close()

    @property
    def uuid(self) -> str:
        return self._file.uuid

    @property
    def total(self) -> int:
        return self._config.total

    @property
    def context_bytes(self) -> int:
        return self._config.context

    @property
    def scale(self) -> int:
        """How many bytes of the card one byte of host memory counts as."""
        return self._config.scale

    def allocated(self) -> int:
        with self._storages.settled() as allocator:
            return allocator.allocated

    def reserved(self) -> int:
        with self._storages.settled() as allocator:
            return allocator.reserved

    def reset_peak(self) -> None:
        with self._storages.settled() as allocator:
            allocator.peak = allocator.allocated

    def peak(self) -> int:
        with self._storages.settled() as allocator:
            return allocator.peak

    def set_cap(self, reserved_bytes: int) -> None:
        with self._storages.settled() as allocator:
            allocator.cap = min(max(reserved_bytes, 0), self.total)

    def empty_cache(self) -> None:
        with self._storages.settled() as allocator:
            allocator.empty_cache()

    def synchronize(self) -> None:
        self._check_context()

    def segments(self) -> int:
        with self._storages.settled() as allocator:
            return allocator.changes

    def ooms(self) -> int:
        with self._storages.settled() as allocator:
            return allocator.refusals

    def adopt(self, held: object) -> int:
        before = self.allocated()
        for tensor in tensors_of(held):
            self._book(tensor)
        return self.allocated() - before

    def to_device(self, held: Movable) -> Movable:
        self._check_context()
        with self._paused():
            return map_tensors(held, self._copy_in)

    def to_host(self, held: Movable) -> Movable:
        self._check_context()
        with self._paused():
            return map_tensors(held, self._copy_out)

    @contextmanager
    def tracking(self, *, lane: int = 0) -> Iterator[None]:
        thread = self._thread
        if thread.depth:
            yield  # a second mode would only count everything twice as slowly
            return
        thread.depth, thread.lane, thread.failure = 1, lane, None
        try:
            with _Counting(self):
                yield
        except RuntimeError as error:
            self._restore_text(error)
            raise
        finally:
            thread.depth, thread.lane, thread.failure = 0, 0, None

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        block = self._storages.hold(nbytes * self.scale, stream=self._thread.lane) if nbytes > 0 else None
        if nbytes > 0 and block is None:
            raise self._out_of_memory(nbytes)
        try:
            yield
        finally:
            if block is not None:
                self._storages.let_go(block)

    def canary(self) -> bool:
        if self._file.is_broken(self._slot):
            return False
        with self._paused():
            return canary_holds(self.device)

    # -- counting

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation and count what it returned. For the dispatch mode."""
        if self._thread.paused:
            return func(*args, **kwargs)
        self._check_context()
        result: Any = None
        traits = traits_of(func)
        refused = self._refuse_early(requested_bytes(args, kwargs)) if traits.sized else None
        if refused is None:
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                if _HOST_REFUSED not in str(error):
                    self._thread.failure = str(error)
                    raise
                refused = self._out_of_memory(None)
            else:
                refused = self._count(traits, args, kwargs, result)
        if refused is None:
            return result
        try:
            raise refused
        finally:
            # The traceback holds this frame, and with it the refused result and the error itself.
            del result, refused

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Remember why an operation failed that is not run through `run` itself. For the dispatch mode."""
        try:
            yield
        except RuntimeError as error:
            self._thread.failure = str(error)
            raise

    def _count(
        self, traits: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> torch.OutOfMemoryError | None:
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is None:
                continue
            # An alias of something that lies on the host, a view of the caller's input say, stays there.
            if traits.aliasing and not self._storages.knows(storage) and is_among(storage, args, kwargs):
                continue
            if not self._storages.book(storage, stream=self._thread.lane):
                return self._out_of_memory(storage.nbytes())
        return None

    def _book(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None and not self._storages.book(storage, stream=self._thread.lane):
            raise self._out_of_memory(storage.nbytes())

    def _refuse_early(self, nbytes: int) -> torch.OutOfMemoryError | None:
        """What no card could hold is refused before the host is asked for it."""
        if nbytes * self.scale <= self.total:
            return None
        with self._storages.settled() as allocator:
            allocator.refusals += 1
        return self._out_of_memory(nbytes)

    # -- moving

    def _copy_in(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = storage_of(tensor)
        if storage is None or self._storages.knows(storage):
            return tensor
        copy = tensor.clone()
        self._book(copy)
        return copy

    def _copy_out(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = storage_of(tensor)
        return tensor if storage is None or not self._storages.knows(storage) else tensor.clone()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._thread.paused += 1
        try:
            yield
        finally:
            self._thread.paused -= 1

    # -- failing

    def _check_context(self) -> None:
        if self._file.is_broken(self._slot):
            self._thread.failure = _ILLEGAL_ACCESS
            raise _illegal_access()

    def _out_of_memory(self, nbytes: int | None) -> torch.OutOfMemoryError:
        tried = "more than the host has" if nbytes is None else format_size(nbytes * self.scale)
        with self._storages.settled() as allocator:
            if nbytes is None:
                allocator.refusals += 1
            held = f"{format_size(allocator.allocated)} allocated, {format_size(allocator.reserved)} reserved"
            cap = format_size(allocator.cap)
        text = (
            f"CUDA out of memory. Tried to allocate {tried} on simulated card {self.uuid}: {held}, cap {cap}."
        )
        self._thread.failure = text
        return torch.OutOfMemoryError(text)

    def _restore_text(self, error: RuntimeError) -> None:
        # TorchScript drops type and text of what is raised in Python, as everything is below a dispatch mode.
        # On CUDA it is raised in C++, where the text survives: put that back, and leave the type lost.
        failure, text = self._thread.failure, str(error)
        if failure is not None and "TorchScript interpreter" in text and text.endswith("Error: \n"):
            error.args = (text.rstrip("\n") + failure,)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operation of this thread to the device."""

    def __init__(self, device: SimTorchDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What torch would wrap around `__torch_dispatch__` loads its compiler: 2 s at the first operation.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if traits_of(func).composite:
            with self, self._device.noting_failure():
                # The kernel that eager CUDA would run; `decompose` prefers rewritings made for tracing.
                return func._op_dk(_COMPOSITE, *args, **(kwargs or {}))
        return self._device.run(func, args, kwargs or {})


def _illegal_access() -> RuntimeError:
    kind: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
    error = kind(_ILLEGAL_ACCESS)
    error.error_code = _ILLEGAL_ADDRESS  # type: ignore[attr-defined]
    return error
