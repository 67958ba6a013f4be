"""examples/diffusion.py: pictures that can be read, progress at each step, an end once nobody waits."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pydantic
import pytest

import vramgate
from examples.diffusion import Diffusion, Request
from vramgate.media import image_size


@pytest.fixture
def model(ctx: Any) -> Diffusion:
    made = Diffusion()
    made.load(ctx)
    return made


def pixels(png: bytes) -> bytes:
    at, packed = 8, b""
    while at < len(png):
        length, kind = struct.unpack_from(">I4s", png, at)
        data = png[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + data) == struct.unpack_from(">I", png, at + 8 + length)[0]
        packed += data if kind == b"IDAT" else b""
        at += 12 + length
    return zlib.decompress(packed)


def test_paints_a_picture_of_the_size_that_was_asked_for(model: Diffusion, ctx: Any) -> None:
    """The answer is a sound PNG of height x width with something on it, and progress came once a step."""
    (answer,) = model.predict([Request(height=64, width=96, steps=3, seed=5)], ctx)
    assert image_size(answer["image"]) == (96, 64)
    rows = pixels(answer["image"])
    assert len(rows) == 64 * (1 + 3 * 96)
    assert len(set(rows)) > 100
    assert ctx.seen == [(1, 3, 0), (2, 3, 0), (3, 3, 0)]


def test_a_batch_of_mixed_shapes_answers_as_its_items_alone(model: Diffusion, ctx: Any) -> None:
    """Items keep their places and their seeds, whatever they are batched with (to one step of rounding)."""
    items = [
        Request(height=64, width=96, steps=2, seed=1),
        Request(height=96, width=64, steps=2, seed=2),
        Request(height=64, width=96, steps=2, seed=3),
        Request(height=64, width=96, steps=4, seed=1),
    ]
    together = [pixels(answer["image"]) for answer in model.predict(items, ctx)]
    for item, image in zip(items, together, strict=True):
        (alone,) = model.predict([item], ctx)
        assert max(abs(a - b) for a, b in zip(pixels(alone["image"]), image, strict=True)) <= 1
    assert len(set(together)) == 4


def test_ends_at_the_next_step_once_nobody_waits(model: Diffusion, ctx: Any) -> None:
    """A cancel between steps 2 and 3 is seen before step 3."""
    ctx.cancel_after = 2
    with pytest.raises(vramgate.Cancelled):
        model.predict([Request(height=64, width=64, steps=50)], ctx)
    assert max(done for done, _, _ in ctx.seen) == 2


def test_a_group_that_nobody_waits_for_is_passed_over(model: Diffusion, ctx: Any) -> None:
    """With its group cancelled, an item costs no step; the others are painted."""
    ctx.size, ctx.gone = 2, {0}
    gone, painted = model.predict([Request(height=64, width=64), Request(height=64, width=96, steps=2)], ctx)
    assert isinstance(gone, vramgate.Cancelled)
    assert image_size(painted["image"]) == (96, 64)
    assert {item for _, _, item in ctx.seen} == {1}


@pytest.mark.parametrize(
    "fields", [{"height": 65}, {"width": 0}, {"height": 1032}, {"steps": 51}, {"seed": -1}, {"steps": "many"}]
)
def test_bounds(fields: dict[str, Any]) -> None:
    """What the network cannot paint is refused before anything runs, naming the field."""
    with pytest.raises(pydantic.ValidationError):
        Request(**fields)
    with pytest.raises(vramgate.InputError) as refused:
        Diffusion.parse(fields)
    assert refused.value.field == next(iter(fields))


def test_units_are_pixels(model: Diffusion) -> None:
    """Units are height x width, defaults included, and samples are about as large as asked for."""
    assert Diffusion.count_units({}) == 256 * 256
    assert Diffusion.count_units({"height": 64}) == 64 * 256
    for units in (1.0, 64.0 * 64, 300.0 * 300, 1024.0 * 1024, 1e9):
        counted = Diffusion.count_units(model.sample(units))
        assert counted == pytest.approx(min(max(units, 4096), 1024 * 1024), rel=0.05)
