"""The wheel, built and installed as a stranger does: into an environment without this checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.nginx import REPOSITORY

BUILD_TIMEOUT_S = 120.0
INSTALL_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Installed:
    """A virtual environment with the wheel in it."""

    root: Path

    @property
    def python(self) -> str:
        return str(self.root / "bin" / "python")

    @property
    def command(self) -> str:
        return str(self.root / "bin" / "vramgate")


def build_wheel(directory: Path) -> Path:
    """Build the wheel of this checkout into a directory."""
    _run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), "."],
        BUILD_TIMEOUT_S,
    )
    (wheel,) = directory.glob("vramgate-*.whl")
    return wheel


def install(wheel: Path, extras: Sequence[str], cache: Path) -> Installed:
    """Install the wheel and the pinned dependencies that it declares into an environment of its own.

    The dependencies (torch is large) are kept in `cache` while pyproject.toml and the pins stay the same;
    the wheel itself is installed each time.
    """
    pins = REPOSITORY / "constraints.txt"
    known = hashlib.sha256(pins.read_bytes() + (REPOSITORY / "pyproject.toml").read_bytes()).hexdigest()[:16]
    kind = "-".join(extras) or "base"
    installed = Installed(cache / f"{kind}-{known}")
    done = installed.root / "dependencies-installed"
    pip = [installed.python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if not done.exists():
        for outdated in cache.glob(f"{kind}-*"):
            shutil.rmtree(outdated)
        _run([sys.executable, "-m", "venv", "--clear", str(installed.root)], BUILD_TIMEOUT_S)
        _run([*pip, "-c", str(pins), f"{wheel}[{','.join(extras)}]"], INSTALL_TIMEOUT_S)
        done.touch()
    else:
        _run([*pip, "--force-reinstall", "--no-deps", str(wheel)], INSTALL_TIMEOUT_S)
    return installed


def clean_environment() -> dict[str, str]:
    """The environment without what would lead a child back to this checkout or to another ledger."""
    leading = ("PYTHON", "VIRTUAL_ENV", "VRAMGATE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(leading)}


def _run(command: Sequence[str], timeout_s: float) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=REPOSITORY,
        env=clean_environment(),
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
