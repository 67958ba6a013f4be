"""One box by one command, as a stranger uses it: up, look at it, Ctrl-C, kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.system.box import MODELS_FILE, stable_port
from tests.waiting import PATIENCE_S, is_running, wait_for
from vramgate.cli.processes import descendants

VRAMGATE = [sys.executable, "-P", "-m", "vramgate.cli.main"]
CONFIGURATION = '[agent]\ncancel_grace_s = 0.5\n[models.one]\nentrypoint = "models.py:One"\nconcurrency = 1\n'
VIEWS = ("cards", "leases", "jobs", "queue", "models")


class Up:
    """`vramgate up` in a directory of its own."""

    def __init__(self, folder: Path, *, port: int) -> None:
        self.folder, self.port = folder, port
        folder.mkdir(exist_ok=True)
        shutil.copy(MODELS_FILE, folder / "models.py")
        (folder / "vramgate.toml").write_text(CONFIGURATION)
        self.log = folder / "up.log"
        command = [*VRAMGATE, "up", "--simulate", "1x512MiB", "--gateways", "2", "--port", str(port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
        self.below: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> None:
        """Wait until it says that the model is ready; remember every process that it has."""

        def check() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return "ready  models: one" in self.log.read_text()

        wait_for("up says that its model is ready", check)
        self.below = list(descendants(self.process.pid))

    def ask(self, *arguments: str) -> str:
        """What a command says in this directory."""
        done = subprocess.run(
            [*VRAMGATE, *arguments],
            cwd=self.folder,
            text=True,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done
        return done.stdout

    def nobody_is_left(self) -> None:
        wait_for("no process of `up` is left", lambda: not any(map(is_running, self.below)), patience_s=30)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    started = Up(tmp_path / "first", port=stable_port(in_a_row=2))
    yield started
    started.close()


# Some twenty commands, each of which starts an interpreter, and torch three times.
@pytest.mark.timeout(240)
def test_the_life_of_a_box(up: Up, tmp_path: Path) -> None:
    """Everything comes up; every view answers as a table and as JSON; a second `up` on the port says so in
    one line; Ctrl-C drains what runs, leaves no process, and what waited is answered after the next `up`.
    """
    up.ready()
    with httpx.Client(base_url=up.url, timeout=30, trust_env=False) as http:
        assert http.post("/v1/models/one/infer", json={"inputs": {"tag": "a"}}).status_code == 200
        ids = [_submit(http, seconds=seconds) for seconds in (60.0, 0.1, 0.1)]
        with ThreadPoolExecutor(2) as ask:
            tables = list(ask.map(up.ask, VIEWS))
            documents = [json.loads(text) for text in ask.map(lambda view: up.ask(view, "--json"), VIEWS)]
        for view, table, document in zip(VIEWS, tables, documents, strict=True):
            assert document["object"] == "list" and "next" in document, view
            assert document["data"], f"{view} shows nothing"
            assert len(table.strip().splitlines()) >= 2, f"{view}: {table}"
        assert [job["id"] for job in json.loads(up.ask("jobs", "--json"))["data"]][:3] == ids[::-1]
        assert json.loads(up.ask("jobs", ids[2][:12], "--json"))["state"] == "queued"
        assert "cancelled" in up.ask("job", "cancel", ids[2])
        assert json.loads(up.ask("queue", "--json"))["data"][0]["waiting"] == 1

        second = subprocess.run(
            [*VRAMGATE, "up", "--simulate", "1x512MiB", "--port", str(up.port)],
            cwd=_empty(tmp_path / "second"),
            text=True,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert second.returncode == 1
        assert str(up.port) in second.stderr and "--port" in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1 and "Traceback" not in second.stderr

        assert "cancelled" in up.ask("job", "cancel", ids[0])
        assert http.get(f"/v1/jobs/{ids[1]}?wait_s=20").json()["state"] == "succeeded"
        ids += [_submit(http, seconds=3.0), _submit(http, seconds=0.1)]
        wait_for("the fourth runs", lambda: http.get(f"/v1/jobs/{ids[3]}").json()["state"] == "running")

    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(PATIENCE_S) == 0, up.log.read_text()
    up.nobody_is_left()
    again = Up(up.folder, port=up.port)
    try:
        again.ready()
        with httpx.Client(base_url=again.url, timeout=60, trust_env=False) as http:
            jobs = [http.get(f"/v1/jobs/{job}?wait_s=30").json() for job in ids]
        assert [job["state"] for job in jobs] == ["cancelled", "succeeded", "cancelled", *["succeeded"] * 2]
        assert jobs[3]["attempts"] == 1, "what ran when Ctrl-C came was finished, and not run again"
        # kill -9 of `up` itself: nobody is left to end the others, so they end by themselves.
        again.process.kill()
        again.process.wait()
        again.nobody_is_left()
    finally:
        again.close()


def _submit(http: httpx.Client, *, seconds: float) -> str:
    body = {"inputs": {"seconds": seconds}, "options": {"max_wait_s": 90}}
    response = http.post("/v1/models/one/infer", json=body, headers={"Prefer": "respond-async"})
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder
