"""What a model sees of the service while it loads and runs: `LaneContext`, and the flags of its batch.

Owns: progress and cancel flags, and input buffers that are used again. A context belongs to one lane and its
thread; only the set of cancelled items is written by another thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_agent.device.torch_device import TorchDevice
from vramgate.errors import Cancelled

PROGRESS_INTERVAL_S = 0.05
LARGEST_KEPT_BYTES = 64 * 2**20
_SMALLEST_BUCKET = 256

Progress = Callable[[int | None, float, float], None]


@dataclass(slots=True)
class Scope:
    """One call of `predict`: which items of the handed batch it holds, and whom to tell of progress.

    cancelled: positions in the handed batch, shared with the thread that reads messages.
    """

    members: Sequence[int]
    cancelled: set[int]
    progress: Progress
    resources: ExitStack = field(default_factory=ExitStack)


def nobody(item: int | None, done: float, total: float) -> None:
    """Progress while loading and profiling has no caller."""


class Buffers:
    """Flat device buffers of one lane, by dtype and bucket; the n-th request of a batch gets the n-th
    buffer again.

    Buffers up to LARGEST_KEPT_BYTES stay (they are part of what the lane keeps resident); larger ones live
    as long as the batch, under its lease.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._taken: dict[tuple[torch.dtype, int], int] = {}
        self._idle: Any = None

    @property
    def kept_bytes(self) -> int:
        return sum(b.numel() * b.element_size() for stack in self._kept.values() for b in stack)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        bucket = max(_SMALLEST_BUCKET, 1 << (max(count, 1) - 1).bit_length())
        if bucket * dtype.itemsize > LARGEST_KEPT_BYTES:
            return torch.empty(count, dtype=dtype, device=self._device)
        if self._idle is not None:
            # The last batch's kernels may still read what this one is about to overwrite.
            self._idle.synchronize()
            self._idle = None
        key = (dtype, bucket)
        stack = self._kept.setdefault(key, [])
        at = self._taken.get(key, 0)
        if at == len(stack):
            stack.append(torch.empty(bucket, dtype=dtype, device=self._device))
        self._taken[key] = at + 1
        return stack[at][:count]

    def rest(self) -> None:
        """The batch is over: its buffers may be taken again once the stream got there."""
        if self._taken and self._device.type == "cuda":
            self._idle = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._idle.record()
        self._taken.clear()

    def drop(self) -> None:
        self._kept.clear()
        self._taken.clear()


class LaneContext:
    """The `vramgate.Context` of one lane."""

    def __init__(self, device: TorchDevice, *, model: str, mode: str = "default") -> None:
        self._torch_device = device
        self._mode = mode
        self._log = logging.getLogger(f"vramgate.models.{model}")
        self._scope = Scope(members=(), cancelled=set(), progress=nobody)
        self._told_at = 0.0
        self.buffers = Buffers(device.device)

    @property
    def device(self) -> torch.device:
        return self._torch_device.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.get_default_dtype()

    @property
    def mode(self) -> str:
        return self._mode

    @property
    def log(self) -> logging.Logger:
        return self._log

    def begin(self, scope: Scope) -> None:
        self._scope = scope

    def end(self) -> None:
        self._scope.resources.close()
        self.buffers.rest()
        self._scope = Scope(members=(), cancelled=set(), progress=nobody)

    def progress(self, done: float, total: float, item: int | None = None) -> None:
        now = time.monotonic()
        if done < total and now - self._told_at < PROGRESS_INTERVAL_S:
            return
        self._told_at = now
        self._scope.progress(None if item is None else self._scope.members[item], float(done), float(total))

    def cancelled(self, i: int) -> bool:
        return self._scope.members[i] in self._scope.cancelled

    def raise_if_cancelled(self) -> None:
        scope = self._scope
        if scope.members and scope.cancelled.issuperset(scope.members):
            raise Cancelled("every item of this batch was cancelled")

    def reserve(self, nbytes: int) -> None:
        self._scope.resources.enter_context(self._torch_device.reserve(nbytes))

    def tensor(self, data: Any, shape: Sequence[int], dtype: Any = None) -> torch.Tensor:
        kind: torch.dtype = dtype or self.dtype
        count = math.prod(shape)
        flat = self.buffers.take(count, kind)
        filled = 0
        if data is not None:
            source = _flat(data, kind)
            filled = source.numel()
            if filled > count:
                raise ValueError(f"{filled} values do not fit into a tensor of shape {tuple(shape)}")
            flat[:filled].copy_(source)
        flat[filled:].zero_()
        return flat.view(*shape)


def _flat(data: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(data, bytes | bytearray | memoryview):
        # frombuffer refuses an empty buffer, and warns about one that cannot be written to.
        return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return torch.as_tensor(data, dtype=dtype).reshape(-1)
