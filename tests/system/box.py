"""One box as a stranger would run it: a real server, gateways of two workers, agents on simulated cards.

Owns: the processes, how each is hurt and healed, and what they say of themselves in their logs. Does not own:
what is asked of them (`caller`), or what must hold afterwards (`conftest`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from scheduler.embedded import bound_to_owner
from scheduler.settings import Settings, load_settings
from tests.conftest import TestServer
from tests.waiting import PATIENCE_S, is_running, wait_for
from vramgate.cli.processes import descendants

ROOT = Path(__file__).parents[2]
MODELS_FILE = Path(__file__).with_name("models.py")
SESSION_S = 2.0
CONFIGURATION = f"""
[clocks]
session_s = {SESSION_S}
beat_s = 0.4
abandon_grace_s = 2.0
max_wait_s = 60
run_timeout_s = 60
total_timeout_s = 100
[agent]
cancel_grace_s = 0.5
release_timeout_s = 20
drain_s = 15
[models.work]
entrypoint = "models.py:Work"
[models.deaf]
entrypoint = "models.py:Deaf"
[models.batch]
entrypoint = "models.py:Work"
cards = ["box:0"]
[models.one]
entrypoint = "models.py:One"
cards = ["box:0"]
concurrency = 1
"""
MODELS = frozenset({"work", "deaf", "batch", "one"})


def stable_port(*, in_a_row: int = 1) -> int:
    """The first of some free ports that no outgoing connection is given: they stay free over a restart."""
    while True:
        first = random.randrange(20_000, 32_000)
        try:
            for port in range(first, first + in_a_row):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


@dataclass(slots=True)
class GatewayProcess:
    """`python -m gateway`, its workers in the same process group."""

    port: int
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        assert self.process is None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                bound_to_owner(self.command), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    def is_serving(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-800:]
        try:
            return httpx.get(f"{self.url}/readyz?scope=gateway", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """kill -9 of all its processes at once, as when its host dies."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        self.process.terminate()
        status = self.process.wait(PATIENCE_S)
        self.process = None
        return status


@dataclass(slots=True)
class Agents:
    """`python -m gpu_agent --all`: one supervisor for each card, each with its torch child."""

    command: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    started: int = 0
    _below: set[int] = field(default_factory=set)

    @property
    def log(self) -> Path:
        return self.folder / f"agents-{self.started}.log"

    def start(self) -> None:
        assert self.process is None
        self.started += 1
        environment = {
            **os.environ,
            "VRAMGATE_INTERNAL_HOST_DIR": str(self.folder / "host"),
            "VRAMGATE_INTERNAL_HOST": "box",
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                bound_to_owner(self.command), cwd=ROOT, stdout=log, stderr=log, env=environment
            )

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """The log's events of that name and with those fields so far."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("{")]
        found = [event for event in map(json.loads, lines) if event["event"] == name]
        return [event for event in found if all(event.get(key) == value for key, value in fields.items())]

    def child(self, card: str) -> int:
        """The newest torch child of a card."""
        return int(self.events("child_started", card=card)[-1]["pid"])

    def supervisor(self, card: str) -> int:
        """The process that holds a card."""
        assert self.process is not None
        for pid in descendants(self.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"gpu_agent" in words and card.encode() in words:
                return pid
        raise AssertionError(f"no supervisor of {card} runs")

    def pids(self) -> set[int]:
        return set() if self.process is None else {self.process.pid, *descendants(self.process.pid)}

    def stop(self) -> int:
        """SIGTERM, and the exit status; nothing of it may stay."""
        assert self.process is not None
        below = self.pids()
        self.process.terminate()
        status = self.process.wait(PATIENCE_S)
        self.process = None
        wait_for("the agents left no process behind", lambda: not any(map(is_running, below)), patience_s=10)
        return status


def event_ms(event: dict[str, Any]) -> float:
    """When an event was logged, in ms of the host's clock, which is that of its Redis."""
    return datetime.fromisoformat(str(event["time"])).timestamp() * 1000


class Box:
    """Server, two gateways of two workers, two cards."""

    def __init__(self, folder: Path, server: TestServer, pool: str, *, simulate: str = "2x512MiB") -> None:
        self.folder, self.server, self.pool = folder, server, pool
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(MODELS_FILE, folder / "models.py")
        self.configuration = folder / "vramgate.toml"
        self.configuration.write_text(CONFIGURATION)
        self.gateways = [self.new_gateway(), self.new_gateway()]
        agents = self._service("gpu_agent", "--all", "--simulate", simulate, "--log-json")
        self.agents = Agents(agents, folder)

    @property
    def settings(self) -> Settings:
        return load_settings(self.configuration, redis_url=self.server.url, pool=self.pool)

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    def _service(self, package: str, *arguments: str) -> list[str]:
        where = ("--redis", self.server.url, "--pool", self.pool, "--config", str(self.configuration))
        return [sys.executable, "-P", "-m", package, *where, *arguments]

    def new_gateway(self, *, configuration: Path | None = None, workers: int = 2) -> GatewayProcess:
        """One that has not been started; a configuration of its own replaces the box's."""
        port = stable_port()
        command = self._service("gateway", "--port", str(port), "--workers", str(workers))
        command += ["--drain", "0.3s", "--grace", "5s", "--log-json"]
        if configuration is not None:
            command += ["--config", str(configuration)]
        return GatewayProcess(port, command, self.folder / f"gateway-{port}.log")

    def heal(self) -> None:
        """Start what does not run, and wait until the gateways serve. From the main thread: what a thread
        starts ends with it.
        """
        if self.server.process is None:
            self.server.start()
        for gateway in self.gateways:
            if gateway.process is None:
                gateway.start()
        if self.agents.process is None:
            self.agents.start()
        for gateway in self.gateways:
            wait_for(f"{gateway.url} serves", gateway.is_serving)

    def close(self) -> None:
        """However the tests ended, nothing stays behind."""
        try:
            for gateway in self.gateways:
                if gateway.process is not None:
                    assert gateway.stop() == 0
            if self.agents.process is not None:
                assert self.agents.stop() == 0
        finally:
            for gateway in self.gateways:
                gateway.kill()
            if self.agents.process is not None:
                self.agents.process.kill()
                self.agents.process.wait()

    def runs(self, tag: str) -> int:
        """How often a job with this tag was begun by a model."""
        path = self.folder / "runs.log"
        return sum(line.split()[0] == tag for line in path.read_text().splitlines()) if path.exists() else 0
