"""What the pages show was printed: one `up` serves their files, and their commands run against it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scheduler.embedded import free_port
from tests.docs import pages
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
SHOWN = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("http.md", "models.md", "cli.md"))]
WITH_SESSIONS = [page for page in SHOWN if pages.session(page)]
ADDRESS = "localhost:8000"
MARK = "--- a command of the page has ended ---"


@dataclass(frozen=True, slots=True)
class Box:
    """A directory with the files of all pages, and an `up` that serves them."""

    folder: Path
    port: int

    def run(self, steps: list[pages.Step]) -> list[str]:
        """What each command printed; they share one shell, so that a variable of one is there in the next."""
        script = "".join(
            f"{step.command.replace(ADDRESS, f'localhost:{self.port}')}\n__ended=$?; "
            f"printf '\\n%s\\n' '{MARK}'; (exit $__ended)\n"
            for step in steps
        )
        with subprocess.Popen(
            ["bash", "-c", f"exec 2>&1\n{script}"],
            cwd=self.folder,
            env=_environment(),
            text=True,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as shell:
            try:
                said, _ = shell.communicate(timeout=90)
            finally:
                _kill(shell)
        printed = said.replace("\r", "").replace(f"localhost:{self.port}", ADDRESS)
        printed = printed.replace(f"127.0.0.1:{self.port}", "127.0.0.1:8000")
        return printed.split(f"\n{MARK}\n")[:-1]


def _environment() -> dict[str, str]:
    """The commands of this environment first, as after `. .venv/bin/activate`; no terminal, no proxy, no
    settings of the caller's own.
    """
    foreign = re.compile(r".*_PROXY|VRAMGATE_.*", re.IGNORECASE)
    kept = {name: value for name, value in os.environ.items() if foreign.fullmatch(name) is None}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def _kill(process: subprocess.Popen[Any]) -> None:
    """A process that did not end in time, with all of its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder, port = tmp_path_factory.mktemp("box"), free_port()
    shown: dict[str, str] = {}
    for page in SHOWN:
        for name, text in pages.files(page).items():
            shown[name] = shown.get(name, "") + text
    for name, text in shown.items():
        (folder / name).write_text(text.replace(ADDRESS, f"localhost:{port}"))
    (folder / "examples").symlink_to(ROOT / "examples")
    log = folder / "up.log"
    with log.open("wb") as said:
        up = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "vramgate.cli.main"),
                "up",
                "--simulate",
                "1x2GiB",
                "--port",
                str(port),
            ],
            cwd=folder,
            stdout=said,
            stderr=said,
            env=_environment(),
            start_new_session=True,
        )
    try:
        wait_for(
            "every model of the pages is ready",
            lambda: "ready  models: " in log.read_text() or up.poll() is not None,
            patience_s=90,
        )
        assert up.poll() is None and "not ready" not in log.read_text().splitlines()[-1], log.read_text()
        yield Box(folder, port)
    finally:
        try:
            if up.poll() is None:
                up.send_signal(signal.SIGINT)
                up.wait(60)
        finally:
            _kill(up)


@pytest.mark.parametrize("page", WITH_SESSIONS, ids=lambda page: page.name)
def test_a_page_shows_what_its_commands_print(box: Box, page: Path) -> None:
    """Each command of the page, in its order, prints what stands below it."""
    steps = pages.session(page)
    printed = box.run(steps)
    for step, text in zip(steps, printed, strict=True):
        assert step.is_what_was_printed(text), f"{page.name}:{step.line}: {step.command}\nprinted:\n{text}"


def test_no_model_of_the_pages_warns_at_its_load(box: Box) -> None:
    """What a newcomer copies loads without a warning."""
    log = (box.folder / ".vramgate/logs/agents.log").read_text()
    loads = [line for line in log.splitlines() if " model_loaded " in line]
    assert loads and not [line for line in loads if " warning " in line]
