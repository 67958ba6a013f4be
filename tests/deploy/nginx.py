"""Debian's nginx, run with deploy/nginx.conf on addresses of a test: the process and the rendered file."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGURATION = REPOSITORY / "deploy" / "nginx.conf"
GATEWAYS = ("10.213.77.11:8000", "10.213.77.12:8000")
START_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running nginx: its address, and the file that holds its access log and its errors."""

    url: str
    port: int
    log: Path


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def render(text: str, replacements: Mapping[str, str]) -> str:
    """Replace each key by its value. ValueError for a key that the text lacks: the two drifted apart."""
    for old, new in replacements.items():
        if old not in text:
            raise ValueError(f"the configuration holds no {old!r} to replace by {new!r}")
        text = text.replace(old, new)
    return text


def find_nginx() -> str:
    """The nginx binary; Debian keeps it out of a user's PATH."""
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        raise FileNotFoundError("nginx is missing; install it with deploy/apt-install nginx")
    return found


@asynccontextmanager
async def run_nginx(
    directory: Path, backends: tuple[int, int], *, changes: Mapping[str, str] | None = None
) -> AsyncIterator[Proxy]:
    """Run deploy/nginx.conf before two ports of this host; `changes` are further replacements in its text."""
    port = free_port()
    addresses = {name: f"127.0.0.1:{backend}" for name, backend in zip(GATEWAYS, backends, strict=True)}
    own = {"listen 8080": f"listen 127.0.0.1:{port}", "/tmp/nginx": f"{directory}/nginx"}
    rendered = directory / "nginx.conf"
    rendered.write_text(render(CONFIGURATION.read_text(), {**addresses, **own, **(changes or {})}))
    # As root, nginx would drop to a user that cannot reach a test's directory.
    extra = "daemon off; user root;" if os.geteuid() == 0 else "daemon off;"
    log = directory / "nginx.log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            find_nginx(), "-p", str(directory), "-c", str(rendered), "-g", extra, stdout=output, stderr=output
        )
    try:
        await _wait_until_listening(process, port, log)
        yield Proxy(url=f"http://127.0.0.1:{port}", port=port, log=log)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), START_TIMEOUT_S)


async def _wait_until_listening(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"nginx ended with {process.returncode}: {log.read_text()}")
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            return
