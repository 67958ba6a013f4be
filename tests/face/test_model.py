"""vramgate.Model: declarations are checked when the class is made, inputs when they come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pydantic
import pytest

import vramgate
from vramgate.model import batch_need, schema_defaults


class Shape(pydantic.BaseModel):
    height: int = pydantic.Field(8, ge=1)
    width: int
    label: str = pydantic.Field("", validation_alias="tag")


class Echo(vramgate.Model):
    """The smallest model: what the declarations of the others are added to."""

    def load(self, ctx: vramgate.Context) -> None:
        return None

    def predict(self, batch: list[Any], ctx: vramgate.Context) -> Sequence[Any]:
        return batch

    def sample(self, units: float) -> dict[str, Any]:
        return {}


def declare(**attributes: Any) -> type[vramgate.Model]:
    return type("Declared", (Echo,), attributes)


def test_the_defaults_are_those_of_the_contract() -> None:
    """A model that declares nothing gets dicts, one at a time, in one lane, and counts one unit."""
    assert (Echo.input_schema, Echo.units, Echo.batch_units) == (None, "1", "sum")
    assert (Echo.max_batch, Echo.lanes, Echo.check_finite, Echo.declared_bytes()) == (1, 1, True, None)
    assert Echo.parse({"a": 1}) == {"a": 1}
    assert Echo.count_units({"a": 1}) == 1
    assert Echo.input_json_schema() == {"type": "object"}


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"units": "height ** width"}, "Declared.units: 'height ** width'"),
        ({"units": "hieght * width", "input_schema": Shape}, "names 'hieght', which Shape has not"),
        ({"units": "len(label)", "input_schema": Shape}, "names 'label'"),
        ({"units": ""}, "Declared.units"),
        ({"batch_units": "mean"}, 'batch_units must be "sum" or "max_times_n", got \'mean\''),
        ({"max_batch": 0}, "max_batch must be an integer from 1 to 1024, got 0"),
        ({"max_batch": True}, "max_batch must be an integer"),
        ({"lanes": 17}, "lanes must be an integer from 1 to 16, got 17"),
        ({"vram": "lots"}, "Declared.vram: 'lots'"),
        ({"vram": -1}, "Declared.vram: -1"),
        ({"vram": 0}, "Declared.vram"),
        ({"input_schema": dict}, "input_schema must be a pydantic.BaseModel class"),
        ({"output_schema": Shape(width=1)}, "output_schema must be a pydantic.BaseModel class"),
    ],
)
def test_a_wrong_declaration_fails_where_it_is_written(attributes: dict[str, Any], words: str) -> None:
    """The class cannot be made, and one line says which attribute, the bound and the value."""
    with pytest.raises((TypeError, ValueError)) as refused:
        declare(**attributes)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_must_say_how_it_loads_predicts_and_samples() -> None:
    """Without one of the three methods there is no instance."""
    for name in ("load", "predict", "sample"):
        with pytest.raises(TypeError, match=name):
            type(
                "Half",
                (vramgate.Model,),
                {n: getattr(Echo, n) for n in ("load", "predict", "sample") if n != name},
            )()


def test_inputs_become_instances_or_name_their_field() -> None:
    """parse() gives an instance of the schema, or an InputError with the first wrong field and no echo of the
    value."""
    model = declare(input_schema=Shape, units="height * width", vram="2GiB")
    assert model.parse({"width": "4", "tag": "x"}) == Shape(width=4, tag="x")
    with pytest.raises(vramgate.InputError) as refused:
        model.parse({"width": 4, "height": 0})
    assert (refused.value.field, refused.value.status) == ("height", 422)
    assert model.declared_bytes() == 2 * 2**30


def test_units_are_counted_alike_at_the_gateway_and_in_the_child() -> None:
    """Decoded inputs with the published defaults, and the parsed instance, count the same."""
    model = declare(input_schema=Shape, units="height * width + len(tag)")
    inputs = {"width": 4, "tag": "abc"}
    assert model.count_units(inputs) == model.count_units(model.parse(inputs)) == 8 * 4 + 3
    assert schema_defaults(model.input_json_schema()) == {"height": 8, "tag": ""}


def test_a_batch_needs_the_sum_or_the_largest_times_their_number() -> None:
    """Padding makes every item as large as the largest."""
    assert batch_need([1, 5, 2], "sum") == 8
    assert batch_need([1, 5, 2], "max_times_n") == 15
