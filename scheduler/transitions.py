"""The state table of a job: event x state -> new state, error code, pinned to its key or not, what it counts
as.

One table drives Python, Lua (`lua/_lib/transitions.lua` is rendered from it) and `docs/states.md`;
tests/ledger/test_transitions.py holds the three equal. `python -m scheduler.transitions` rewrites both files.

A job's life is not its lease's life: cancel and expiry settle the caller at once, the bytes of a running
lease come back only with the agent's own report or with a new registration of the card.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Counts = Literal["", "crash", "loss"]
LIVE = ("queued", "leased", "running")


@dataclass(frozen=True, slots=True)
class Transition:
    """One event. code: the error code of the settled job. pinned: the key keeps this outcome and never runs
    again.
    """

    event: str
    sources: tuple[str, ...]
    target: str
    code: str = ""
    pinned: bool = False
    counts: Counts = ""
    meaning: str = ""


_ON_CARD = ("leased", "running")

TRANSITIONS: tuple[Transition, ...] = (
    Transition("grant", ("queued",), "leased", meaning="a card has room: bytes are leased"),
    Transition(
        "takeover", ("leased",), "leased", meaning="an idle card takes over what another has not handed out"
    ),
    Transition("start", ("leased",), "running", meaning="the agent reports that the run began"),
    Transition(
        "give_back", _ON_CARD, "queued", meaning="the agent drains or returns what it has not started"
    ),
    Transition("unheld", _ON_CARD, "queued", meaning="the agent does not hold what it was handed"),
    Transition("killed", _ON_CARD, "queued", meaning="its child was killed because of another job"),
    Transition(
        "unclaimed", ("leased",), "queued", meaning="its card stopped granting before it was handed out"
    ),
    Transition(
        "agent_lost", _ON_CARD, "queued", counts="loss", meaning="the agent's session ended while it ran"
    ),
    Transition("oom", _ON_CARD, "queued", meaning="out of memory: runs again, once, alone on the card"),
    Transition("crash", _ON_CARD, "queued", counts="crash", meaning="its child died: runs again alone"),
    Transition("succeed", _ON_CARD, "succeeded", pinned=True, meaning="the holder of the lease delivered"),
    Transition("model_error", _ON_CARD, "failed", "model_error", pinned=True, meaning="the model raised"),
    Transition(
        "rejected_by_model", _ON_CARD, "failed", "rejected_by_model", pinned=True, meaning="InputError"
    ),
    Transition(
        "non_finite", _ON_CARD, "failed", "non_finite", pinned=True, meaning="NaN or infinity in the output"
    ),
    Transition(
        "output_too_large",
        _ON_CARD,
        "failed",
        "output_too_large",
        pinned=True,
        meaning="output over max_output",
    ),
    Transition("run_timeout", _ON_CARD, "failed", "run_timeout", pinned=True, meaning="the run clock passed"),
    Transition("oom_again", _ON_CARD, "failed", "oom", meaning="out of memory although alone on the card"),
    Transition(
        "crashed_alone", _ON_CARD, "failed", "crashed", meaning="its child died twice while it ran alone"
    ),
    Transition("lost_for_good", LIVE, "failed", "lost", meaning="its agent was lost once too often"),
    Transition("failed_inside", _ON_CARD, "failed", "internal", meaning="vramgate itself failed at this job"),
    Transition(
        "cancel", LIVE, "cancelled", "cancelled", meaning="DELETE, an operator, or the last client left"
    ),
    Transition(
        "wait_timeout", ("queued", "leased"), "expired", "wait_timeout", meaning="the wait clock passed"
    ),
    Transition(
        "no_ready_card", ("queued",), "expired", "no_ready_card", meaning="... and no card hosts the model"
    ),
    Transition("total_timeout", LIVE, "expired", "total_timeout", meaning="the total clock passed"),
)

BY_EVENT = {row.event: row for row in TRANSITIONS}


def next_state(event: str, state: str) -> str | None:
    """The state after `event` in `state`, None where the table has no such row."""
    row = BY_EVENT[event]
    return row.target if state in row.sources else None


def render_lua() -> str:
    """The text of lua/_lib/transitions.lua: a member for each row, since a call uses few of them."""
    lines = [
        "-- transitions: rendered from scheduler/transitions.py by `python -m scheduler.transitions`.",
        "-- Do not edit.",
        "local transitions = {}",
        "",
    ]
    for row in TRANSITIONS:
        lines += [
            f"transitions.{row.event} = {{",
            f"  from = '{' '.join(row.sources)}', to = '{row.target}', code = '{row.code}', "
            f"pinned = {str(row.pinned).lower()}, counts = '{row.counts}',",
            "}",
        ]
    codes = sorted({row.code for row in TRANSITIONS if row.pinned and row.code})
    return "\n".join(
        [
            *lines,
            "",
            f"transitions.PINNED = {{ {', '.join(f'{code} = true' for code in codes)} }}",
            "",
            "-- The row of an event in a state, nil where there is none.",
            "function transitions.row(event, state)",
            "  local row = transitions[event]",
            "  if row and string.find(row.from, state, 1, true) then return row end",
            "  return nil",
            "end",
            "",
        ]
    )


def render_docs() -> str:
    """The text of docs/states.md."""
    lines = [
        "# States of a job",
        "",
        "Rendered from `scheduler/transitions.py` by `python -m scheduler.transitions`.",
        "A test holds them equal.",
        "",
        "| event | from | to | code | pinned to the key | counts as | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in TRANSITIONS:
        lines.append(
            f"| `{row.event}` | {', '.join(row.sources)} | {row.target} | {row.code or ''} | "
            f"{'yes' if row.pinned else 'no'} | {row.counts} | {row.meaning} |"
        )
    return "\n".join([*lines, ""])


ROOT = Path(__file__).resolve().parent.parent
RENDERED = {ROOT / "lua/_lib/transitions.lua": render_lua, ROOT / "docs/states.md": render_docs}

if __name__ == "__main__":
    for path, render in RENDERED.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(render())
