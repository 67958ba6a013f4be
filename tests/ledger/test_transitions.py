"""The state table is one: Python, Lua and the docs are rendered from it, and the ledger follows it."""

from __future__ import annotations

import itertools

import pytest

from scheduler import scripts
from scheduler.states import SETTLED
from scheduler.store import Store, pack
from scheduler.transitions import BY_EVENT, LIVE, RENDERED, TRANSITIONS, next_state
from vramgate import errors

STATES = (*LIVE, *sorted(SETTLED))


def test_the_rendered_files_are_current() -> None:
    """lua/_lib/transitions.lua and docs/states.md equal what `python -m scheduler.transitions` writes."""
    for path, render in RENDERED.items():
        assert path.read_text() == render(), f"{path.name}: run `python -m scheduler.transitions`"


async def test_lua_reads_the_table_as_python_does(store: Store) -> None:
    """Every event in every state: the same new state, code, pinning and count; none where there is no row."""
    base = (scripts.LUA / "_lib" / "base.lua").read_text()
    table = (scripts.LUA / "_lib" / "transitions.lua").read_text()
    arguments = (scripts.LUA / "_lib" / "arguments.lua").read_text()
    text = f"{base}\n{arguments}\n{table}\nlocal r = transitions.row(A.event, A.state)\n" + (
        "if not r then return false end return { r.to, r.code, tostring(r.pinned), r.counts }"
    )
    for event, state in itertools.product([*BY_EVENT, "no_such_event"], STATES):
        given = pack({"event": event, "state": state})
        told = await store.redis.eval(text, 1, store.keys.meta, given, store.script_settings(""))
        target = next_state(event, state) if event in BY_EVENT else None
        if target is None:
            assert told is None
        else:
            row = BY_EVENT[event]
            expected = [target, row.code, str(row.pinned).lower(), row.counts]
            assert [part.decode() for part in told] == expected


def test_nothing_leaves_a_settled_state() -> None:
    """A settled answer is never rewritten: no event has a settled state as its source."""
    assert all(next_state(event, state) is None for event in BY_EVENT for state in SETTLED)


@pytest.mark.parametrize("row", [row for row in TRANSITIONS if row.code], ids=lambda row: row.event)
def test_codes_and_states_are_those_of_the_error_table(row: object) -> None:
    """Each code is a row of errors.TABLE, whose state of the job is the target."""
    from scheduler.transitions import Transition

    assert isinstance(row, Transition)
    known = errors.TABLE[row.code]
    assert known.job_state in (row.target, None)


def test_what_is_pinned_is_what_the_design_names() -> None:
    """Success and six failures are pinned to a key; everything else frees it."""
    pinned = {row.code for row in TRANSITIONS if row.pinned}
    assert pinned == {
        "",
        "model_error",
        "rejected_by_model",
        "non_finite",
        "run_timeout",
        "output_too_large",
    }
    assert [row.event for row in TRANSITIONS if row.pinned and not row.code] == ["succeed"]
