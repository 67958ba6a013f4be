"""A real agent process on a simulated card, and a caller that submits to the ledger as a gateway does."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from gpu_agent.device.simulated import SimulatedCard
from scheduler import admission, inventory, jobs
from scheduler.estimates import lease_bytes
from scheduler.fingerprint import canonical
from scheduler.registration import HostedModel
from scheduler.store import Store
from scheduler.submissions import Outcome, SubmitRequest
from scheduler.views import CardView, JobView
from tests.waiting import PATIENCE_S, is_running, until

MODELS_FILE = Path(__file__).parent / "models_plain.py"
CLOCKS = "session_s = 2.0\nbeat_s = 0.4\nabandon_grace_s = 2.0\n"
AGENT = "cancel_grace_s = 0.5\nrelease_timeout_s = 10\ndrain_s = 10\n"


class Agent:
    """`python -m gpu_agent` in a folder of its own, its log read as events."""

    def __init__(
        self,
        folder: Path,
        *,
        redis_url: str,
        pool: str,
        models: Mapping[str, str],
        simulate: str = "1x512MiB",
        agent: str = AGENT,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(MODELS_FILE, folder / "models_plain.py")
        sections = "".join(f"[models.{name}]\n{body}\n" for name, body in models.items())
        (folder / "vramgate.toml").write_text(f"[clocks]\n{CLOCKS}[agent]\n{agent}{sections}")
        self.log = folder / "agent.log"
        command = [
            sys.executable,
            "-P",
            "-m",
            "gpu_agent",
            "--simulate",
            simulate,
            "--log-json",
            "--pool",
            pool,
        ]
        command += ["--config", str(folder / "vramgate.toml"), "--redis", redis_url, *arguments]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stderr=log,
                env={
                    **os.environ,
                    "VRAMGATE_INTERNAL_HOST_DIR": str(folder / "host"),
                    "VRAMGATE_INTERNAL_HOST": "box",
                },
            )

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's events of that name so far."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("{")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    @property
    def child_pid(self) -> int:
        """The newest child."""
        return int(self.events("child_started")[-1]["pid"])

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """However the test ended: nothing may stay behind."""
        if not self.has_ended:
            self.process.send_signal(signal.SIGCONT)
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def check_no_orphans(self) -> None:
        """Once it has ended, and every agent that shares its log: no child may be left."""
        for event in self.events("child_started") + self.events("spare_started"):
            assert not is_running(int(event["pid"])), "an agent left its child behind"

    def open_card(self) -> SimulatedCard:
        """Its simulated card, as a stranger sees it."""
        (path,) = (self.folder / "host").glob("*.card")
        return SimulatedCard(path, index=0)


class Caller:
    """Submits jobs and waits for their ends."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def card(self) -> CardView:
        (view,) = await inventory.cards(self.store)
        return view

    async def ready(self, *models: str) -> CardView:
        """Wait until the card is ready and each of these models on it is, too."""

        async def check() -> CardView | None:
            found = await inventory.cards(self.store)
            names = {model.name for card in found for model in card.models if model.ready}
            is_ready = found and found[0].state == "ready" and names.issuperset(models)
            return found[0] if is_ready else None

        return await until(f"card and {', '.join(models)} are ready", check)

    async def hosted(self, model: str) -> HostedModel:
        return next(m for m in (await self.card()).models if m.name == model)

    async def submit(
        self, model: str, text: str = "", *, mib: float = 1.0, vram: int | None = None, **options: Any
    ) -> str:
        """Returns the job's id."""
        hosted = await self.hosted(model)
        request = SubmitRequest(
            job_id=secrets.token_hex(16),
            model=model,
            inputs=canonical({"text": text, "mib": mib}),
            lease_bytes=lease_bytes(hosted, mib, vram=vram),
            units=mib,
            worker="w",
            **{"is_async": True} | options,
        )
        return (await admission.submit(self.store, request)).job_id

    async def outcome(self, job_id: str) -> Outcome:
        return await until(f"job {job_id} settles", lambda: jobs.outcome(self.store, job_id))

    async def run(self, model: str, text: str = "", **options: Any) -> Outcome:
        return await self.outcome(await self.submit(model, text, **options))

    async def in_state(self, job_id: str, state: str) -> JobView:
        async def check() -> JobView | None:
            view = await jobs.view(self.store, job_id)
            return view if view.state == state else None

        return await until(f"job {job_id} is {state}", check)

    async def logged(self, agent: Agent, name: str, number: int = 1) -> dict[str, Any]:
        """Wait for the number-th event of that name in an agent's log."""

        async def check() -> dict[str, Any] | None:
            found = agent.events(name)
            return found[number - 1] if len(found) >= number else None

        return await until(f"{name} is logged {number} times", check)

    async def no_leases(self) -> None:
        async def check() -> bool:
            return not await inventory.leases(self.store)

        await until("every lease has ended", check)


def outputs(outcome: Outcome) -> Any:
    """The decoded answer of a job that succeeded."""
    assert outcome.state == "succeeded", (outcome.code, outcome.detail)
    assert outcome.result is not None
    return msgpack.unpackb(outcome.result)
