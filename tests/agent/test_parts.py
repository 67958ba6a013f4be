"""The agent's pure parts and small pieces, without a ledger and without a child."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import socket
from pathlib import Path
from typing import Any

import msgpack
import numpy
import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_agent import budget
from gpu_agent.batching import form_batch
from gpu_agent.cardlock import CardLock, CardTakenHere
from gpu_agent.child.answers import Unfit, is_finite, pack_output
from gpu_agent.child.ended import Ended, as_sent
from gpu_agent.child.loader import LoadFailed, describe, find_class
from gpu_agent.child.profile import Point, climb, envelope, prove
from gpu_agent.clock import ServerClock
from gpu_agent.device.verdict import Verdict, classify
from gpu_agent.estimate import Estimate
from gpu_agent.hosting import CardModels
from gpu_agent.ipc import Broken, Channel, Frames, pack_frame
from gpu_agent.release import Baseline
from scheduler.handover import HandedJob
from scheduler.logs import log_event, setup_logging
from scheduler.registration import Sample
from scheduler.settings import load_settings
from tests.agent.models_plain import Echo

MIB = 2**20


def job(name: str, *, lease: int, units: float = 1.0, alone: bool = False) -> HandedJob:
    return HandedJob(name, "l" + name, lease, "m", "1", units, 1, alone, 1000, 1000, b"i", False, None)


def sample(**changes: Any) -> Sample:
    plain = Sample(
        read_ms=1,
        total=1000 * MIB,
        driver=10 * MIB,
        used=300 * MIB,
        own=200 * MIB,
        allocated=0,
        reserved=0,
        context=20 * MIB,
    )
    return dataclasses.replace(plain, **changes)


# -- budget


def test_the_cap_is_what_strangers_leave_of_the_usable() -> None:
    """cap = total - driver - headroom - context - foreign, never negative."""
    assert budget.allocator_cap(sample(), headroom=50 * MIB) == (1000 - 10 - 50 - 20 - 100) * MIB
    assert budget.allocator_cap(sample(used=2000 * MIB), headroom=0) == 0


@given(
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.integers(0, 500),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
def test_nothing_is_accepted_over_the_measured_budget(
    lease: int, held: int, resident: int, used: int, own: int
) -> None:
    """A job is taken only when all that is held, with the weights, fits what was measured."""
    measured = sample(used=used * MIB, own=own * MIB)
    refused = budget.exceeds_budget(
        lease * MIB, held=held * MIB, resident=resident * MIB, sample=measured, headroom=50 * MIB
    )
    assert refused is ((lease + held + resident) * MIB > budget.allocator_cap(measured, headroom=50 * MIB))
    assert not budget.exceeds_budget(10**15, held=0, resident=0, sample=None, headroom=0)


def test_a_baseline_lets_strangers_who_came_meanwhile_stay() -> None:
    """What foreign memory appeared while a child lived is not waited for."""
    base = Baseline(used=50 * MIB, slack=2 * MIB)
    assert base.with_foreign(sample()).used == 100 * MIB
    assert base.with_foreign(None) == base


# -- estimates and batches


@given(st.lists(st.tuples(st.floats(1, 1e6), st.integers(0, 10**9)), min_size=1, max_size=20))
def test_no_measured_point_lies_above_the_line(raw: list[tuple[float, int]]) -> None:
    """The line over the points of a profile covers each of them."""
    points = [Point(u, p) for u, p in sorted(dict(raw).items())]
    line = envelope(points, grows=True)
    assert all(line.at(p.units) >= p.peak - 1 for p in points)
    flat = envelope(points, grows=False)
    assert flat.c1 == 0 and flat.c0 >= max(p.peak for p in points)


def test_a_linear_model_is_profiled_to_its_true_slope() -> None:
    """With a true cost of 5 MiB + 3 KiB a unit, rounded as allocators do, the line is within a fifth of
    it.
    """
    sizes: list[float] = []

    class Linear(Echo):
        def sample(self, units: float) -> Any:
            sizes.append(units)
            return super().sample(units)

    def measure(items: list[Any]) -> int:
        return sum(5 * MIB + math.ceil(3 * 1024 * float(item.mib) / 512) * 512 for item in items)

    points: list[Point] = []
    climb(Linear(), measure, points, room=200 * MIB)
    line = envelope(points, grows=True)
    assert 3 * 1024 <= line.c1 <= 3.6 * 1024
    assert 4 * MIB <= line.c0 <= 6 * MIB
    assert 5 * MIB + 3 * 1024 * max(sizes[:-1]) <= 200 * MIB


def test_a_batch_that_costs_more_than_its_items_raises_the_line() -> None:
    """A model whose batches take 10 MiB more an item than single runs is found out at load."""

    def measure(items: list[Any]) -> int:
        return (
            sum(math.ceil(float(item.mib)) * 1024 for item in items)
            + (len(items) > 1) * len(items) * 10 * MIB
        )

    points: list[Point] = []
    climb(Echo(), measure, points, room=500 * MIB)
    line = envelope(points, grows=True)
    proven = prove(Echo(), measure, line, points, room=500 * MIB)
    assert line.c0 < MIB and proven.c0 >= 10 * MIB and proven.c1 == line.c1
    assert prove(Echo(), measure, line, points, room=0) == line


def test_an_estimate_is_raised_by_what_was_seen_and_never_lowered() -> None:
    """A peak above the estimate raises it over the peak: by slope beyond the seen sizes, else by its fixed
    part.
    """
    known = Estimate(weights=0, buffers=0, c0=MIB, c1=float(MIB), seen_units=10)
    assert known.raised(items=1, units=5, peak=2 * MIB) == known
    inside = known.raised(items=1, units=5, peak=50 * MIB)
    assert inside.batch_bytes([5.0], "sum") >= 50 * MIB and inside.c1 == known.c1
    beyond = known.raised(items=1, units=20, peak=100 * MIB)
    assert beyond.batch_bytes([20.0], "sum") >= 100 * MIB and beyond.c0 == known.c0
    assert known.with_buffers(5).with_buffers(3).buffers == 5


def test_a_batch_never_needs_more_than_its_leases() -> None:
    """Jobs join while the need of all fits the sum of their leases; with padding, short ones do not ride
    on long ones.
    """
    known = Estimate(weights=0, buffers=0, c0=0, c1=1.0, seen_units=0)
    jobs = [job("a", lease=10, units=10), job("b", lease=2, units=2), job("c", lease=10, units=10)]
    summed = form_batch(jobs, max_batch=8, need=lambda units: known.batch_bytes(units, "sum"))
    assert [j.job_id for j in summed] == ["a", "b", "c"]
    padded = form_batch(jobs, max_batch=8, need=lambda units: known.batch_bytes(units, "max_times_n"))
    assert [j.job_id for j in padded] == ["a", "c"]
    assert len(form_batch(jobs, max_batch=2, need=lambda units: 0)) == 2


def test_exclusive_jobs_share_no_batch() -> None:
    """Neither takes an exclusive job others along, nor is it taken along."""
    first = [job("a", lease=1, alone=True), job("b", lease=1)]
    assert [j.job_id for j in form_batch(first, max_batch=8, need=lambda units: 0)] == ["a"]
    later = [job("a", lease=1), job("b", lease=1, alone=True), job("c", lease=1)]
    assert [j.job_id for j in form_batch(later, max_batch=8, need=lambda units: 0)] == ["a", "c"]


def test_the_inputs_of_a_batch_fit_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would make the message too large waits for the next batch; the first goes in any case."""
    monkeypatch.setattr("gpu_agent.batching.MOST_INPUT_BYTES", 2)
    jobs = [job("a", lease=1), job("b", lease=1), job("c", lease=1)]
    assert all(len(j.inputs or b"") == 1 for j in jobs)
    assert [j.job_id for j in form_batch(jobs, max_batch=8, need=lambda units: 0)] == ["a", "b"]
    monkeypatch.setattr("gpu_agent.batching.MOST_INPUT_BYTES", 0)
    assert [j.job_id for j in form_batch(jobs, max_batch=8, need=lambda units: 0)] == ["a"]


