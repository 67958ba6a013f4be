"""How many values a body holds is known before they cost anything, and what they are is unmistakable."""

from __future__ import annotations

import json
import random
from typing import Any

import msgpack
import pytest

from gateway.parsing import NAME_VALUES, Allowance, parse_json, parse_msgpack
from scheduler.settings import LimitSettings
from vramgate.errors import Malformed, TooLarge

WORDS = ("", "a,b", '"', "\\", '\\"', '",', "[{:", "\\\\", "\u20ac\n", "x" * 40)


def document(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(5) if depth else 4
    if kind in (0, 1):
        return [document(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    if kind in (2, 3):
        names = rng.sample(WORDS, rng.randrange(1, 4))
        return {name: document(rng, depth - 1) for name in names}
    return rng.choice((None, True, 1, 0.5, rng.choice(WORDS)))


def values_in(value: Any) -> int:
    """Values below `value`, names with their weight."""
    if isinstance(value, dict):
        return sum(1 + NAME_VALUES + values_in(child) for child in value.values())
    return sum(1 + values_in(child) for child in value) if isinstance(value, list) else 0


@pytest.mark.parametrize("seed", range(40))
def test_values_are_counted_to_the_last(seed: int) -> None:
    """As many as there are pass, one less does not; what stands inside of strings is no value."""
    rng = random.Random(seed)
    whole = {"inputs": [document(rng, 5) for _ in range(8)]}
    exact = values_in(whole)
    spaced = json.dumps(whole, indent=1, ensure_ascii=seed % 2 == 0).encode()
    packed = msgpack.packb(whole)
    assert parse_json(spaced, 64, Allowance(exact)) == parse_msgpack(packed, 64, Allowance(exact)) == whole
    with pytest.raises(TooLarge, match=r"limits\.values"):
        parse_json(spaced, 64, Allowance(exact - 1))
    with pytest.raises(TooLarge, match=r"limits\.values"):
        parse_msgpack(packed, 64, Allowance(exact - 1))


def test_a_picture_in_nested_lists_is_within_the_default() -> None:
    """640 x 640 pixels of three numbers each."""
    row = b"[" + b",".join([b"[0.25,1,128]"] * 640) + b"]"
    content = b'{"inputs":{"image":[' + b",".join([row] * 640) + b"]}}"
    limits = LimitSettings()
    assert len(parse_json(content, limits.nesting, Allowance(limits.values))["inputs"]["image"]) == 640


def test_a_long_text_is_one_value() -> None:
    """However many commas, brackets, quotes and backslashes it holds."""
    text = 'He said: "a, b", {c}, [d]; \\ and \\" too, ' * 1000
    content = json.dumps({"inputs": {"text": text}}).encode()
    assert parse_json(content, 64, Allowance(20))["inputs"]["text"] == text


BOMBS = [
    b"[" + b"[]," * 5000 + b"[]]",
    b"[" + b'"",' * 5000 + b'""]',
    b'{"":{}' + b',"":{}' * 5000 + b"}",
    b'["' + b"," * 5000 + b'",' + b'"' * 5000,
]


@pytest.mark.parametrize("content", BOMBS, ids=["lists", "strings", "members", "quotes"])
def test_many_values_in_few_bytes_are_refused_unparsed(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is built of them, also where the text would turn out not to be JSON."""

    def parsed(_: bytes) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr("gateway.parsing.orjson.loads", parsed)
    with pytest.raises(TooLarge):
        parse_json(content, 64, Allowance(1000))


PACKED_BOMBS = [
    b"\xdc\xff\xff" + b"\x90" * 65535,
    b"\xdd\x7f\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff",
    b"\xdc\x01\x00" + b"\xdc\x01\x00" + b"\x80" * 256 + b"\xdc\x04\x00" + b"\xc0" * 1024 + b"\xc1",
]


@pytest.mark.parametrize("content", PACKED_BOMBS, ids=["lists", "promised", "promised-map", "inner"])
def test_reading_of_msgpack_ends_at_the_bound(content: bytes) -> None:
    """A length that is promised is held against the bound as well; what follows is not read."""
    with pytest.raises(TooLarge):
        parse_msgpack(content, 64, Allowance(1000))


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 1, "a": 1}',
        b'{"a": 1, "\\u0061": 2}',
        b'{"x": [{"text": "a: b", "b": 0, "b": 0}]}',
        b'{"x": ' + b"[" * 60 + b'{"a": 1, "a": 2}' + b"]" * 60 + b"}",
    ],
)
def test_a_member_that_stands_twice_is_malformed(content: bytes) -> None:
    """Nobody can say which of them was meant."""
    with pytest.raises(Malformed, match="twice"):
        parse_json(content, 64, Allowance(1000))


def test_a_key_that_stands_twice_is_malformed() -> None:
    """In msgpack as in JSON."""
    with pytest.raises(Malformed, match="twice"):
        parse_msgpack(b"\x91\x82\xa1a\x01\xa1a\x01", 64, Allowance(1000))


@pytest.mark.parametrize(
    "content", [b'{"a": {"a": "a: b"}, "b": ["c:d", {"a": ":"}]}', b'{"a:": {}, ":": []}', b'"a:b"', b"[]"]
)
def test_colons_in_texts_are_no_members(content: bytes) -> None:
    """And a name may well stand in several objects."""
    assert parse_json(content, 64, Allowance(1000)) == json.loads(content)
