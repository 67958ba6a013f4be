"""The wheel holds what it promises, and serves a model from a directory whose modules are named like ours."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.parser import Parser
from pathlib import Path

import httpx
import pytest

from tests.deploy.nginx import REPOSITORY, free_port
from tests.deploy.wheel import Installed, build_wheel, clean_environment, install

# The first of these tests to come installs torch.
pytestmark = pytest.mark.timeout(1200)

SERVE_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0

# A stranger's project: its own `scheduler`, `gateway` and `lua`, all of which its model imports.
PROJECT = {
    "scheduler.py": 'NAME = "their own scheduler"\n',
    "gateway/__init__.py": 'NAME = "their own gateway"\n',
    "lua/__init__.py": 'NAME = "their own lua"\n',
    "served.py": """
import gateway
import lua
import scheduler
import torch

import vramgate


class Names(vramgate.Model):
    vram = "8MiB"

    def load(self, ctx):
        self.one = torch.ones(1, device=ctx.device)

    def predict(self, batch, ctx):
        names = [scheduler.NAME, gateway.NAME, lua.NAME]
        return [{"names": names, "sum": float((self.one + item["x"]).sum())} for item in batch]

    def sample(self, units):
        return {"x": 1.0}
""",
    "vramgate.toml": '[models.names]\nentrypoint = "served:Names"\n',
}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def everything(wheel: Path, request: pytest.FixtureRequest) -> Installed:
    """The wheel with all that one box needs."""
    assert request.config.cache is not None
    cache = request.config.cache.mkdir("wheel")
    return install(wheel, ("gateway", "agent", "embedded"), cache)


def project(directory: Path) -> Path:
    for name, text in PROJECT.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def test_the_wheel_holds_the_packages_and_the_scripts(wheel: Path) -> None:
    """Every module and every Lua file of the checkout is in the wheel, and nothing else is."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(REPOSITORY).as_posix()
        for folder in ("gateway", "gpu_agent", "lua", "scheduler", "vramgate")
        for path in (REPOSITORY / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == expected
    assert any(name.endswith(".lua") for name in packed)


def test_the_wheel_declares_its_license_its_command_and_its_extras(wheel: Path) -> None:
    """The metadata names Apache-2.0 and its text, the command, the extras; torch is the agent's alone."""
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        commands = archive.read(f"{folder}/entry_points.txt").decode()
        license_text = archive.read(f"{folder}/licenses/LICENSE").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in license_text
    assert "vramgate = vramgate.cli.main:main" in commands
    assert set(metadata.get_all("Provides-Extra", [])) == {"gateway", "agent", "embedded", "dev"}
    torch = [line for line in metadata.get_all("Requires-Dist", []) if line.startswith("torch")]
    assert [line.split("; ")[-1] for line in torch] == ["extra == 'agent'"]


def test_an_installed_wheel_uses_nothing_of_this_checkout(everything: Installed, tmp_path: Path) -> None:
    """In the environment that the next test serves from, our packages are those of the wheel."""
    names = "gateway, gpu_agent, scheduler, vramgate"
    where = f"import {names}; print(*[module.__file__ for module in ({names})])"
    done = subprocess.run(
        [everything.python, "-P", "-c", where],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert all(path.startswith(str(everything.root)) for path in done.stdout.split())


async def test_a_directory_with_names_like_ours_is_served(everything: Installed, tmp_path: Path) -> None:
    """`vramgate up` where scheduler.py, gateway/ and lua/ are the user's: services run on our modules, the
    model on theirs, and everything ends with the command."""
    async with serve(everything, project(tmp_path / "theirs")) as url:
        async with httpx.AsyncClient(base_url=url, timeout=SERVE_TIMEOUT_S) as http:
            response = await http.post("/v1/models/names/infer", json={"inputs": {"x": 2.0}})
    assert response.status_code == 200, response.text
    assert response.json()["outputs"] == {
        "names": ["their own scheduler", "their own gateway", "their own lua"],
        "sum": 3.0,
    }


@asynccontextmanager
async def serve(installed: Installed, directory: Path) -> AsyncIterator[str]:
    """Run `vramgate up` in a directory until its model is ready; ends it as Ctrl-C does."""
    port = free_port()
    log = directory.parent / "up.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            installed.command,
            *("up", "--simulate", "1x512MiB", "--port", str(port)),
            cwd=directory,
            env=clean_environment(),
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        await _wait_until_ready(process, url, log)
        yield url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            raise AssertionError(f"vramgate up did not end: {log.read_text()}") from None
    assert process.returncode == 0, log.read_text()


async def _wait_until_ready(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    try:
        async with asyncio.timeout(SERVE_TIMEOUT_S), httpx.AsyncClient(base_url=url) as http:
            while not await _is_served(http):
                assert process.returncode is None, f"vramgate up ended: {log.read_text()}"
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"the model was never ready: {log.read_text()}") from None


async def _is_served(http: httpx.AsyncClient) -> bool:
    try:
        listed = await http.get("/v1/models")
    except httpx.TransportError:
        return False
    return listed.status_code == 200 and [model["ready"] for model in listed.json()["data"]] == [True]
