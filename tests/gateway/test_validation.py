"""Schemas as pydantic writes them: where bytes and arrays are, and what is refused."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pydantic
import pytest

from gateway.body import Body, kind_of
from gateway.catalogue import Entry
from gateway.headers import Preference, parse_accept, parse_prefer
from gateway.options import DEFAULTS, Options
from gateway.validation import InputReader
from tests.gateway.conftest import hosted
from vramgate.errors import InvalidInput, NotAcceptable, UnsupportedMediaType


class Page(pydantic.BaseModel):
    scan: bytes = pydantic.Field(min_length=2, max_length=4)
    next: Page | None = None


class Book(pydantic.BaseModel):
    pages: list[Page]
    cover: bytes | None = None
    title: str = "none"
    extra: dict[str, bytes] = {}
    either: bytes | str = ""


class Sound(pydantic.BaseModel):
    audio: bytes
    rate: int = 16_000


def reader(model: type[pydantic.BaseModel], units: str = "1") -> InputReader:
    return InputReader(hosted("m", model.model_json_schema(), units))


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def body(inputs: Any, kind: Any = "json") -> Body:
    return Body(kind, inputs, DEFAULTS)


def test_bytes_are_found_wherever_the_schema_has_them() -> None:
    """In lists, references to itself, unions with null and maps; where text will do, text stays text."""
    given = {
        "pages": [{"scan": b64(b"ab"), "next": {"scan": b64(b"cd")}}],
        "cover": b64(b"cover"),
        "extra": {"x": b64(b"\xff")},
        "either": b64(b"ab"),
    }
    assert reader(Book).read(body(given)) == {
        "pages": [{"scan": b"ab", "next": {"scan": b"cd"}}],
        "cover": b"cover",
        "extra": {"x": b"\xff"},
        "either": b64(b"ab"),
    }
    binary = {"pages": [{"scan": b"ab", "next": {"scan": b"cd"}}], "cover": None, "either": b"z"}
    assert reader(Book).read(body(binary, "msgpack")) == binary


@pytest.mark.parametrize(
    ("inputs", "kind", "said"),
    [
        ({"pages": [{"scan": "ab"}]}, "json", "pages.0.scan must be base64"),
        ({"pages": [{"scan": b64(b"a")}]}, "json", "2 to 4 bytes, it has 1"),
        ({"pages": [{"scan": b64(b"abcde")}]}, "json", "it has 5"),
        ({"pages": [{"scan": "YWI"}]}, "json", "base64"),
        ({"pages": [{"scan": "YW I="}]}, "json", "base64"),
        ({"pages": [{"scan": "caf\u00e9"}]}, "json", "base64"),
        ({"pages": [{"scan": "ab"}]}, "msgpack", "pages.0.scan must be bytes"),
        ({"pages": [], "title": b"x"}, "msgpack", "inputs.title"),
        ({"pages": b"x"}, "msgpack", "inputs.pages"),
    ],
)
def test_what_is_no_bytes_is_refused_with_its_place(inputs: Any, kind: str, said: str) -> None:
    """The detail begins with the path of the field."""
    with pytest.raises(InvalidInput, match=said.replace(".", r"\.")):
        reader(Book).read(body(inputs, kind))


def test_a_raw_body_is_the_only_required_field() -> None:
    """Defaults stand in for the others; a model with no such field says what it takes."""
    sound = reader(Sound, "rate / 16000")
    inputs = sound.read(body(b"RIFF", "raw"))
    assert inputs == {"audio": b"RIFF"} and sound.units(inputs) == 1.0
    with pytest.raises(UnsupportedMediaType):
        reader(Book).read(body(b"x", "raw"))


def test_parts_of_a_form_become_what_the_schema_wants() -> None:
    """Files and text alike: bytes, text, numbers as JSON, and lists from repeated parts."""
    assert reader(Sound).read(body({"audio": b"x", "rate": "8000"}, "fields")) == {
        "audio": b"x",
        "rate": 8000,
    }
    with pytest.raises(InvalidInput, match="rate is not JSON"):
        reader(Sound).read(body({"audio": b"x", "rate": "fast"}, "fields"))

    class Album(pydantic.BaseModel):
        images: list[bytes]

    assert reader(Album).read(body({"images": [b"a", b"b"]}, "fields")) == {"images": [b"a", b"b"]}
    assert reader(Album).read(body({"images": b"a"}, "fields")) == {"images": [b"a"]}


@pytest.mark.parametrize(
    ("dtype", "code", "values"),
    [
        ("float16", "e", [0.5, -2.0]),
        ("float64", "d", [0.1, 2.0]),
        ("int64", "q", [-5, 2**40]),
        ("bool", "?", [True, False]),
    ],
)  # fmt: skip
def test_arrays_become_nested_lists(dtype: str, code: str, values: list[Any]) -> None:
    """Little endian, C order, every dtype."""

    class Grid(pydantic.BaseModel):
        grid: list[list[Any]]

    array = {"dtype": dtype, "shape": [2, 1], "data": struct.pack(f"<2{code}", *values)}
    assert reader(Grid).read(body({"grid": array}, "msgpack")) == {"grid": [[values[0]], [values[1]]]}


def test_any_version_that_may_run_a_job_has_room_for_it() -> None:
    """The lease is the largest estimate of the versions that take the inputs."""
    small = InputReader(hosted("m", None, "1", version="a"))
    large = InputReader(hosted("m", None, "100", version="b"))
    strict = reader(Sound)
    measured = Entry("m", "m", (small, large, strict)).measure(body({"x": 1}), None)
    assert (measured.units, measured.lease_bytes) == (1.0, 2**20 + 1000)
    with pytest.raises(InvalidInput, match="audio"):
        Entry("m", "m", (strict,)).measure(body({"x": 1}), None)


@pytest.mark.parametrize(
    ("header", "form"),
    [
        (None, "json"), ("*/*", "json"), ("application/*;q=0.2", "json"), ("application/msgpack", "msgpack"),
        ("application/json, application/problem+json", "json"), ("text/event-stream", "events"),
        ("application/json;q=0.5, application/msgpack", "msgpack"), ("text/html, */*;q=0.1", "json"),
        ("application/msgpack;q=0, application/json", "json"), ("APPLICATION/JSON", "json"),
    ],
)  # fmt: skip
def test_accept(header: str | None, form: str) -> None:
    """The highest quality that this service has; JSON where it is all the same."""
    assert parse_accept(header, events=True) == form


@pytest.mark.parametrize("header", ["text/html", "application/json;q=0", "application/json;q=x", ","])
def test_accept_that_allows_nothing(header: str) -> None:
    """406; an event stream only where the route has one."""
    with pytest.raises(NotAcceptable):
        parse_accept(header)
    with pytest.raises(NotAcceptable):
        parse_accept("text/event-stream")


def test_prefer() -> None:
    """What is not understood is ignored, as RFC 7240 wants it; wait alone asks for nothing."""
    assert parse_prefer("respond-async") == Preference(True, 0.0, "respond-async")
    assert parse_prefer("Respond-Async , wait=10;x=1") == Preference(True, 10.0, "respond-async, wait=10")
    assert parse_prefer("respond-async, wait=soon") == Preference(True, 0.0, "respond-async")
    for header in (None, "", "wait=10", "return=minimal"):
        assert parse_prefer(header) == Preference()


def test_media_types() -> None:
    """Parameters and case do not matter; what is none of ours is a raw body."""
    for name, kind in (
        ("application/json; charset=utf-8", "json"), ("APPLICATION/JSON", "json"),
        ("application/ld+json", "json"), ("application/x-msgpack", "msgpack"),
        ("multipart/form-data; boundary=x", "fields"), ("audio/wav", "raw"),
        (None, "raw"), ("application/x-www-form-urlencoded", "raw"),
    ):  # fmt: skip
        assert kind_of(name) == kind


def test_options_have_the_defaults_of_the_settings() -> None:
    """None means the setting's default; what is given is in ms, at least 1."""
    from scheduler.settings import ClockSettings

    clocks = ClockSettings()
    assert (DEFAULTS.priority, DEFAULTS.max_wait_ms(clocks)) == (4, 30_000)
    assert (DEFAULTS.run_timeout_ms(clocks), DEFAULTS.total_timeout_ms(clocks)) == (60_000, 100_000)
    assert Options(max_wait_s=0.0001).max_wait_ms(clocks) == 1
