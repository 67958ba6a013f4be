"""The threads in which a model's code runs, and the queue before them.

One queue per model, so that any free lane takes the next batch. Owns the threads; what a step does is its
own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from gpu_agent.child.loader import describe
from gpu_agent.child.runner import Poisoned


@dataclass(frozen=True, slots=True)
class Lane:
    """number counts over the whole process (a stream each), index over the lanes of one model."""

    number: int
    index: int


Step = Callable[[Lane], None]


class Lanes:
    """All lanes of one model."""

    def __init__(self, name: str, next_number: Callable[[], int], *, broken: Callable[[str], None]) -> None:
        self._name = name
        self._next_number = next_number
        self._broken = broken
        self._count = 0
        self._steps: queue.SimpleQueue[Step] = queue.SimpleQueue()

    def put(self, step: Step) -> None:
        """Run a step in the first lane that is free."""
        self._steps.put(step)

    def grow_to(self, count: int) -> None:
        """Have at least so many lanes."""
        while self._count < count:
            lane = Lane(self._next_number(), self._count)
            name = f"{self._name}-{lane.index}"
            threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True).start()
            self._count += 1

    def _serve(self, lane: Lane) -> None:
        while True:
            step = self._steps.get()
            try:
                step(lane)
            except Poisoned as error:
                self._broken(str(error))
            except BaseException as error:
                # Not the model's: its errors are caught where it is called. A lane that is gone would
                # never answer.
                self._broken(f"a lane failed: {describe(error)}")
