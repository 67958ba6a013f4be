"""Loads models into this process, measures them, and gives each its lanes.

Owns: the threads that run models, and the order load, adopt, profile, publish. Everything that a model's
own code does happens in one of its lanes' threads, so that the thread that reads messages always answers.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_agent.child.context import LaneContext
from gpu_agent.child.lanes import Lane, Lanes
from gpu_agent.child.loader import LoadFailed, describe, find_class, publish
from gpu_agent.child.profile import Line, Measure, Point, climb, envelope, prove
from gpu_agent.child.runner import Hosted, Order, Runner
from gpu_agent.device.torch_device import TorchDevice
from gpu_agent.device.verdict import Verdict, classify
from gpu_agent.text import plain_text
from vramgate.model import Model
from vramgate.quantities import format_size
from vramgate.units import compile_units

EXIT_POISONED = 70


class Hosting:
    """All models of this process."""

    def __init__(self, device: TorchDevice, runner: Runner, directories: Sequence[Path]) -> None:
        self._device = device
        self._runner = runner
        self._directories = directories
        self._hosted: dict[str, Hosted] = {}
        self._lanes: dict[str, Lanes] = {}
        self._orders: dict[int, Order] = {}
        self._numbers = itertools.count()

    def load(self, message: Mapping[str, Any]) -> None:
        """Begin to load a model; `loaded` or `load_failed` is sent when it is over."""
        name = str(message["model"])
        lanes = self._lanes.get(name)
        if lanes is None:
            lanes = self._lanes[name] = Lanes(name, lambda: next(self._numbers), broken=self._broken)
        lanes.grow_to(1)
        lanes.put(lambda lane: self._load(message, lane))

    def run(self, message: Mapping[str, Any]) -> None:
        """Put a batch before its model's lanes."""
        name, number = str(message["model"]), int(message["batch"])
        order = Order(number, [(str(j), bytes(i), float(u), bool(w)) for j, i, u, w in message["jobs"]])
        self._orders[number] = order
        self._lanes[name].put(lambda lane: self._run(name, order, lane))

    def cancel(self, batch: int, item: int) -> None:
        """Flag one item; an order that is over is ignored."""
        order = self._orders.get(batch)
        if order is not None:
            order.cancelled.add(item)

    def unload_all(self, *, timeout_s: float) -> None:
        """Let each model let go, one after the other, all within the time."""
        for name in list(self._hosted):
            over = threading.Event()
            self._lanes[name].put(functools.partial(self._unload, name, over))
            over.wait(timeout_s)

    def _broken(self, reason: str) -> None:
        try:
            self._runner.send({"t": "poisoned", "reason": reason})
        finally:
            # Nothing of this context may answer any more; atexit handlers would touch the card again.
            os._exit(EXIT_POISONED)

    def _run(self, name: str, order: Order, lane: Lane) -> None:
        hosted = self._hosted[name]
        try:
            self._runner.run(hosted, hosted.contexts[lane.index], order, lane=lane.number)
        finally:
            self._orders.pop(order.number, None)

    def _unload(self, name: str, over: threading.Event, lane: Lane) -> None:
        hosted = self._hosted.pop(name, None)
        try:
            if hosted is not None:
                with self._device.tracking(lane=lane.number):
                    hosted.model.unload()
        except BaseException as error:
            self._runner.send({"t": "log", "model": name, "text": f"unload: {describe(error)}"})
        finally:
            over.set()

    def _load(self, message: Mapping[str, Any], lane: Lane) -> None:
        name = str(message["model"])
        try:
            answer = self._loaded(message, lane)
        except LoadFailed as failed:
            reason = plain_text(failed.reason)
            answer = {"t": "load_failed", "model": name, "reason": reason, "final": failed.is_final}
        except BaseException as error:
            # A class may answer for itself in code of its own (a property, a metaclass).
            reason = f"{name}: its load failed: {describe(error)}"
            answer = {"t": "load_failed", "model": name, "reason": reason, "final": False}
        if answer["t"] == "load_failed":
            # Only after the except block: its traceback holds the frame that holds the model.
            gc.collect()
            self._device.empty_cache()
        self._runner.send(answer)

    def _loaded(self, message: Mapping[str, Any], lane: Lane) -> dict[str, Any]:
        name, room = str(message["model"]), int(message["room"])
        cls, version = find_class(str(message["entrypoint"]), self._directories)
        descriptor = publish(cls, version=message["version"] or version)
        declared = cls.declared_bytes()
        if declared is not None and declared > room:
            raise _does_not_fit(name, declared, room, "is declared to take")
        lanes = min(cls.lanes, int(message["concurrency"] or cls.lanes))
        contexts = [LaneContext(self._device, model=name) for _ in range(lanes)]
        before = self._device.allocated()
        refused = self._device.ooms()
        hosted: Hosted | None = None
        failure: LoadFailed | None = None
        try:
            with self._device.tracking(lane=lane.number):
                hosted = Hosted(name, cls(), contexts)
                hosted.model.load(contexts[0])
                self._device.adopt(hosted.model)
                self._device.synchronize()
        except BaseException as error:
            oom = classify(error, device_oom=self._device.ooms() != refused) is Verdict.OOM
            why = f"its load does not fit into {format_size(room)}" if oom else "its load failed"
            failure = LoadFailed(f"{name}: {why}: {describe(error)}", is_final=oom)
        if failure is not None or hosted is None:
            # Only now is the except block over, and with it the traceback that held the weights.
            raise failure or LoadFailed(f"{name}: no instance", is_final=True)
        weights = max(0, self._device.allocated() - before)
        line, note = self._measure(hosted, room=room - weights, known=message.get("known"), lane=lane.number)
        # Measuring has filled the cache with blocks that no one may need again; and what the model keeps
        # since its first run (state, compiled graphs) is as much its own as its weights.
        gc.collect()
        self._device.empty_cache()
        weights = max(weights, self._device.allocated() - before - hosted.buffer_bytes)
        resident = weights + hosted.buffer_bytes
        if line.at(1.0) + resident > room:
            raise _does_not_fit(name, line.at(1.0) + resident, room, "takes, with its smallest input,")
        self._hosted[name] = hosted
        self._lanes[name].grow_to(lanes)
        return {
            "t": "loaded",
            "model": name,
            "descriptor": descriptor | {"lanes": lanes},
            "weights": weights,
            "buffers": hosted.buffer_bytes,
            "line": [line.c0, line.c1, line.seen_units],
            "note": note,
        }

    def _measure(
        self, hosted: Hosted, *, room: int, known: Sequence[float] | None, lane: int
    ) -> tuple[Line, str | None]:
        """The model's line, and a note where it could not be measured."""
        model, context = hosted.model, hosted.contexts[0]

        def measure(items: list[Any]) -> int:
            number = -1
            before = self._runner.activity.enter(number)
            answer: bytes | None = None
            try:
                answer = self._runner.predict_plain(hosted, context, items)
            finally:
                peak, _ = self._runner.activity.leave(number)
            if hosted.smallest is None:
                hosted.smallest, hosted.reference = items[0], answer
            elif hosted.smallest is items[0] and hosted.reference != answer:
                # It answers its own sample anew each time: there is nothing to hold it to.
                hosted.reference = None
            return max(0, peak - before)

        refused = self._device.ooms()
        points: list[Point] = []
        try:
            with self._device.tracking(lane=lane), torch.no_grad():
                if known is not None:
                    self._warm_up(model, measure)
                    return Line(int(known[0]), float(known[1]), float(known[2])), None
                climb(model, measure, points, room=room)
                line = self._line(model, points)
                return prove(model, measure, line, points, room=room), None
        except BaseException as error:
            is_oom = classify(error, device_oom=self._device.ooms() != refused) is Verdict.OOM
            text = describe(error)
        if is_oom and not points:
            raise LoadFailed(f"{hosted.name}: its smallest input does not fit: {text}", is_final=True)
        gc.collect()
        self._device.empty_cache()
        if points:
            return self._line(model, points), f"its larger samples could not be measured: {text}"
        declared = type(model).declared_bytes()
        assumed = declared if declared is not None else max(0, room)
        return Line(min(assumed, max(0, room)), 0.0, 0.0), f"its sample could not be measured: {text}"

    def _line(self, model: Model, points: Sequence[Point]) -> Line:
        return envelope(points, grows=bool(compile_units(model.units).fields))

    def _warm_up(self, model: Model, measure: Measure) -> None:
        item = model.sample(1.0)
        item = model.parse(item) if isinstance(item, dict) else item
        measure([item])
        measure([item])


def _does_not_fit(name: str, needed: int, room: int, how: str) -> LoadFailed:
    reason = f"{name} {how} {format_size(needed)}, and {format_size(max(0, room))} is left on this card"
    return LoadFailed(reason, is_final=True)
