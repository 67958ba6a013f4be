"""The order of loads, with a child that the test plays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, cast

from gpu_agent.child_process import ChildProcess
from gpu_agent.hosting import CardModels
from gpu_agent.intake import Intake
from gpu_agent.loading import Loader
from scheduler.settings import load_settings


class ObedientChild:
    """Fails every load that it is told to begin, and lives on."""

    is_alive = True

    def __init__(self) -> None:
        self.told: list[str] = []
        self.loader: Loader | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.loader is not None
        self.told.append(str(message["model"]))
        self.loader.on_message({"t": "load_failed", "model": message["model"], "reason": "r", "final": False})

    async def ended(self) -> int:
        await asyncio.Event().wait()
        return 0


class IdleIntake:
    is_idle = True

    def close(self) -> None:
        return None


async def test_what_has_failed_is_loaded_after_all_that_has_not() -> None:
    """A try that has become due while the child started waits until the other models are loaded."""
    names = ("first", "second", "third")
    settings = load_settings(models={name: {"entrypoint": "m:M"} for name in names})
    models = CardModels(settings, uuid="SIM-test-0", name="box:0")
    child = ObedientChild()
    loader = child.loader = Loader(models, cast(Intake, IdleIntake()), timeout_s=60.0)
    models["first"].load_failed("it ended the child before", is_final=False)
    models["first"].retry_at = time.monotonic()

    async def room() -> int:
        return 2**30

    stopping = asyncio.Event()
    await loader.load_all(cast(ChildProcess, child), room=room, stopping=stopping)
    assert child.told == ["second", "third"]
    await loader.load_due(cast(ChildProcess, child), room=room, stopping=stopping)
    assert child.told == ["second", "third", "first"]
