"""A real server for every test: the embedded Valkey, or the redis-server that VRAMGATE_TEST_SERVER=redis asks
for.

One server per test process, one pool per test; after each test the pool's invariants are checked by
themselves.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from scheduler.embedded import bound_to_owner, find_server, free_port
from scheduler.settings import Settings, load_settings
from scheduler.store import Store
from tests.invariants import check_pool

# A run in the background of a shell inherits an ignored SIGINT, and hands it down to whatever a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


class TestServer:
    """A server process that a test may kill, stop, freeze and start again; its data survive in `data_dir`."""

    __test__ = False

    def __init__(self, data_dir: Path, *, arguments: tuple[str, ...] = ()) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        binary = _binary()
        command = [
            *(str(binary), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.data_dir)),
            *(
                "--appendonly",
                "yes",
                "--appendfsync",
                "everysec",
                "--save",
                "",
                "--maxmemory-policy",
                "noeviction",
            ),
            *("--logfile", str(self.data_dir / "server.log"), "--daemonize", "no", *self.arguments),
        ]
        self.process = subprocess.Popen(
            bound_to_owner(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        client = redis.Redis(port=self.port, socket_timeout=1)
        deadline = time.monotonic() + 20
        while True:
            try:
                client.ping()
                break
            except redis.RedisError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    log = (self.data_dir / "server.log").read_text()[-500:]
                    raise RuntimeError(f"the test server {binary} did not start: {log}") from None
                time.sleep(0.02)
        client.close()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def _binary() -> Path:
    kind = os.environ.get("VRAMGATE_TEST_SERVER", "valkey")
    if kind == "valkey":
        return find_server()
    found = shutil.which("redis-server")
    if found is None:
        raise RuntimeError("VRAMGATE_TEST_SERVER=redis, but there is no redis-server on PATH")
    return Path(found)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    """The server that the tests of this process share. Tests that hurt a server take `own_server`."""
    started = TestServer(tmp_path_factory.mktemp("server"))
    started.start()
    yield started
    started.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[TestServer]:
    """A server for this test alone, to be killed, frozen or filled."""
    started = TestServer(tmp_path)
    started.start()
    yield started
    started.kill()


@pytest.fixture
def pool() -> str:
    return "t" + secrets.token_hex(6)


@pytest.fixture
def settings(server: TestServer, pool: str) -> Settings:
    """Shortened clocks, so that promises show within seconds."""
    return load_settings(
        None,
        redis_url=server.url,
        pool=pool,
        clocks={"session_s": 2.0, "beat_s": 0.5, "abandon_grace_s": 2.0},
    )


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    """A store on a fresh pool; the ledger's invariants are checked afterwards."""
    opened = await Store.connect(settings)
    try:
        yield opened
        await check_pool(opened)
    finally:
        await asyncio.shield(opened.close())
