"""Models of the system tests. Each run leaves a line in a file beside this one: what really ran, and how
often, is known without asking the ledger.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pydantic
import torch

import vramgate

MIB = 2**20
STEP_S = 0.02
RUNS = Path(__file__).with_name("runs.log")


class Task(pydantic.BaseModel):
    tag: str = ""
    seconds: float = pydantic.Field(0.0, ge=0)
    mib: float = pydantic.Field(1.0, ge=0)


def note_run(tag: str) -> None:
    if tag:
        with RUNS.open("a") as runs:
            runs.write(f"{tag} {os.getpid()}\n")


class Work(vramgate.Model):
    """Holds `mib` MiB for `seconds`, in short steps, and stops when its whole batch is cancelled."""

    input_schema = Task
    units = "mib"
    max_batch = 4

    def load(self, ctx: vramgate.Context) -> None:
        self.weight = torch.zeros(4 * MIB // 4, device=ctx.device)

    def sample(self, units: float) -> Any:
        return Task(mib=units)

    def predict(self, batch: list[Task], ctx: vramgate.Context) -> list[Any]:
        held = [torch.ones(int(item.mib * MIB) // 4, device=ctx.device) for item in batch]
        for item in batch:
            note_run(item.tag)
        end = time.monotonic() + max(item.seconds for item in batch)
        while time.monotonic() < end:
            ctx.raise_if_cancelled()
            time.sleep(STEP_S)
        return [
            {"tag": item.tag, "batch": len(batch), "pid": os.getpid(), "floats": tensor.numel()}
            for item, tensor in zip(batch, held, strict=True)
        ]


class One(Work):
    """The same, one at a time."""

    max_batch = 1


class Deaf(One):
    """Sleeps in one piece, and hears nothing meanwhile."""

    def predict(self, batch: list[Task], ctx: vramgate.Context) -> list[Any]:
        held = [torch.ones(int(item.mib * MIB) // 4, device=ctx.device) for item in batch]
        for item in batch:
            note_run(item.tag)
            time.sleep(item.seconds)
        return [{"tag": item.tag, "floats": tensor.numel()} for item, tensor in zip(batch, held, strict=True)]
