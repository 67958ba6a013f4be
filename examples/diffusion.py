"""Iterative denoising: noise in, a picture out, in as many steps as the caller asks for.

The network is a small convolutional one with weights out of a fixed seed. It was never trained, so it paints
textures and no cats; what it costs is real: its activations grow with height x width, and each step is a pass
over all of them. It shows what a long-running model owes its callers: progress at each step, and an end at
the next step once nobody waits any more.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import pydantic
import torch
from torch import Tensor, nn

import vramgate

CHANNELS = 24
SIDE_STEP = 8
WEIGHT_SEED = 20_240_229


class Request(pydantic.BaseModel):
    height: int = pydantic.Field(256, ge=64, le=1024, multiple_of=SIDE_STEP)
    width: int = pydantic.Field(256, ge=64, le=1024, multiple_of=SIDE_STEP)
    steps: int = pydantic.Field(8, ge=1, le=50)
    seed: int = pydantic.Field(0, ge=0, lt=2**32)


class Picture(pydantic.BaseModel):
    image: bytes
    height: int
    width: int
    steps: int


class Diffusion(vramgate.Model):
    input_schema = Request
    output_schema = Picture
    units = "height * width"
    batch_units = "sum"
    max_batch = 4
    vram = "256MiB"

    def load(self, ctx: vramgate.Context) -> None:
        self.denoiser = Denoiser().to(ctx.device, ctx.dtype).eval()

    def predict(self, batch: list[Request], ctx: vramgate.Context) -> list[Any]:
        answers: list[Any] = [None] * len(batch)
        # Only pictures of one size and number of steps can share a tensor; the others wait for their turn.
        shape_of = {place: (item.height, item.width, item.steps) for place, item in enumerate(batch)}
        for shape, group in itertools.groupby(
            sorted(shape_of, key=shape_of.__getitem__), shape_of.__getitem__
        ):
            places = list(group)
            images = self._paint(places, [batch[place].seed for place in places], shape, ctx)
            for place, image in zip(places, images, strict=True):
                answers[place] = image
        return answers

    def _paint(
        self, places: Sequence[int], seeds: Sequence[int], shape: tuple[int, int, int], ctx: vramgate.Context
    ) -> list[Any]:
        """Denoise one group by DDIM steps (Song et al. 2020, eta = 0) along a cosine schedule."""
        height, width, steps = shape
        with torch.inference_mode():
            x = ctx.tensor(noise(seeds, height, width), (len(seeds), 3, height, width), ctx.dtype)
            for step in range(steps):
                ctx.raise_if_cancelled()
                if all(ctx.cancelled(place) for place in places):
                    return [vramgate.Cancelled() for _ in places]
                signal, signal_after = kept_signal(1 - step / steps), kept_signal(1 - (step + 1) / steps)
                clean = self.denoiser(x, 1 - step / steps)
                rest = (x - math.sqrt(signal) * clean) / math.sqrt(1 - signal)
                x = math.sqrt(signal_after) * clean + math.sqrt(1 - signal_after) * rest
                for place in places:
                    ctx.progress(step + 1, steps, item=place)
            return [
                {"image": write_png(row), "height": height, "width": width, "steps": steps}
                for row in to_bytes(x)
            ]

    def sample(self, units: float) -> Request:
        """A square of about `units` pixels, in two steps: memory does not grow with steps, only time does."""
        side = min(1024, max(64, round(math.sqrt(units) / SIDE_STEP) * SIDE_STEP))
        return Request(height=side, width=side, steps=2, seed=1)


class Denoiser(nn.Module):
    """A U of two levels: predicts the clean picture, within -1 to 1, from a noisy one and its time (1 noise,
    0 clean)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.down = nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 3, padding=1)
        self.up = nn.Conv2d(2 * CHANNELS, CHANNELS, 3, padding=1)
        self.leave = nn.Conv2d(2 * CHANNELS, 3, 3, padding=1)
        self.time = nn.Linear(2, 2 * CHANNELS)
        chance = torch.Generator().manual_seed(WEIGHT_SEED)
        for parameter in self.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 64
            nn.init.normal_(parameter, 0.0, 1.6 / math.sqrt(fan_in), generator=chance)

    def forward(self, x: Tensor, time: float) -> Tensor:
        angle = math.pi * time
        when = self.time(torch.tensor([math.sin(angle), math.cos(angle)], device=x.device, dtype=x.dtype))
        fine = nn.functional.silu(self.enter(x))
        coarse = nn.functional.silu(self.down(fine) + when[:, None, None])
        coarse = nn.functional.silu(self.middle(coarse))
        coarse = nn.functional.interpolate(self.up(coarse), scale_factor=2.0, mode="nearest")
        return torch.tanh(self.leave(torch.cat([fine, coarse], dim=1)))


def kept_signal(time: float) -> float:
    """The share of the clean picture's variance that is left at `time`; never quite 0 or 1, so that both
    divide."""
    return min(0.999, max(0.001, math.cos(0.5 * math.pi * time) ** 2))


def noise(seeds: Sequence[int], height: int, width: int) -> Tensor:
    """The same noise for the same seed and size, on every device and in every batch."""
    return torch.stack(
        [torch.randn(3, height, width, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )


def to_bytes(x: Tensor) -> list[tuple[int, int, bytes]]:
    """Width, height and rows of a PNG (a filter byte, then RGB) for each picture of a batch."""
    count, _, height, width = x.shape
    pixels = ((x.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
    rows = torch.zeros(count, height, 1 + 3 * width, dtype=torch.uint8)
    rows[:, :, 1:] = pixels.reshape(count, height, 3 * width).cpu()
    flat = bytearray(rows.numel())
    torch.frombuffer(flat, dtype=torch.uint8).copy_(rows.flatten())
    size = height * (1 + 3 * width)
    return [(width, height, bytes(flat[n * size : (n + 1) * size])) for n in range(count)]


def write_png(picture: tuple[int, int, bytes]) -> bytes:
    """A PNG file (ISO/IEC 15948) of 8-bit RGB."""
    width, height, rows = picture
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
