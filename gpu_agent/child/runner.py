"""Runs batches: one model's lanes, from handed inputs to packed answers.

Owns: the order parse, predict, check, pack; what a failure does to the rest of its batch; cancel flags;
and what was measured meanwhile. Does not own: who gets which job (the supervisor), what a failure means
for a job's further life (the ledger), or estimates.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pydantic
import torch

from gpu_agent.child.answers import Unfit, pack_output
from gpu_agent.child.context import LaneContext, Scope, nobody
from gpu_agent.child.ended import Ended, as_sent
from gpu_agent.child.loader import describe
from gpu_agent.device.torch_device import TorchDevice
from gpu_agent.device.verdict import Verdict, classify
from gpu_agent.text import plain_text
from vramgate.errors import Cancelled, InputError
from vramgate.model import Model, refusal

UNITS_SLACK = 1.001
Send = Callable[[Mapping[str, Any]], None]


class Poisoned(Exception):
    """The process's context can no longer be trusted: end it."""


@dataclass(slots=True)
class Order:
    """One batch as the supervisor handed it: `jobs` are (id, inputs, units, whether its pieces of output are
    wanted), in the batch's order.
    """

    number: int
    jobs: Sequence[tuple[str, bytes, float, bool]]
    cancelled: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Hosted:
    """A loaded model: its instance, and one context per lane."""

    name: str
    model: Model
    contexts: list[LaneContext]
    reference: bytes | None = None
    smallest: Any = None

    @property
    def buffer_bytes(self) -> int:
        return sum(context.buffers.kept_bytes for context in self.contexts)


@dataclass(frozen=True, slots=True)
class _Failure:
    verdict: Verdict
    text: str
    field: str | None = None


