"""The scripts as files and as the server runs them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from scheduler import scripts
from scheduler.embedded import free_port
from scheduler.settings import load_settings
from scheduler.store import Store, script_settings
from tests.conftest import TestServer
from tests.ledger.everything import do_everything


@pytest.mark.parametrize("name", scripts.names())
def test_each_header_is_a_contract(name: str) -> None:
    """Purpose, guarantee, fence, KEYS, ARGV, what it returns and what it costs."""
    header = (scripts.LUA / f"{name}.lua").read_text().split("-- include:")[0]
    assert header.startswith(f"-- {name}: ")
    for part in ("Guarantee:", "Fence:", "KEYS: meta", "ARGV: arguments", "Returns:", "Cost:"):
        assert part in header, f"lua/{name}.lua does not say {part}"
    assert all(line.startswith("-- ") for line in header.splitlines())


def test_text_is_constant_and_uses_no_unbounded_command() -> None:
    """No KEYS, no SCAN and none of its kin, no shebang in what is loaded; one text per operation."""
    for name in scripts.names():
        text = scripts.load(name).text
        assert not re.search(r"redis\.call\('(KEYS|SCAN|HSCAN|SSCAN|ZSCAN|FLUSH\w*|RANDOMKEY)'", text)
        assert not text.startswith("#!")
        assert scripts.load(name) is scripts.load(name)


def test_only_lease_lua_moves_bytes() -> None:
    """No other file writes a card's sums or the leases of a card."""
    for path in scripts.LUA.rglob("*.lua"):
        if path.name == "lease.lua":
            continue
        text = path.read_text()
        assert not re.search(r"\.(jb|nj)\s*[,=][^=]", text.replace("k.jb)", "")), path
        assert not re.search(r"'H(SET|DEL|INCRBY)', key\('leases'", text), path


def test_every_state_is_written_in_one_place() -> None:
    """`set_state` alone writes the state of a job."""
    for path in scripts.LUA.rglob("*.lua"):
        text = path.read_text()
        writes = re.findall(r"^ *(?:[^=\n(]*, )?\w+\[S\](?:, [^=\n(]*)? = ", text, re.MULTILINE)
        assert len(writes) == (1 if path.name == "job.lua" else 0), path


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TestServer]:
    """A cluster of one node that owns every slot."""
    bus = ("--cluster-port", str(free_port()))
    server = TestServer(tmp_path, arguments=("--cluster-enabled", "yes", *bus))
    server.start()
    client: Any = redis.Redis(port=server.port)
    client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    deadline = time.monotonic() + 20
    while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
        assert time.monotonic() < deadline, "the cluster did not come up"
        time.sleep(0.02)
    client.close()
    yield server
    server.kill()


async def test_no_script_leaves_its_slot(
    cluster: TestServer, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every script runs with `#!lua` prepended on a cluster, where a key of a foreign slot is an error."""
    plain = scripts.load
    ran: set[str] = set()

    def strict(name: str) -> scripts.Script:
        import hashlib

        script = plain(name)
        text = "#!lua\n" + script.text
        ran.add(name)
        return scripts.Script(name, text, hashlib.sha1(text.encode()).hexdigest(), script.needs_lease_ids)

    monkeypatch.setattr(scripts, "load", strict)
    store = await Store.connect(load_settings(None, redis_url=cluster.url, pool=pool))
    ran.clear()
    await do_everything(store)
    ran.add("recover")
    assert ran == set(scripts.names())
    foreign = "#!lua\nreturn redis.call('GET', 'elsewhere')"
    with pytest.raises(redis.ResponseError, match="slot"):
        await store.redis.eval(foreign, 1, store.keys.meta)
    await store.close()


def test_the_server_in_use_is_the_one_asked_for(server: TestServer) -> None:
    """VRAMGATE_TEST_SERVER chooses between Valkey and Redis, so that both are really tested."""
    import os

    client = redis.Redis(port=server.port, decode_responses=True)
    info = client.info("server")
    client.close()
    is_valkey = os.environ.get("VRAMGATE_TEST_SERVER", "valkey") == "valkey"
    assert ("valkey_version" in info) == is_valkey


def test_settings_have_the_same_order_in_python_and_lua() -> None:
    """They travel as numbers without names: base.lua names them as store.py sends them."""
    base = (scripts.LUA / "_lib" / "base.lua").read_text()
    named = re.search(
        r"^local SETTINGS = { struct\.unpack\('<(d+)s', ARGV\[2\]\) }\n"
        r"local (SESSION_MS,[^=]+?), OPERATION = unpack\(SETTINGS\)$",
        base,
        re.MULTILINE,
    )
    assert named is not None
    sent = list(script_settings(load_settings(None)))
    assert [name.lower() for name in re.split(r",\s+", named[2])] == sent
    assert len(named[1]) == len(sent)


def _members(helper: str) -> list[str]:
    text = (scripts.LUA / "_lib" / f"{helper}.lua").read_text()
    return re.findall(rf"^(?:function )?{helper}\.(\w+)", text, re.MULTILINE)


def test_all_operations_are_one_text() -> None:
    """A server holds one copy of each helper, and each operation once."""
    texts = {scripts.load(name).text for name in scripts.names()}
    assert len(texts) == 1
    text = texts.pop()
    for name in scripts.names():
        assert text.count(f"SETTINGS[22] == '{name}'") == 1


def test_each_member_comes_into_being_on_first_use() -> None:
    """Each by the call that uses it, whatever else stands in its file, and under one name."""
    text = scripts.load("claim").text
    for name in ("job", "lease", "place", "settle", "sweep", "agent"):
        defined = _members(name)
        assert defined and len(set(defined)) == len(defined)
        for member in defined:
            assert (
                len(re.findall(rf"if name == '{member}' then\n(?:function )?{name}\.{member}\b", text)) == 1
            )


@pytest.mark.parametrize("name", scripts.names())
def test_what_a_header_names_is_made_at_once(name: str) -> None:
    """With its module, in this operation; a member of a helper that is included, named once."""
    header = (scripts.LUA / f"{name}.lua").read_text().split("\nlocal ")[0]
    listed = header.partition("-- at once: ")[2].replace("\n--", "")
    branch = scripts.load(name).text.partition(f"SETTINGS[22] == '{name}' then")[2].partition("\nend)()\n")[0]
    included = re.search(r"^-- include: (.+)$", header, re.MULTILINE)
    assert included is not None
    modules = dict(re.findall(r"(\w+)\(([a-z_ ]+)\)", listed))
    assert len(modules) == listed.count("(")
    for module, members in modules.items():
        assert module in included[1].split()
        assert len(set(members.split())) == len(members.split())
        for member in members.split():
            assert member in _members(module)
            assert re.search(rf"^{member} = (function ?\(|{{)", branch, re.MULTILINE), f"{module}.{member}"


def test_constants_are_folded() -> None:
    """The text names no constant: its value stands there, or the place of a setting; strings stay."""
    text = scripts.load("finish").text
    for constant in ("MOVE_LIMIT", "FIELDS", "STREAM_ENTRIES", "RESULT_TTL_MS", "LOOK"):
        assert constant not in text
    assert "NOW - k.sm <= 2 * SETTINGS[2]" in text
    assert "redis.call('ZADD', (PREFIX .. 'sessions'), int(NOW + SETTINGS[1]), 'c:' .. k.id)" in text
