"""The demo's verdict: each broken promise is told and fails it; and its clients ask for what they say."""

from __future__ import annotations

import dataclasses
import io
import random
import wave
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from scheduler.registration import Sample
from scheduler.views import CardView, Ledger
from vramgate import errors
from vramgate.cli.demo_load import Request, Tally, cut, make_requests
from vramgate.cli.demo_report import Evidence, Peaks, percentile, print_report, promises, runs_again
from vramgate.client import Answer, Timing, Vram

RECORDING = Path(__file__).parents[2] / "examples" / "speech-like.wav"

CARD = CardView(
    id="SIM-1",
    host="box",
    name="box:0",
    index=0,
    product="simulated",
    state="ready",
    reason=None,
    operator_state="ready",
    session_left_ms=9000,
    simulated=True,
    slots=16,
    jobs=0,
    running=0,
    ledger=Ledger(900, 100, 0, 0, 0, 0, 0, 0, 0, 800),
    sample=Sample(
        read_ms=1, total=1000, driver=20, used=300, own=250, allocated=200, reserved=220, context=30
    ),
    sample_age_ms=5,
    headroom=50,
    peak_leased_bytes=900,
    models=(),
    head=None,
)


def answer(job_id: str) -> Answer:
    return Answer(
        id=job_id,
        model="speech",
        version="1",
        outputs={},
        card="SIM-1",
        timing=Timing(wait_ms=10, run_ms=20, total_ms=30),
        vram=Vram(leased_bytes=500, peak_bytes=400),
        degraded=False,
        replayed=False,
        tries=1,
    )


def evidence() -> Evidence:
    """Everything went well: four answers, one of them after a crash."""
    request = Request("speech", "key")
    peaks = Peaks()
    peaks.see([CARD])
    return Evidence(
        requests=4,
        tally=Tally(answers=[(request, answer(str(n))) for n in range(4)], statuses=Counter({"200": 4})),
        counters={"runs": 5, "requeued.crash": 1},
        cards=[CARD],
        peaks=peaks,
        drift={"SIM-1": 0},
        leases_left=0,
        asked_again=2,
        replayed=2,
        seconds=3.0,
        killed_pid=7,
    )


def broken(seen: Evidence) -> list[str]:
    return [promise.claim for promise in promises(seen) if not promise.is_kept]


def with_failure(seen: Evidence, error: errors.VramgateError) -> Evidence:
    tally = dataclasses.replace(seen.tally, answers=seen.tally.answers[:3])
    tally.failures.append((Request("speech", "key"), error))
    return dataclasses.replace(seen, tally=tally)


def test_all_is_well() -> None:
    """Every promise kept, and every figure that the table owes is in it."""
    seen = evidence()
    assert broken(seen) == []
    assert runs_again(seen.counters) == 1
    console = Console(width=120, file=io.StringIO())
    print_report(seen, promises(seen), console=console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for words in ("4 x 200", "900 B", "2.5 times", "10 ms", "20 ms", "4 of 4"):
        assert words in shown


def test_a_budget_that_shrank_under_live_leases_is_no_broken_promise() -> None:
    """Resident bytes that are measured while jobs run (a larger input buffer) may fill a card beyond its
    budget; no grant did.
    """
    full = dataclasses.replace(CARD.ledger, resident=150, jobs=800)
    seen = evidence()
    seen.peaks.see([dataclasses.replace(CARD, ledger=full)])
    assert broken(seen) == []


@pytest.mark.parametrize(
    ("seen", "claim"),
    [
        (with_failure(evidence(), errors.Oom()), "OOM that reached a caller"),
        (with_failure(evidence(), errors.Crashed()), "crashes that reached a caller"),
        (with_failure(evidence(), errors.Unreachable()), "every request has its answer"),
        (
            dataclasses.replace(evidence(), counters={"requeued.crash": 1, "settled_twice": 1}),
            "jobs settled twice",
        ),
        (dataclasses.replace(evidence(), counters={}), "a killed child's runs are started again"),
        (dataclasses.replace(evidence(), drift={"SIM-1": -5}), "bytes of drift between leases and sums"),
        (dataclasses.replace(evidence(), leases_left=1), "leases left behind"),
        (dataclasses.replace(evidence(), replayed=1), "asked again under its key: the stored answer"),
        (
            dataclasses.replace(evidence(), peaks=Peaks(leased={"SIM-1": 901})),
            "cards over their budget",
        ),
    ],
)
def test_each_broken_promise_is_told(seen: Evidence, claim: str) -> None:
    """One thing that went wrong is seen for what it is."""
    assert claim in broken(seen)


def test_percentiles() -> None:
    """Nearest rank; nothing has none."""
    assert percentile([], 0.5) is None
    assert [percentile(range(1, 101), share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]


def test_requests_are_mixed_and_repeatable() -> None:
    """Both models, several sizes, real audio of the length that was asked for, and the same again from the
    same seed.
    """
    first, again = [make_requests(64, recording=RECORDING, chance=random.Random(5)) for _ in range(2)]
    assert [(r.model, r.inputs, r.body) for r in first] == [(r.model, r.inputs, r.body) for r in again]
    assert Counter(request.model for request in first) == {"speech": 40, "diffusion": 24}
    assert len({request.key for request in first + again}) == 128
    with wave.open(io.BytesIO(cut(RECORDING, 7.5, chance=random.Random(1)))) as audio:
        assert audio.getnframes() == int(7.5 * audio.getframerate())
