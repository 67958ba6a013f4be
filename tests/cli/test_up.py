"""`vramgate up` and `vramgate demo` as a user runs them: real server, gateways, agents and torch, from the
command line.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from scheduler.embedded import free_port
from tests.waiting import is_running, wait_for
from vramgate.cli.processes import descendants, environment

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-P", "-m", "vramgate.cli.main"]

MODEL = """
import vramgate

class Double(vramgate.Model):
    units = "1"
    vram = "8MiB"

    def load(self, ctx):
        import torch
        self.weight = torch.full((1,), 2.0)

    def predict(self, batch, ctx):
        return [float(item["x"] * self.weight[0]) for item in batch]

    def sample(self, units):
        return {"x": 1.0}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's directory, with a model, a configuration, and names that are ours as well."""
    (tmp_path / "double.py").write_text(MODEL)
    (tmp_path / "scheduler.py").write_text("raise RuntimeError('the wrong scheduler')\n")
    (tmp_path / "vramgate.toml").write_text('[models.double]\nentrypoint = "double:Double"\n')
    return tmp_path


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def up(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """A running `up` with one simulated card."""
    command = [*COMMAND, "up", "--port", str(port), "--simulate", "1x512MiB"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def run(*arguments: str, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, text=True, capture_output=True, timeout=timeout_s, check=False
    )


def read_until(process: subprocess.Popen[str], words: str) -> list[str]:
    """Lines of its output up to one that holds `words`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if words in line:
            return lines
    raise AssertionError(f"it ended without saying {words!r}: {lines}")


def test_from_up_to_ctrl_c(folder: Path, up: subprocess.Popen[str]) -> None:
    """A model is served out of a directory that holds its own scheduler.py; every view shows it without an
    option; Ctrl-C drains and leaves no process."""
    lines = read_until(up, "ready  models: double")
    assert lines[0].startswith("ledger   redis://") and any(
        line.startswith("gateway  http://") for line in lines
    )
    assert lines.count("logs     .vramgate/logs") == 1
    assert {file.name for file in (folder / ".vramgate/logs").iterdir()} >= {"agents.log"}
    assert run("infer", "double", '{"x": 21}', cwd=folder).stdout == "42.0\n"
    for view, words in (
        ("cards", r":0 +ready +double"),
        ("models", "double"),
        ("jobs", "succeeded"),
        ("leases", "ID"),
    ):
        shown = run(view, cwd=folder)
        assert shown.returncode == 0 and re.search(words, shown.stdout), shown
    below = list(descendants(up.pid))
    assert any("VRAMGATE_SIM" in environment(pid) for pid in below), "the torch child is below `up`"
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 0
    wait_for("no process is left", lambda: not any(map(is_running, below)), patience_s=5)
    gone = run("cards", "--redis", "redis://127.0.0.1:1", cwd=folder)
    assert gone.returncode == 4
    assert not (folder / ".vramgate" / "up.json").exists()


@pytest.fixture
def without_weights(folder: Path) -> None:
    """Its model fails whenever it is loaded."""
    model = (folder / "double.py").read_text()
    (folder / "double.py").write_text(
        model.replace("import torch", "raise RuntimeError('there are no weights')")
    )


@pytest.mark.usefixtures("without_weights")
def test_a_box_that_can_serve_nothing_says_why(up: subprocess.Popen[str], port: int) -> None:
    """It runs on, since a model may be tried again; the reason is on the card's line, that nothing can be
    served is said once, and nobody is told that the service is ready.
    """
    lines = read_until(up, "given up after 3 tries")
    reasons = [line for line in lines if "double (not ready: double: its load failed" in line]
    assert all("there are no weights (double.py, line 9)" in line for line in reasons)
    assert len(reasons) == len(set(reasons))
    assert sum("nothing can be served" in line for line in lines) == 1
    told = httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False, timeout=10)
    assert told.status_code == 503 and "there are no weights" in told.json()["detail"]
    assert up.poll() is None
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 0


def test_kill_of_up_leaves_nobody(folder: Path, up: subprocess.Popen[str]) -> None:
    """kill -9 of `up`: its server, gateways, agents and torch children end by themselves."""
    read_until(up, "ready  models: double")
    below = list(descendants(up.pid))
    assert len(below) >= 5
    up.send_signal(signal.SIGKILL)
    up.wait()
    wait_for("no process of the killed `up` is left", lambda: not any(map(is_running, below)))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--simulate", "2yGiB"], 2, "write how many"),
        ([], 1, "--simulate"),
        (["--redis", "redis://127.0.0.1:1", "--simulate", "1x512MiB"], 4, "127.0.0.1:1"),
        (["--config", "nowhere.toml"], 2, "nowhere.toml does not exist"),
        (["--gateways", "0"], 2, "--gateways"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    folder: Path, arguments: list[str], code: int, words: str
) -> None:
    """The exit code of the contract, one line that names the thing and the remedy, no stack trace."""
    ended = run("up", "--port", str(free_port()), *arguments, cwd=folder)
    assert ended.returncode == code, ended
    assert words in ended.stderr and ended.stderr.count("\n") == 1 and "Traceback" not in ended.stderr


@pytest.mark.parametrize("where", ["--host", "configuration"])
def test_an_open_door_is_refused_before_anything_starts(folder: Path, where: str) -> None:
    """An address that other hosts can reach is usage without --insecure; no ledger was started for it."""
    arguments = ["--simulate", "1x512MiB", "--port", str(free_port())]
    if where == "--host":
        arguments += ["--host", "0.0.0.0"]
    else:
        with (folder / "vramgate.toml").open("a") as file:
            file.write('[gateway]\nhost = "0.0.0.0"\n')
    ended = run("up", *arguments, cwd=folder)
    assert (ended.returncode, ended.stdout) == (2, "") and ended.stderr.count("\n") == 1
    assert "0.0.0.0 can be reached from other hosts" in ended.stderr and "--insecure" in ended.stderr
    assert not (folder / ".vramgate").exists()


def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    """A small demo: both models through two gateways, a child killed in the middle, exit code 0 and the
    table.
    """
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ended = run("demo", "--requests", "40", "--clients", "16", "--seed", "1", cwd=tmp_path, timeout_s=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "BROKEN" not in ended.stdout and "40 of 40" in ended.stdout
    for row in (
        "answers by status",
        "runs started again after a crash",
        "jobs settled twice",
        "PEAK LEASED",
        "RUN P50",
    ):
        assert row in ended.stdout