def test_the_results_of_a_batch_fit_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go with the end of their batch as long as they are small together, the rest by themselves."""
    monkeypatch.setattr("gpu_agent.child.ended.WITH_DONE_BYTES", 10)
    ended = [Ended("ok", result=b"x" * size) for size in (4, 7, 6, 1)]
    ended.append(Ended("failed", code="model_error", detail="d" * 100_000, field="f" * 100_000))
    items, apart = as_sent(ended)
    assert [result and len(result) for _, result, *_ in items] == [4, None, 6, None, None]
    assert apart == [(1, b"x" * 7), (3, b"x")]
    assert len(items[4][3]) < 10_000 and len(items[4][4]) < 1_000


def test_the_first_job_goes_even_when_its_lease_is_too_small_by_now() -> None:
    """An estimate that was raised after the grant does not keep a job for ever."""
    assert len(form_batch([job("a", lease=1)], max_batch=8, need=lambda units: 100)) == 1


# -- answers


class Point2(pydantic.BaseModel):
    x: float
    label: str


class Shown(str):
    """Text that shows itself as another."""

    def __str__(self) -> str:
        return "another"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ({"a": torch.ones(2, dtype=torch.int64)}, {"a": [1, 1]}),
        (Point2(x=1.5, label="l"), {"x": 1.5, "label": "l"}),
        ((1, None, True, b"raw"), [1, None, True, b"raw"]),
        (torch.tensor(2.5), 2.5),
        (torch.zeros(0), []),
        (torch.tensor([1 + 2j]), [[1.0, 2.0]]),
        ({1: {"deep": [torch.tensor([True])]}}, {"1": {"deep": [[True]]}}),
        ({0.5: 1, True: 2, None: 3}, {"0.5": 1, "true": 2, "null": 3}),
        ({numpy.int64(7): 1, numpy.float32(0.5): 2}, {"7": 1, "0.5": 2}),
        ({Shown("cat"): Shown("dog")}, {"cat": "dog"}),
        (pydantic.RootModel[int](3), 3),
        (pydantic.RootModel[list[Point2]]([Point2(x=1.5, label="l")]), [{"x": 1.5, "label": "l"}]),
    ],
)
def test_outputs_become_plain_values(value: Any, plain: Any) -> None:
    """Tensors, pydantic models and containers become what JSON and msgpack can hold."""
    assert msgpack.unpackb(pack_output(value, check_finite=True, limit=MIB)) == plain


def test_numpy_arrays_and_scalars_become_plain() -> None:
    """Arrays of numpy are outputs like tensors, and are checked like them."""
    packed = pack_output({"a": numpy.arange(3), "s": numpy.float32(0.5)}, check_finite=True, limit=MIB)
    assert msgpack.unpackb(packed) == {"a": [0, 1, 2], "s": 0.5}
    with pytest.raises(Unfit):
        pack_output(numpy.array([numpy.nan]), check_finite=True, limit=MIB)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex32]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_non_finite_tensors_of_every_float_type_are_refused(dtype: torch.dtype, bad: float) -> None:
    """One bad element is found in every floating type, unless the model opted out."""
    tensor = torch.ones(100).to(dtype)
    assert is_finite(tensor)
    tensor[50] = bad
    assert not is_finite(tensor)
    with pytest.raises(Unfit) as caught:
        pack_output([tensor], check_finite=True, limit=MIB)
    assert caught.value.code == "non_finite"
    pack_output([tensor], check_finite=False, limit=MIB)


class _Unspeakable(RuntimeError):
    """An exception that raises when it is asked what it says."""

    def __str__(self) -> str:
        raise SystemExit(1)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
)
def test_non_finite_tensors_of_eight_bits_are_refused(dtype: torch.dtype) -> None:
    """Also in the types for which torch has no extremes, and what is finite in them leaves."""
    assert is_finite(torch.ones(100).to(dtype))
    assert is_finite(torch.full((2,), torch.finfo(dtype).max).to(dtype))
    with pytest.raises(Unfit) as caught:
        pack_output(torch.tensor([1.0, float("nan")]).to(dtype), check_finite=True, limit=MIB)
    assert caught.value.code == "non_finite"


def test_any_exception_is_described_in_text_that_can_be_sent() -> None:
    """Surrogates are replaced, and one that cannot be shown is named by its type."""
    assert describe(ValueError("no '/data/\udcff.png'")) == "ValueError: no '/data/?.png'"
    assert describe(_Unspeakable()) == "_Unspeakable: a _Unspeakable that cannot be shown"
    assert classify(_Unspeakable(), device_oom=False) is Verdict.MODEL


def test_what_cannot_be_sent_says_where_it_is() -> None:
    """An object, a depth beyond the bound, an integer too large, an output too large: each has its code."""
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    cases: list[tuple[Any, str]] = [
        ({"a": [object()]}, "model_error"),
        (deep, "model_error"),
        (2**70, "model_error"),
        (b"x" * 2000, "output_too_large"),
        (torch.zeros(5000), "output_too_large"),
    ]
    for value, code in cases:
        with pytest.raises(Unfit) as caught:
            pack_output(value, check_finite=True, limit=1000)
        assert caught.value.code == code
    for keys, words in (
        ({1: "a", "1": "b"}, "two keys that are both sent as '1'"),
        ({True: 1, "true": 2}, "two keys that are both sent as 'true'"),
        ({(1, 2): 3}, "a tuple as a key"),
        ({b"x": 3}, "a bytes as a key"),
    ):
        with pytest.raises(Unfit, match=words) as caught:
            pack_output({"a": keys}, check_finite=True, limit=1000)
        assert caught.value.code == "model_error" and "output.a" in caught.value.detail
    with pytest.raises(Unfit, match=r"output\.a\[0\]"):
        pack_output({"a": [object()]}, check_finite=True, limit=1000)


# -- loading


def test_a_model_is_published_before_it_was_loaded_and_between_two_tries() -> None:
    """Who asks for it, or looks at the card, is told that it is being loaded."""
    models = CardModels(load_settings(models={"a": {"entrypoint": "a:A"}}), uuid="u", name="n")
    being_loaded = [("a", False, "it is being loaded")]
    assert [(m.name, m.ready, m.reason) for m in models.published()] == being_loaded
    models["a"].load_failed("there are no weights", is_final=False)
    models["a"].state, models["a"].reason = "loading", None
    assert [(m.name, m.ready, m.reason) for m in models.published()] == being_loaded


def test_an_entry_point_is_found_by_module_and_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`module:Class` and `folder/file.py:Class` name the same class; its version is a hash of the file."""
    (tmp_path / "sub").mkdir()
    text = Path("tests/agent/models_plain.py").read_text()
    (tmp_path / "sub" / "mine_by_file.py").write_text(text)
    (tmp_path / "mine_by_module.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    by_module, first = find_class("mine_by_module:Echo", [tmp_path])
    by_file, second = find_class("sub/mine_by_file.py:Echo", [tmp_path])
    assert by_module.__name__ == by_file.__name__ == "Echo"
    assert first == second and len(first) == 12


@pytest.mark.parametrize("entry", ["edited_{}:Thing", "edited_{}.py:Thing"])
def test_an_edited_file_is_imported_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """What is loaded again in the same process is the code of the version that it is published under."""
    entry = entry.format("file" if ".py" in entry else "module")
    file = tmp_path / f"{entry.removesuffix(':Thing').removesuffix('.py')}.py"
    plain = Path("tests/agent/models_plain.py").read_text()
    monkeypatch.syspath_prepend(str(tmp_path))
    file.write_text(f"{plain}\n\nclass Thing(Echo):\n    max_batch = 2\n")
    before, first = find_class(entry, [tmp_path])
    same, again = find_class(entry, [tmp_path])
    file.write_text(f"{plain}\n\nclass Thing(Echo):\n    max_batch = 32\n")
    after, second = find_class(entry, [tmp_path])
    assert same is before and again == first
    assert (after.max_batch, second != first) == (32, True)


def test_a_file_named_like_a_known_module_shadows_nothing(tmp_path: Path) -> None:
    """A model's file called queue.py is served, and the standard library's queue stays what it is."""
    import queue

    (tmp_path / "queue.py").write_text(Path("tests/agent/models_plain.py").read_text())
    found, _ = find_class("queue.py:Echo", [tmp_path])
    assert found.__name__ == "Echo"
    import sys

    assert sys.modules["queue"] is queue


@pytest.mark.parametrize(
    ("text", "entry", "part"),
    [
        ("raise SystemExit(3)", "m1.py:X", "SystemExit"),
        ("import not_there_at_all", "m2.py:X", "not_there_at_all"),
        ("X = 3", "m3.py:X", "no subclass"),
        ("", "m4.py:X", "has no X"),
        ("class X(vramgate.Model", "m5.py:X", "line 1"),
    ],
)
def test_a_file_that_does_not_serve_says_why_in_one_line(
    tmp_path: Path, text: str, entry: str, part: str
) -> None:
    """Whatever a model's file does at import, the reason is one line."""
    (tmp_path / entry.split(":")[0]).write_text(text)
    with pytest.raises(LoadFailed) as caught:
        find_class(entry, [tmp_path])
    assert part in caught.value.reason and "\n" not in caught.value.reason


# -- small pieces


def test_frames_cross_a_socket_pair_both_ways() -> None:
    """What one side packs the other reads, in pieces of any size; a closed end is None, and a foreign header
    is refused.
    """
    ours, theirs = socket.socketpair()
    channel, frames = Channel(theirs), Frames()
    messages: list[dict[str, Any]] = [{"t": "x", "data": b"y" * 3000, "n": [1, 2.5, None]}, {}, {"t": "last"}]
    for message in messages:
        channel.send(message)
    sent = ours.recv(1 << 16)
    for size in (1, 3, 2999, len(sent)):
        pieces = (sent[at : at + size] for at in range(0, len(sent), size))
        assert [message for piece in pieces for message in frames.feed(piece)] == messages
    ours.sendall(pack_frame({"back": 1}))
    assert channel.receive() == {"back": 1}
    with pytest.raises(Broken):
        list(frames.feed(b"\xff\xff\xff\xff"))
    ours.close()
    assert channel.receive() is None
    channel.close()


def test_a_card_is_locked_once_per_host(tmp_path: Path) -> None:
    """The second lock of a card names the first's process; another card, and the same after release, are
    free.
    """
    lock = CardLock.acquire("GPU-1", host_dir=tmp_path)
    with pytest.raises(CardTakenHere, match="process"):
        CardLock.acquire("GPU-1", host_dir=tmp_path)
    CardLock.acquire("MIG-1/2", host_dir=tmp_path).release()
    lock.release()
    lock.release()
    CardLock.acquire("GPU-1", host_dir=tmp_path).release()


def test_the_server_clock_never_goes_back() -> None:
    """An answer that arrives late does not turn the agent's idea of Redis time back."""
    clock = ServerClock()
    assert clock.now_ms() is None and clock.silence_s() == 0
    clock.hear(5000)
    clock.hear(3000)
    now = clock.now_ms()
    assert now is not None and now >= 5000


@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_line_cannot_be_forged(as_json: bool) -> None:
    """One event is one line whatever its values hold, and an exception says its type and place."""
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        setup_logging(as_json=as_json, stream=stream)
        log_event(logging.getLogger("t"), "request_refused", peer="a\nb c", code=None, bytes=3)
        try:
            raise ValueError("no\nluck")
        except ValueError:
            logging.getLogger("t").exception("failed")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    first, second = stream.getvalue().splitlines()
    if as_json:
        assert json.loads(first) | {"time": ""} == {
            "time": "",
            "level": "info",
            "event": "request_refused",
            "logger": "t",
            "peer": "a\nb c",
            "bytes": 3,
        }
        assert json.loads(second)["error"] == "ValueError: no\nluck"
    else:
        assert first.endswith('info request_refused peer="a\\nb c" bytes=3')
        assert "ValueError: no\\nluck" in second
