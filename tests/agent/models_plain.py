"""Models of the agent's tests: each does one thing that a real model may do, well or badly."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pydantic
import torch

import vramgate

MIB = 2**20


class Text(pydantic.BaseModel):
    text: str = ""
    mib: float = pydantic.Field(1.0, ge=0)


class Plain(vramgate.Model):
    """A weight of 8 MiB, and a sample of any size; the others differ in what predict does."""

    input_schema = Text
    units = "mib"

    def load(self, ctx: vramgate.Context) -> None:
        self.weight = torch.zeros(8 * MIB // 4, device=ctx.device)

    def sample(self, units: float) -> Any:
        return Text(text="sample", mib=units)


class Echo(Plain):
    """Takes `mib` MiB while it runs, and answers with the text and the size of its batch."""

    max_batch = 4

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        held = [torch.ones(int(item.mib * MIB) // 4, device=ctx.device) for item in batch]
        for i in range(len(batch)):
            if not ctx.cancelled(i):
                ctx.progress(1, 1, i)
        return [
            {"text": item.text, "sum": float(t.sum()), "batch": len(batch)}
            for item, t in zip(batch, held, strict=True)
        ]


class Sleeper(Plain):
    """Sleeps for text seconds in short steps, and stops when it is told."""

    max_batch = 2

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        steps = round(max(float(item.text) if item.text != "sample" else 0.0 for item in batch) / 0.02)
        for step in range(steps):
            ctx.raise_if_cancelled()
            ctx.progress(step, steps)
            time.sleep(0.02)
        return [{"slept": item.text} for item in batch]


class Deaf(Plain):
    """Sleeps and hears nothing."""

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        if batch[0].text != "sample":
            time.sleep(float(batch[0].text))
        return [{"slept": item.text} for item in batch]


class Crasher(Plain):
    """Kills its process when told to, each time or only while a file is absent."""

    max_batch = 4

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        for item in batch:
            kind, _, path = item.text.partition(":")
            if kind == "die" or (kind == "once" and not os.path.exists(path)):
                if path:
                    open(path, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "slow":
                time.sleep(float(path))
        return [{"alive": item.text} for item in batch]


class Unspeakable(RuntimeError):
    """It raises when it is asked what it says."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Faulty(Plain):
    """Does what its text says, mostly wrong."""

    max_batch = 4

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        return [self._one(item, ctx) for item in batch]

    def _one(self, item: Text, ctx: vramgate.Context) -> Any:
        match item.text:
            case "nan":
                return {"values": torch.tensor([1.0, float("nan")], device=ctx.device)}
            case "inf":
                return {"deep": [{"value": float("inf")}]}
            case "raise":
                raise ValueError("the model is broken")
            case "input":
                raise vramgate.InputError("is not what I like", field="text")
            case "item":
                return vramgate.InputError("only this one", field="text")
            case "surrogate":
                raise ValueError("cannot open '/data/\udcff.png'")
            case "input-surrogate":
                raise vramgate.InputError("cannot open '\udcff.png'", field="te\udcffxt")
            case "unspeakable":
                raise Unspeakable
            case "key-surrogate":
                return {"\udcff": object()}
            case "large":
                return {"data": b"x" * (64 * MIB)}
            case "object":
                return object()
            case "print":
                print("hello from the model")
                return "printed"
            case "tensor":
                return torch.arange(6, dtype=torch.float16).reshape(2, 3)
        return item.text


class WrongLength(Plain):
    """Answers with one output too few."""

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        return [] if batch[0].text != "sample" else ["fine"]


class Hungry(Plain):
    """Takes text MiB whatever its units say."""

    max_batch = 4

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        held = [
            torch.zeros(int(float(item.text) * MIB) // 4, device=ctx.device)
            for item in batch
            if item.text != "sample"
        ]
        return [{"held": len(held), "batch": len(batch)} for _ in batch]


class Streamer(Plain):
    """Yields its text word by word."""

    max_batch = 2

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Iterator[Sequence[Any]]:
        if batch[0].text == "endless":
            while True:
                yield [bytes(4 * MIB) for _ in batch]
        words = [item.text.split() for item in batch]
        for at in range(max(len(w) for w in words)):
            time.sleep(0.03)
            yield [w[at] if at < len(w) else None for w in words]


class Laned(Plain):
    """Two calls at once, in two lanes; tells how many there were."""

    lanes = 2
    running = 0

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        type(self).running += 1
        held = torch.ones(int(batch[0].mib * MIB) // 4, device=ctx.device)
        deadline = time.monotonic() + (3.0 if batch[0].text == "wait" else 0.0)
        while type(self).running < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = type(self).running
        if batch[0].text == "wait":
            time.sleep(0.1)
        type(self).running -= 1
        return [{"seen": seen, "held": held.numel()}]


class NoLoad(Plain):
    """Fails to load."""

    def load(self, ctx: vramgate.Context) -> None:
        raise RuntimeError("there are no weights")

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        return []


class TooBig(Echo):
    """Declares more than any test card has."""

    vram = "100GiB"


class Heavy(Echo):
    """Its weights take 300 MiB, undeclared."""

    def load(self, ctx: vramgate.Context) -> None:
        self.weight = torch.zeros(300 * MIB // 4, device=ctx.device)


class Kept(Echo):
    """Loads 100 MiB, and its smallest run takes 100 more."""

    def load(self, ctx: vramgate.Context) -> None:
        self.weight = torch.zeros(100 * MIB // 4, device=ctx.device)

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        return [float(torch.ones(99 * MIB // 4, device=ctx.device).sum()) for _ in batch]


class Buffered(Plain):
    """Works in the service's input buffers."""

    max_batch = 4

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        longest = max(len(item.text) for item in batch) or 1
        rows = b"".join(item.text.encode().ljust(longest, b"\0") for item in batch)
        tensor = ctx.tensor(rows, (len(batch) + 1, longest), torch.uint8)
        ctx.reserve(MIB)
        return [{"sum": int(row.sum()), "padding": int(tensor[-1].sum())} for row in tensor[:-1]]


class Forking(Plain):
    """Starts a grandchild, tells its pid, and sleeps."""

    def predict(self, batch: list[Text], ctx: vramgate.Context) -> Sequence[Any]:
        import subprocess

        if batch[0].text != "sample":
            process = subprocess.Popen(["sleep", "600"])
            with open(batch[0].text, "w") as file:
                file.write(str(process.pid))
            time.sleep(600)
        return ["fine"]
