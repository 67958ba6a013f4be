"""Packed records: what Python packs and reads is what the Lua helpers name."""

from __future__ import annotations

import dataclasses
import hashlib
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
    layout, names = packed.places()
    client = (*records.CLIENT_NUMBERS, *records.CLIENT_STRINGS)
    begun = (*records.FIXED_NUMBERS, *records.MOVING_NUMBERS, *records.MOVING_STRINGS)
    assert names == [*client, *begun]
    numbers, strings, later = map(
        len, (records.CLIENT_NUMBERS, records.CLIENT_STRINGS, records.FIXED_NUMBERS + records.MOVING_NUMBERS)
    )
    clients, rest = "d" * numbers + "s" * strings, "d" * later + "s" * len(records.MOVING_STRINGS)
    assert layout == clients + rest
    assert f"local CLIENTS = '<{clients}'" in (scripts.LUA / "submit.lua").read_text()
    job = (scripts.LUA / "_lib" / "job.lua").read_text()
    assert f"local JOB, BEGUN = '<{layout}', '<{rest}'" in job
    assert f"local FIELDS = {len(layout)}\n" in job


@pytest.mark.parametrize(
    ("helper", "constant", "owner"),
    [("lease", "CARD", "k"), ("lease", "RECORD", "record")],
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


async def test_the_pool_says_its_layout(store: Store) -> None:
    """From the first script on that notes the time, and again when the server has forgotten it."""
    redis: Any = store.redis
    agent = FakeAgent(store)
    await agent.register()
    for _ in range(2):
        await agent.beat()
        clocks = [field for field in await redis.hkeys(store.keys.meta) if field.startswith(b"clock")]
        assert clocks == [f"clock:{records.LAYOUT}".encode()]
        await redis.delete(store.keys.meta)


def test_a_change_of_what_scripts_pack_raises_the_layout() -> None:
    """A release that reads records of another layout would take every job for gone. Whoever changes one of
    these raises records.LAYOUT, and the number at the end of base.lua's CLOCK_FIELD, and notes both here.
    """
    named = [packed.places(), packed.fields("lease", "CARD"), packed.fields("lease", "RECORD")]
    others = {
        path.name: sorted(set(re.findall(r"'<d+'", path.read_text())))
        for path in sorted((scripts.LUA / "_lib").glob("*.lua"))
    }
    digest = hashlib.sha256(repr((named, others)).encode()).hexdigest()[:16]
    assert (records.LAYOUT, digest) == (1, "b536e9efb038e026")
    base = (scripts.LUA / "_lib" / "base.lua").read_text()
    assert f"'clock:{records.LAYOUT}'" in base
