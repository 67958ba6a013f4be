"""What torch holds on one card: the child's side of the device interface, and the choice of who answers.

Owns the protocol and `open_device`. Runs in the child only; `cuda` and `sim_torch` implement it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

Movable = TypeVar("Movable")
"""A tensor, a module, or a list, tuple or dict of them: moved as a whole, returned in the same shape."""


class DeviceMismatch(Exception):
    """The card that torch sees is not the card that this child was pinned to."""


class TorchDevice(Protocol):
    """One card as this process's allocator knows it. All sizes are bytes of the card."""

    @property
    def device(self) -> torch.device:
        """Where models put their tensors: `cuda:0`, or `cpu` for a simulated card."""
        ...

    @property
    def uuid(self) -> str:
        """The card's id, verified against the pin in the environment."""
        ...

    @property
    def total(self) -> int:
        """torch's total for the card, which `set_cap` is a share of."""
        ...

    @property
    def context_bytes(self) -> int:
        """W: what the context and the libraries cost, beside what the allocator holds; 0: not measured."""
        ...

    def allocated(self) -> int:
        """Bytes in tensors."""
        ...

    def reserved(self) -> int:
        """Bytes that the caching allocator holds on the card, tensors and cache together."""
        ...

    def reset_peak(self) -> None:
        """Begin a new measurement of `peak`."""
        ...

    def peak(self) -> int:
        """Most bytes allocated at once since `reset_peak`, over all lanes of the process."""
        ...

    def set_cap(self, reserved_bytes: int) -> None:
        """Bound `reserved`. Lowering it frees nothing: call `empty_cache` where reserved is above it."""
        ...

    def empty_cache(self) -> None:
        """Give every wholly free segment of every stream back to the card."""
        ...

    def synchronize(self) -> None:
        """Wait for everything submitted to the card; raises what a failed kernel left behind."""
        ...

    def segments(self) -> int:
        """A number that changes whenever the allocator grew or shrank, to bracket a reading of the driver."""
        ...

    def ooms(self) -> int:
        """How often the allocator refused; compare before and after a run to know whether an OOM was seen."""
        ...

    def adopt(self, held: object) -> int:
        """Count what `held` (a tensor, a module, a container, or an object with such attributes) keeps on the
        card.

        Call it after a model's load: a simulated card cannot see weights that were read from a file. Returns
        the bytes newly counted; on CUDA the allocator has counted them already and this returns 0.
        """
        ...

    def to_device(self, held: Movable) -> Movable:
        """Move to the card. A module is changed in place and returned; anything else is copied."""
        ...

    def to_host(self, held: Movable) -> Movable:
        """Move to host memory, so that the card's bytes are free once nobody holds the old tensors."""
        ...

    def tracking(self, *, lane: int = 0) -> AbstractContextManager[None]:
        """Enter in each lane's thread, around load, predict and each `next()` of a generator.

        Makes the lane's stream current. On a simulated card it is also what counts the operations.
        """
        ...

    def reserve(self, nbytes: int) -> AbstractContextManager[None]:
        """Declare workspace that kernels take without a tensor. Counts where simulated: CUDA sees its own."""
        ...

    def canary(self) -> bool:
        """A fixed matmul with a known answer: False means that this process's context cannot be trusted."""
        ...


def open_device(environment: Mapping[str, str] = os.environ) -> TorchDevice:
    """Open the card that the environment pins this process to: `VRAMGATE_SIM`, else `CUDA_VISIBLE_DEVICES`.

    Call once per process, before the first model is loaded. Raises DeviceMismatch.
    """
    if spec := environment.get("VRAMGATE_SIM"):
        from gpu_agent.device.sim_torch import SimTorchDevice

        return SimTorchDevice.open(spec)
    from gpu_agent.device.cuda import CudaDevice

    return CudaDevice.open(environment)