class Activity:
    """Who runs at the moment: a peak is worth something only where nobody else ran meanwhile."""

    def __init__(self, device: TorchDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._shared: set[int] = set()

    def enter(self, number: int) -> int:
        """Begin; returns the bytes allocated before."""
        with self._lock:
            if self._running:
                self._shared |= {*self._running, number}
            else:
                self._device.reset_peak()
            self._running.add(number)
            return self._device.allocated()

    def leave(self, number: int) -> tuple[int, bool]:
        """End; returns the peak and whether it was shared with others."""
        with self._lock:
            self._running.discard(number)
            shared = number in self._shared
            self._shared.discard(number)
            return self._device.peak(), shared


class Runner:
    """Runs orders of any hosted model in the calling lane's thread."""

    def __init__(self, device: TorchDevice, send: Send, *, output_limit: int) -> None:
        self.device = device
        self.send = send
        self.limit = output_limit
        self.activity = Activity(device)

    def run(self, hosted: Hosted, context: LaneContext, order: Order, *, lane: int) -> None:
        """Answer one order with a `done` message. `lane` counts over the whole process. Raises Poisoned."""
        began = time.monotonic()
        before = self.activity.enter(order.number)
        try:
            with self.device.tracking(lane=lane), torch.no_grad():
                ended = _Batch(self, hosted, context, order).answer()
        finally:
            peak, shared = self.activity.leave(order.number)
        items, apart = as_sent(ended)
        for index, result in apart:
            self.send({"t": "result", "batch": order.number, "item": index, "data": result})
        self.send(
            {
                "t": "done",
                "batch": order.number,
                "items": items,
                "run_ms": round((time.monotonic() - began) * 1000),
                "peak": max(0, peak - before),
                "shared": shared,
                "buffers": hosted.buffer_bytes,
                "allocated": self.device.allocated(),
                "segments": self.device.segments(),
            }
        )

    def check(self, hosted: Hosted, context: LaneContext) -> None:
        """After a suspicious failure: is this process still able to compute? Raises Poisoned."""
        reason = None
        try:
            self.device.synchronize()
            if not self.device.canary():
                reason = "the canary's matmul gave a wrong answer"
            elif hosted.smallest is not None and not self._still_agrees(hosted, context):
                reason = f"{hosted.name} answers its own sample differently than when it was loaded"
        except BaseException as error:
            reason = describe(error)
        if reason is not None:
            raise Poisoned(reason)

    def predict_plain(self, hosted: Hosted, context: LaneContext, items: list[Any]) -> bytes:
        """One call outside of any job: the packed answer to the first item. Raises whatever the model or
        checks raise.
        """
        context.begin(Scope(members=range(len(items)), cancelled=set(), progress=nobody))
        try:
            last: Any = None
            for outputs in _chunks(hosted.model.predict(items, context)):
                last = outputs[0] if outputs[0] is not None else last
            self.device.synchronize()
            if isinstance(last, BaseException):
                raise last
            return pack_output(last, check_finite=hosted.model.check_finite, limit=self.limit)
        finally:
            context.end()

    def _still_agrees(self, hosted: Hosted, context: LaneContext) -> bool:
        answer = self.predict_plain(hosted, context, [hosted.smallest])
        return hosted.reference is None or answer == hosted.reference


class _Batch:
    """One order on its way: the lane's thread only, but for the set of cancelled items."""

    def __init__(self, runner: Runner, hosted: Hosted, context: LaneContext, order: Order) -> None:
        self._runner = runner
        self._hosted = hosted
        self._context = context
        self._order = order
        self._parsed: dict[int, Any] = {}
        self._ended: dict[int, Ended] = {}
        self._chunks: dict[int, list[bytes]] = {}
        self._streamed_bytes: dict[int, int] = {}
        self._has_streamed = False

    def answer(self) -> list[Ended]:
        for index, (_, inputs, units, _) in enumerate(self._order.jobs):
            self._parse(index, inputs, units)
        if self._parsed:
            self._try(sorted(self._parsed))
        return [self._ended[i] for i in range(len(self._order.jobs))]

    def _parse(self, index: int, inputs: bytes, units: float) -> None:
        model = self._hosted.model
        try:
            decoded = msgpack.unpackb(inputs, strict_map_key=False)
            item = model.parse(decoded)
            counted = model.count_units(decoded)
            if counted > units * UNITS_SLACK:
                raise InputError(f"the input counts {counted:g} units, and memory was leased for {units:g}")
            self._parsed[index] = item
        except pydantic.ValidationError as error:
            self._ended[index] = _refused(_failure_of(refusal(error)))
        except BaseException as error:
            # SystemExit as well: what a validator raises is about this item, and never about this process.
            self._ended[index] = _refused(_failure_of(error))

    def _try(self, members: list[int]) -> None:
        """Run these items; when the call fails as a whole, find out whose fault it was."""
        failure = self._attempt(members)
        if failure is None:
            return
        if failure.verdict is Verdict.OOM:
            # Here no frame holds the run's tensors any more: the except block is over, its traceback gone.
            gc.collect()
            self._runner.device.empty_cache()
        elif failure.verdict is Verdict.STICKY_SUSPECT:
            self._runner.check(self._hosted, self._context)
        if len(members) > 1 and not self._has_streamed and failure.verdict is not Verdict.CANCELLED:
            self._split(members, failure.verdict)
        else:
            for index in members:
                self._ended.setdefault(index, _ended_by(failure))

    def _split(self, members: list[int], verdict: Verdict) -> None:
        # An OOM halves the need each time. An error is somebody's own: alone, only its owner meets it again.
        step = (len(members) + 1) // 2 if verdict is Verdict.OOM else 1
        for start in range(0, len(members), step):
            self._chunks.clear()
            self._streamed_bytes.clear()
            self._try(members[start : start + step])

    def _attempt(self, members: list[int]) -> _Failure | None:
        device = self._runner.device
        refused = device.ooms()
        scope = Scope(members=members, cancelled=self._order.cancelled, progress=self._progress)
        self._context.begin(scope)
        try:
            self._predict(members)
            return None
        except BaseException as error:
            return _failure_of(error, device_oom=device.ooms() != refused)
        finally:
            self._context.end()

    def _predict(self, members: list[int]) -> None:
        context = self._context
        context.raise_if_cancelled()
        answer = self._hosted.model.predict([self._parsed[i] for i in members], context)
        if isinstance(answer, Iterator):
            with contextlib.closing(_chunks(answer)) as pieces:
                for outputs in pieces:
                    self._take(members, outputs, is_stream=True)
                    context.raise_if_cancelled()
                    if self._ended.keys() >= set(members):
                        break
            for index in members:
                self._ended.setdefault(index, self._joined(self._chunks.get(index, [])))
        else:
            self._take(members, answer, is_stream=False)

    def _take(self, members: list[int], outputs: Any, *, is_stream: bool) -> None:
        if not isinstance(outputs, Sequence) or isinstance(outputs, str | bytes):
            raise TypeError(
                f"predict must return a list, one output per item, not a {type(outputs).__name__}"
            )
        if len(outputs) != len(members):
            raise ValueError(f"predict returned {len(outputs)} outputs for {len(members)} items")
        # A kernel's error surfaces here and not in some later run.
        self._runner.device.synchronize()
        for index, output in zip(members, outputs, strict=True):
            if is_stream and (output is None or index in self._ended):
                continue
            ended = self._finished(output)
            if not is_stream or ended.kind != "ok":
                self._ended[index] = ended
            elif ended.result is not None:
                self._stream(index, ended.result)

    def _finished(self, output: Any) -> Ended:
        if isinstance(output, BaseException):
            return _ended_by(_failure_of(output))
        try:
            packed = pack_output(
                output, check_finite=self._hosted.model.check_finite, limit=self._runner.limit
            )
        except Unfit as unfit:
            return Ended("failed", code=unfit.code, detail=unfit.detail)
        except BaseException as error:
            failure = _failure_of(error)
            if failure.verdict in (Verdict.OOM, Verdict.STICKY_SUSPECT):
                raise
            # The output's own code (a serializer, a property) failed; its mates may have streamed by now.
            return _refused(failure)
        return Ended("ok", result=packed)

    def _stream(self, index: int, chunk: bytes) -> None:
        self._has_streamed = True
        total = self._streamed_bytes[index] = self._streamed_bytes.get(index, 0) + len(chunk)
        if total > self._runner.limit:
            self._chunks.pop(index, None)
            self._ended[index] = self._too_large(total)
            return
        self._chunks.setdefault(index, []).append(chunk)
        *_, is_wanted = self._order.jobs[index]
        if is_wanted:
            self._runner.send({"t": "output", "batch": self._order.number, "item": index, "data": chunk})

    def _joined(self, chunks: list[bytes]) -> Ended:
        """One chunk is the answer itself; several are a list of them."""
        if len(chunks) == 1:
            return Ended("ok", result=chunks[0])
        packer = msgpack.Packer()
        whole = packer.pack_array_header(len(chunks)) + b"".join(chunks) if chunks else msgpack.packb(None)
        if len(whole) > self._runner.limit:
            return self._too_large(len(whole))
        return Ended("ok", result=whole)

    def _too_large(self, size: int) -> Ended:
        limit = self._runner.limit
        detail = f"the outputs have {size} bytes together; at most {limit} may leave"
        return Ended("failed", code="output_too_large", detail=detail)

    def _progress(self, item: int | None, done: float, total: float) -> None:
        self._runner.send(
            {"t": "progress", "batch": self._order.number, "item": item, "done": done, "total": total}
        )


def _chunks(answer: Any) -> Generator[Any, None, None]:
    """The lists of a generator, closed in any case so that its frame lets go of the card; or the one list."""
    if not isinstance(answer, Iterator):
        yield answer
        return
    try:
        yield from answer
    finally:
        close = getattr(answer, "close", None)
        if close is not None:
            close()


def _failure_of(error: BaseException, *, device_oom: bool = False) -> _Failure:
    """What a model raised, read. One that cannot even be looked at is the model's error. Never raises."""
    try:
        text = error.detail if isinstance(error, InputError | Cancelled) else describe(error)
        name = getattr(error, "field", None) if isinstance(error, InputError) else None
        field = plain_text(name) if name else None
        if field:
            text = f"{field}: {text}"
        return _Failure(classify(error, device_oom=device_oom), plain_text(text), field)
    except BaseException:
        return _Failure(Verdict.OOM if device_oom else Verdict.MODEL, type(error).__name__)


def _refused(failure: _Failure) -> Ended:
    """The end of an item by what its own inputs or output raised."""
    code = "rejected_by_model" if failure.verdict is Verdict.INPUT else "model_error"
    return Ended("failed", code=code, detail=failure.text, field=failure.field)


def _ended_by(failure: _Failure) -> Ended:
    match failure.verdict:
        case Verdict.OOM:
            return Ended("oom", code="oom", detail=failure.text)
        case Verdict.CANCELLED:
            return Ended("cancelled", code="cancelled", detail=failure.text)
    return _refused(failure)
