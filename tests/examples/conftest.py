"""A context with nothing behind it: the examples run on the CPU as they would inside the agent's child."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import vramgate


class PlainContext:
    """Plain tensors, recorded progress, and a set of cancelled places that a test may change."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.mode = "default"
        self.log = logging.getLogger("tests.examples")
        self.size = 1
        self.gone: set[int] = set()
        self.seen: list[tuple[float, float, int | None]] = []
        self.reserved = 0
        self.cancel_after: float | None = None

    def progress(self, done: float, total: float, item: int | None = None) -> None:
        self.seen.append((done, total, item))
        if self.cancel_after is not None and done >= self.cancel_after:
            self.gone = set(range(self.size))

    def cancelled(self, i: int) -> bool:
        return i in self.gone

    def raise_if_cancelled(self) -> None:
        if len(self.gone) >= self.size:
            raise vramgate.Cancelled

    def tensor(self, data: Any, shape: Sequence[int], dtype: Any = None) -> torch.Tensor:
        made = torch.zeros(tuple(shape), dtype=dtype or self.dtype)
        if isinstance(data, bytes):
            data = torch.frombuffer(bytearray(data), dtype=made.dtype)
        if data is not None:
            given = torch.as_tensor(data).flatten()
            made.flatten()[: given.numel()].copy_(given)
        return made

    def reserve(self, nbytes: int) -> None:
        self.reserved += nbytes


@pytest.fixture
def ctx() -> PlainContext:
    # The examples' operations are small; on a busy machine a second thread mostly waits for the first.
    torch.set_num_threads(1)
    made: vramgate.Context = PlainContext()
    assert isinstance(made, PlainContext)
    return made
