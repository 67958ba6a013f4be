"""vramgate.units: a closed language, evaluated on hostile inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vramgate.errors import InputError
from vramgate.units import MAX_TEXT, MAX_UNITS, UnitsError, compile_units


@pytest.mark.parametrize(
    ("text", "inputs", "units"),
    [
        ("1", {}, 1),
        ("2.5e3", {}, 2500),
        ("height * width", {"height": 3, "width": 4.5}, 13.5),
        (" height*width / 8 + 64 - 1", {"height": 4, "width": 4}, 65),
        ("(a + b) * 2", {"a": 1, "b": 2}, 6),
        ("len(text)", {"text": "håp"}, 3),
        ("len(blob)", {"blob": b"1234"}, 4),
        ("len(rows) * 2", {"rows": [[1, 2], [3]]}, 4),
        ("1", {"anything": object()}, 1),
    ],
)
def test_evaluates(text: str, inputs: dict[str, Any], units: float) -> None:
    """Numbers, the four operations, fields and len() mean what they say."""
    assert compile_units(text).evaluate(inputs) == units


def test_knows_its_fields_and_takes_defaults() -> None:
    """The fields are listed, and the schema's defaults stand in for absent ones only."""
    units = compile_units("height * width + len(text)")
    assert units.fields == {"height", "width", "text"}
    assert compile_units("height * width").evaluate({"height": 2}, defaults={"height": 9, "width": 5}) == 10


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("__import__('os').system('true')", "__import__('os').system('true')"),
        ("a ** 2", "a ** 2"),
        ("a.b", "a.b"),
        ("a[0]", "a[0]"),
        ("1 + -a", "-a"),
        ("a // 2", "a // 2"),
        ("a % 2", "a % 2"),
        ("True", "True"),
        ("'x'", "'x'"),
        ("a < b", "a < b"),
        ("a if b else c", "a if b else c"),
        ("lambda: 1", "lambda: 1"),
        ("[x for x in a]", "[x for x in a]"),
        ("max(a)", "max(a)"),
        ("len()", "len()"),
        ("len(a, b)", "len(a, b)"),
        ("len(a + 1)", "len(a + 1)"),
        ("len(obj=a)", "len(obj=a)"),
        ("len(*a)", "len(*a)"),
        ("1j", "1j"),
        ("1 +", "1 +"),
        ("a b", "a b"),
        ("a; b", "a; b"),
        ("\0", "x00"),
        ("0", "0"),
        ("1 - 2", "1 - 2"),
        ("1 / 0", "1 / 0"),
        ("1e999", "1e999"),
        ("9" * 190, "9" * 190),
    ],
)
def test_refuses_what_is_not_of_the_language(text: str, part: str) -> None:
    """A UnitsError names the offending part; nothing of it runs."""
    with pytest.raises(UnitsError) as refused:
        compile_units(text)
    assert part in str(refused.value)


@pytest.mark.parametrize("text", ["", "  ", "a+" * MAX_TEXT + "a", "(" * 99 + "a" + ")" * 99, None, 7])
def test_long_deep_empty_or_no_text_is_bounded(text: Any) -> None:
    """Text of another size or type either compiles within its bounds or is a UnitsError, never another
    exception."""
    try:
        compile_units(text)
    except UnitsError:
        pass


@pytest.mark.parametrize(
    ("text", "inputs", "field"),
    [
        ("height * width", {"height": 4}, "width"),
        ("height * width", {"height": 4, "width": None}, "width"),
        ("height * width", {"height": 4, "width": "4"}, "width"),
        ("height * width", {"height": 4, "width": True}, "width"),
        ("height * width", {"height": -4, "width": -4}, "height"),
        ("height * width", {"height": math.nan, "width": 4}, "height"),
        ("height * width", {"height": math.inf, "width": 4}, "height"),
        ("height * width", {"height": 10**400, "width": 4}, "height"),
        ("height * width", {"height": [4], "width": 4}, "height"),
        ("height * width", {"height": 2**52, "width": 2**52}, None),
        ("height * width", {"height": 0, "width": 4}, None),
        ("height - 5", {"height": 4}, "height"),
        ("height / height", {"height": 0}, "height"),
        ("len(text)", {"text": ""}, "text"),
        ("len(text)", {"text": 5}, "text"),
        ("len(text)", {"text": {"a": 1}}, "text"),
        ("pixels(image)", {"image": "text"}, "image"),
        ("pixels(image)", {"image": b""}, "image"),
        ("seconds(audio)", {"audio": b"RIFF"}, "audio"),
    ],
)
def test_absurd_inputs_are_the_caller_s_fault(text: str, inputs: dict[str, Any], field: str | None) -> None:
    """What is missing, of another kind, negative, not finite or out of bounds is an InputError naming the
    field."""
    with pytest.raises(InputError) as refused:
        compile_units(text).evaluate(inputs)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("text", "inputs", "said"),
    [
        ("len(text)", {"text": ""}, "is too small: len(text) is 0, and must be above 0"),
        (
            "height * width",
            {"height": 0, "width": 4},
            "the input is too small: height * width is 0, and must be above 0",
        ),
        ("height - 5", {"height": 4}, "is too small: height - 5 is -1, and must be above 0"),
        ("8 / height", {"height": 0}, "is too large: 8 / height is inf, and may be 2**53 at most"),
    ],
)
def test_what_is_too_small_or_too_large_is_said_plainly(text: str, inputs: dict[str, Any], said: str) -> None:
    """The words go on from the field's name, which whoever tells the caller puts before them."""
    with pytest.raises(InputError) as refused:
        compile_units(text).evaluate(inputs)
    assert refused.value.detail == said


# Time is not part of these claims, and a busy machine is no failure.
_CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text("ab\u00e5\U0001f600"),
    st.binary(),
    st.lists(st.integers()),
)


@_CALM
@given(
    text=st.sampled_from(
        ["a * b", "a / b", "a - b", "len(a) + b", "pixels(a)", "seconds(a)", "len(a) / len(b)"]
    ),
    inputs=st.dictionaries(st.sampled_from(["a", "b"]), _VALUES),
)
def test_any_input_gives_a_bounded_number_or_an_input_error(text: str, inputs: dict[str, Any]) -> None:
    """Whatever comes in, the result is finite, over 0 and at most 2**53, or an InputError is raised."""
    try:
        units = compile_units(text).evaluate(inputs)
    except InputError:
        return
    assert 0 < units <= MAX_UNITS


@_CALM
@given(st.text(alphabet="ab01 .+-*/()len,pixels'\"[]{}", max_size=40))
def test_any_text_compiles_or_is_a_units_error(text: str) -> None:
    """The parser raises nothing but UnitsError."""
    try:
        compile_units(text)
    except UnitsError:
        pass
