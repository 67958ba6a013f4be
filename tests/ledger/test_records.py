"""Packed records: what Python packs and reads is what the Lua helpers name."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from scheduler import admission, records, scripts
from scheduler.store import Store
from tests import packed
from tests.ledger.fake_agent import FakeAgent, request
from vramgate import errors


def test_python_and_lua_name_the_same_fields() -> None:
    """In the same order, numbers first: job.lua and records.py."""
    layout, names = packed.fields("job", "FIXED")
    *told, moving = names
    assert moving == "moving"
    assert tuple(told) == (*records.CLIENT_NUMBERS, *records.CLIENT_STRINGS, *records.FIXED_NUMBERS)
    numbers, strings, later = map(
        len, (records.CLIENT_NUMBERS, records.CLIENT_STRINGS, records.FIXED_NUMBERS)
    )
    assert layout == "d" * numbers + "s" * strings + "d" * later
    text = (scripts.LUA / "submit.lua").read_text()
    assert f"local CLIENTS = '<{'d' * numbers}{'s' * strings}'" in text
    layout, names = packed.fields("job", "MOVING")
    *told, more = names
    assert more == "more"
    assert tuple(told) == (*records.MOVING_NUMBERS, *records.MOVING_STRINGS)
    assert layout == "d" * len(records.MOVING_NUMBERS) + "s" * len(records.MOVING_STRINGS)


@pytest.mark.parametrize(
    ("helper", "constant", "owner"),
    [("job", "MOVING", "j"), ("lease", "CARD", "k"), ("lease", "RECORD", "record")],
)
def test_lua_packs_in_the_order_in_which_it_unpacks(helper: str, constant: str, owner: str) -> None:
    layout, names = packed.fields(helper, constant)
    text = (scripts.LUA / "_lib" / f"{helper}.lua").read_text()
    written = re.findall(rf"struct\.pack\({constant}, ({owner}\.[^)]+)\)", text)
    assert written
    for each in written:
        assert re.findall(rf"{owner}\.(\w+)", each) == names[: len(layout)]
    assert len(layout) in (len(names), len(names) - 1)


async def test_a_submitted_record_reads_as_it_was_sent(store: Store) -> None:
    """Sizes and fractions exactly, a text without the zero bytes that it may hold."""
    agent = FakeAgent(store)
    await agent.register(state="starting")
    asked = dataclasses.replace(request(nbytes=123_456_789, request_id="a\0b"), units=1 / 3)
    await admission.submit(store, asked)
    redis: Any = store.redis
    job = records.unpack_job(await redis.get(store.keys.job(asked.job_id)))
    assert (job["n"], job["u"], job["rq"], job["s"], job["w"]) == (123_456_789, 1 / 3, "ab", "queued", "w1")
    whole = await redis.get(store.keys.job(asked.job_id))
    for spoilt in (b"nonsense", whole[:80], whole[:-1], whole + b"\xc1"):
        with pytest.raises(errors.Internal, match="no record of a job"):
            records.unpack_job(spoilt)
