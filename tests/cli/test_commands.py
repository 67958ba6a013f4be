"""The commands that speak to the ledger: tables, the objects of HTTP, ids and prefixes, and honest exit
codes.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scheduler import admission, documents, inventory
from scheduler.settings import Settings
from scheduler.store import Store
from scheduler.views import with_reason
from tests.ledger.fake_agent import GIB, FakeAgent, failed, ok, request
from vramgate import errors
from vramgate.cli import tables, upfile
from vramgate.cli.exits import DONE, FAILED, INTERRUPTED, MISSING, UNREACHABLE, USAGE
from vramgate.cli.main import main
from vramgate.pids import start_of


class Shell:
    """Runs commands against the test's ledger, in a thread of their own as each has its own event loop."""

    def __init__(self, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
        self._capsys = capsys
        self._options = options

    async def run(self, *arguments: str, bare: bool = False) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = await asyncio.to_thread(main, [*arguments, *([] if bare else self._options)])
        out, err = self._capsys.readouterr()
        return code, out, err

    async def json(self, *arguments: str) -> Any:
        code, out, err = await self.run(*arguments, "--json")
        assert code == DONE, err
        return json.loads(out)


@pytest.fixture
def shell(
    settings: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys, ["--redis", settings.redis_url, "--pool", settings.pool])


@pytest.fixture
async def agent(store: Store) -> FakeAgent:
    """A card of 10 GiB with the model `echo`."""
    agent = FakeAgent(store, "GPU-abc123")
    await agent.register()
    return agent


async def test_cards_show_what_http_shows(store: Store, shell: Shell, agent: FakeAgent) -> None:
    """`--json` is the list object; one card by id, unique prefix or name is the object itself."""
    await admission.submit(store, request(nbytes=GIB))
    listed = await shell.json("cards")
    assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == ["GPU-abc123"]
    assert listed["data"][0]["ledger"]["jobs"] == GIB
    for name in ("GPU-abc123", "GPU-a", "host:GPU-abc123"):
        one = await shell.json("cards", name)
        assert one["id"] == "GPU-abc123" and one["object"] == "card"
    code, out, _ = await shell.run("cards")
    assert code == DONE and "GPU-abc123" in out and "1 GiB" in out and "USED/TOTAL" in out
    code, out, _ = await shell.run("cards", "GPU-abc123")
    assert code == DONE and re.search(r"ledger +usable 10 GiB =\s+resident +0 B\s+jobs +1 GiB", out)
    for job in await agent.claim():
        await agent.finish(ok(job))


async def test_leases_queue_and_models(store: Store, shell: Shell, agent: FakeAgent) -> None:
    """What is held, what waits, and what is served; `--json` equals the documents that HTTP renders."""
    for _ in range(6):
        await admission.submit(store, request(nbytes=2 * GIB))
    leases, queue, models = [await shell.json(name) for name in ("leases", "queue", "models")]
    assert [lease["bytes"] for lease in leases["data"]] == [2 * GIB] * 4
    assert queue["data"] == [queue["data"][0]] and queue["data"][0]["waiting"] == 2
    assert 0 <= queue["data"][0]["oldest_ms"] < 60_000, "an age, and no point in time"
    assert models == documents.list_document(
        [documents.model_document(view) for view in await inventory.models(store)]
    )
    lease = leases["data"][0]
    assert (await shell.json("leases", lease["id"][:10]))["job"] == lease["job"]
    assert (await shell.json("queue", "echo"))["object"] == "queue"
    assert (await shell.json("models", "ech"))["id"] == "echo"
    for name in ("leases", "queue", "models"):
        code, out, _ = await shell.run(name)
        assert code == DONE and "echo" in out
    await agent.run_all()


async def test_jobs_by_id_prefix_state_and_model(store: Store, shell: Shell, agent: FakeAgent) -> None:
    """A settled job has its result or its problem object; filters and prefixes find what they name."""
    good = await admission.submit(store, request(is_async=True))
    bad = await admission.submit(store, request(is_async=True))
    for job in await agent.claim():
        agent.start(job)
        await agent.finish(ok(job) if job.job_id == good.job_id else failed(job))
    assert (await shell.json("jobs", good.job_id))["result"] == "ok"
    assert (await shell.json("jobs", bad.job_id[:16]))["error"]["code"] == "model_error"
    listed = await shell.json("jobs", "--state", "failed")
    assert [job["id"] for job in listed["data"]] == [bad.job_id]
    assert len((await shell.json("jobs", "--model", "echo"))["data"]) == 2
    assert (await shell.json("jobs", "--model", "echo", "--state", "running"))["data"] == []
    code, out, _ = await shell.run("jobs")
    assert code == DONE and "succeeded" in out and "model_error" in out


async def test_cancel_is_for_all_callers_and_twice_is_the_same(
    store: Store, shell: Shell, agent: FakeAgent
) -> None:
    """A waiting job is cancelled by a prefix; a finished one stays as it is, and both exit with 0."""
    for _ in range(5):
        await admission.submit(store, request(nbytes=2 * GIB, is_async=True))
    waiting = (await shell.json("jobs", "--state", "queued"))["data"][0]["id"]
    code, out, _ = await shell.run("job", "cancel", waiting[:20])
    assert (code, out) == (DONE, f"job {waiting}: cancelled\n")
    assert (await shell.json("job", "cancel", waiting))["state"] == "cancelled"
    await agent.run_all()
    done = (await shell.json("jobs", "--state", "succeeded"))["data"][0]["id"]
    code, out, _ = await shell.run("job", "cancel", done)
    assert code == DONE and "had succeeded before" in out


async def test_cordon_drain_and_uncordon(store: Store, shell: Shell, agent: FakeAgent) -> None:
    """A cordoned card is granted nothing; uncordon lets its waiting work run."""
    code, out, _ = await shell.run("card", "cordon", "GPU-a", "--reason", "smells burnt")
    assert code == DONE and "cordoned" in out
    assert (await shell.json("cards", "GPU-a"))["reason"] == "smells burnt"
    assert (await admission.submit(store, request(is_async=True))).state == "queued"
    assert (await shell.json("card", "drain", "GPU-a"))["operator_state"] == "draining"
    assert (await shell.json("card", "uncordon", "host:GPU-abc123"))["state"] == "ready"
    await agent.beat()
    assert await agent.run_all() == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["cards", "GPU-zzz"], MISSING, "there is no card GPU-zzz; `vramgate cards` lists them"),
        (["jobs", "f" * 32], MISSING, "there is no job ffff"),
        (["jobs", "ffff"], MISSING, "there is no job ffff"),
        (["job", "cancel", "ffff"], MISSING, "there is no job"),
        (["card", "drain", "GPU-zzz"], MISSING, "there is no card"),
        (["cards", "\x1b[2J"], MISSING, r"there is no card \x1b[2J;"),
        (["models", "nothing"], MISSING, "there is no model nothing; `vramgate models` lists them"),
        (
            ["queue", "nothing"],
            MISSING,
            "nothing waits for a model nothing; `vramgate queue` lists what waits",
        ),
        (["jobs", "--limit", "0"], USAGE, "--limit"),
        (["jobs", "--state", "done"], USAGE, "'done' is none of queued, leased"),
        (["cards", "--jso"], USAGE, "No such option: --jso"),
        (["wards"], USAGE, "No such command"),
        (["job", "cancel"], USAGE, "Missing argument"),
    ],
)
async def test_each_failure_is_one_line_and_its_code(
    shell: Shell, agent: FakeAgent, arguments: list[str], code: int, words: str
) -> None:
    """Nothing on standard output, one line on standard error, and the contract's exit code."""
    ended, out, err = await shell.run(*arguments)
    assert (ended, out) == (code, "") and words in err and err.count("\n") == 1


async def test_a_prefix_that_fits_several_is_refused(store: Store, shell: Shell, agent: FakeAgent) -> None:
    """It names some of them and asks for more of the id."""
    second = FakeAgent(store, "GPU-abd")
    await second.register()
    code, _, err = await shell.run("cards", "GPU-ab")
    assert code == USAGE and "GPU-abc123" in err and "GPU-abd" in err


async def test_cards_of_one_name_are_told_apart(store: Store, shell: Shell) -> None:
    """Two hosts may call a card vm:0: the list shows the beginning of each id beside it, which stands for
    the card; the name alone names both. `--json` shows names as they are.
    """
    for id in ("GPU-abc123", "GPU-abd"):
        twin = FakeAgent(store, id)
        twin.name = "vm:0"
        await twin.register()
    _, out, _ = await shell.run("cards")
    assert "vm:0 GPU-abc123" in out and "vm:0 GPU-abd" in out
    assert (await shell.json("cards", "GPU-abc"))["id"] == "GPU-abc123"
    code, _, err = await shell.run("card", "cordon", "vm:0")
    assert code == USAGE and "vm:0 stands for 2 cards: GPU-abc123, GPU-abd" in err
    assert (await shell.json("card", "cordon", "GPU-abd"))["operator_state"] == "cordoned"
    assert {card["name"] for card in (await shell.json("cards"))["data"]} == {"vm:0"}


def test_the_beginning_of_an_id_is_as_long_as_it_must_be() -> None:
    """Twelve characters where they tell the ids apart, else as many as it takes."""
    names = {"GPU-12345678-a": "vm:0", "GPU-12345678-b": "vm:0", "GPU-87654321-a": "vm:0", "SIM-1": "vm:1"}
    told = tables.told_apart([{"id": id, "name": name} for id, name in names.items()])
    assert [card["name"] for card in told] == [
        "vm:0 GPU-12345678-a",
        "vm:0 GPU-12345678-b",
        "vm:0 GPU-87654321",
        "vm:1",
    ]


async def test_nothing_reachable_says_where_it_looked(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 4, with the address, where it came from, and what to do; passwords are not shown."""
    url = "redis://:secret@127.0.0.1:1/0"
    code, _, err = await shell.run("cards", "--redis", url, bare=True)
    assert code == UNREACHABLE and "127.0.0.1:1" in err and "--redis" in err and "secret" not in err
    monkeypatch.setenv("VRAMGATE_REDIS_URL", "redis://127.0.0.1:2/0")
    code, _, err = await shell.run("cards", bare=True)
    assert code == UNREACHABLE and "127.0.0.1:2" in err and "from VRAMGATE_REDIS_URL" in err
    monkeypatch.delenv("VRAMGATE_REDIS_URL")
    write_running(tmp_path / ".vramgate", "redis://127.0.0.1:3/0")
    code, _, err = await shell.run("cards", bare=True)
    assert code == UNREACHABLE and "127.0.0.1:3" in err and f"pid {os.getpid()}" in err
    code, _, err = await shell.run("infer", "echo", "{}", "--url", "http://127.0.0.1:1", bare=True)
    assert code == UNREACHABLE and "no gateway at http://127.0.0.1:1" in err and err.count("\n") == 1


async def test_what_up_left_is_found(
    settings: Settings, shell: Shell, agent: FakeAgent, tmp_path: Path
) -> None:
    """In the directory of a running `up` no option is needed; one that was killed counts as none."""
    write_running(tmp_path / ".vramgate", settings.redis_url, pool=settings.pool)
    code, out, _ = await shell.run("cards", "--json", bare=True)
    assert code == DONE and json.loads(out)["data"][0]["id"] == "GPU-abc123"
    write_running(tmp_path / ".vramgate", settings.redis_url, pool=settings.pool, started=1)
    assert upfile.read(tmp_path / ".vramgate") is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["infer", "echo", "{"], "the inputs are no JSON"),
        (["infer", "echo", "[1]"], "write an object"),
        (["infer", "echo", ""], "the inputs are no JSON"),
        (["infer", "echo", "[" * 3000], "the inputs are no JSON"),
        (["infer", "echo", "\x1b[2J{"], "the inputs are no JSON"),
        (["infer", "echo", "{}", "--file", "x.wav"], "not both"),
        (["infer", "echo", "--file", "x.wav"], "x.wav cannot be read: No such file"),
        (["infer", "echo", "{}", "--max-wait", "soon"], "--max-wait: 'soon' is not a duration"),
        (["infer", "echo", "{}", "--priority", "12"], "--priority"),
        (["infer", "echo", "{}", "--url", "ftp://x"], "is no address of a gateway"),
    ],
)
async def test_infer_refuses_what_makes_no_sense(shell: Shell, arguments: list[str], words: str) -> None:
    """Told before anything is sent, as a fault of usage."""
    code, out, err = await shell.run(*arguments, bare=True)
    assert (code, out) == (USAGE, "") and words in err and err.count("\n") == 1


async def test_infer_says_why_it_asks_again(shell: Shell) -> None:
    """A refusal that may pass is one line on stderr while the command goes on; the outputs come all the
    same.
    """
    answers = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answers
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.I)
        await reader.readexactly(int(length[1]) if length else 0)
        answers += head.startswith(b"POST")
        if head.startswith(b"GET"):
            status, body = "200 OK", json.dumps({"status": "alive"})
        elif answers == 1:
            status, body = "503 Service Unavailable", json.dumps(errors.QueueFull("no place left").problem())
        else:
            outcome = {"id": "1", "model": "echo", "version": "1", "outputs": "here"}
            timing = {"wait_ms": 0, "run_ms": 0, "total_ms": 0}
            status, body = "200 OK", json.dumps(outcome | {"timing": timing, "vram": {"leased_bytes": 1}})
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n".encode())
        writer.write(f"Connection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        code, out, err = await shell.run(
            "infer", "echo", "{}", "--url", f"http://127.0.0.1:{port}", bare=True
        )
    assert (code, json.loads(out)) == (DONE, "here"), err
    assert re.fullmatch(r"vramgate: no place left; asking again in \d\.\d s\n", err)


async def test_a_typo_in_the_configuration_is_one_line(shell: Shell, tmp_path: Path) -> None:
    """The key is named, and the nearest known one."""
    (tmp_path / "vramgate.toml").write_text("[gateway]\nprot = 1\n")
    for command in (["cards"], ["up"], ["gateway"], ["agent"]):
        code, _, err = await shell.run(*command, bare=True)
        assert code == USAGE and "gateway.prot; did you mean gateway.port?" in err and err.count("\n") == 1


@pytest.mark.parametrize("form", [["--json"], []])
async def test_watch_shows_it_again_until_ctrl_c(
    settings: Settings, store: Store, agent: FakeAgent, form: list[str]
) -> None:
    """`--watch --json` prints one object a line, `--watch` redraws its table; Ctrl-C ends both without a
    trace.
    """
    options = ["--redis", settings.redis_url, "--pool", settings.pool]
    command = [sys.executable, "-P", "-m", "vramgate.cli.main", "cards", "--watch", *form, *options]
    terminal, inside = os.openpty()
    process = await asyncio.create_subprocess_exec(*command, stdout=inside, stderr=asyncio.subprocess.PIPE)
    os.close(inside)
    try:
        seen = b""
        while seen.count(b"GPU-abc123") < 2:
            seen += await asyncio.wait_for(asyncio.to_thread(os.read, terminal, 65536), 20)
        if form:
            assert json.loads(seen.splitlines()[0])["data"][0]["id"] == "GPU-abc123"
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == INTERRUPTED
        assert process.stderr is not None and b"Traceback" not in await process.stderr.read()
    finally:
        os.close(terminal)


async def test_watch_into_a_pipe_prints_each_table(
    settings: Settings, store: Store, agent: FakeAgent
) -> None:
    """Where nobody can redraw, each table is written as it comes."""
    options = ["--redis", settings.redis_url, "--pool", settings.pool]
    command = [sys.executable, "-P", "-m", "vramgate.cli.main", "cards", "--watch", *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    seen = b""
    while seen.count(b"GPU-abc123") < 2:
        seen += await asyncio.wait_for(process.stdout.read(65536), 20)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 20) == INTERRUPTED


def test_tables_are_readable_at_80_columns() -> None:
    """No head, id or state is cut in a narrow terminal; models fold."""
    gib = 2**30
    card = {
        "name": "gpu-node-17:0",
        "state": "cordoned",
        "reason": "cordoned by an operator",
        "models": [{"id": "stable-diffusion-xl", "ready": True}, {"id": "speech", "ready": False}],
        "running": 12,
        "jobs": 14,
        "ledger": {"usable": 75 * gib, "grantable": 33 * gib},
        "leased_bytes": 42 * gib,
        "measured": {"total": 80 * gib, "driver": gib, "free": 20 * gib},
    }
    job = {
        "id": "0123456789abcdef0123456789abcdef",
        "model": "stable-diffusion-xl",
        "state": "succeeded",
        "position": 1234,
        "eta_s": 120,
        "why": "waits for memory",
        "vram": {"leased_bytes": 42 * gib},
        "timing": {"wait_ms": 12_300, "run_ms": 45_600},
        "started_ms": 1,
    }
    for columns, row in ((tables.CARDS, card), (tables.JOBS, job)):
        for width in (80, 120):
            console = Console(width=width, file=io.StringIO())
            console.print(tables.table(columns, [row]))
            shown = console.file.getvalue()  # type: ignore[attr-defined]
            heads, *lines = shown.splitlines()
            assert "…" not in shown and heads.split() == [head for head, _ in columns], shown
            assert max(map(len, lines)) <= width, shown
    assert with_reason("cordoned", "cordoned by an operator") == "cordoned by an operator"


@pytest.mark.parametrize(
    ("per_unit", "shown"),
    [(0.25, "0.25 B"), (102.0, "102 B"), (2381.57, "2.33 KiB"), (1716860.4, "1.64 MiB")],
)
def test_what_a_unit_takes_is_a_size(per_unit: float, shown: str) -> None:
    """In the units of every other size, and where it is less than a byte as it is."""
    estimate = {"resident_bytes": 0, "bytes_per_item": 0, "bytes_per_unit": per_unit}
    columns = [column for column in tables.MODELS if column[0] == "PER UNIT"]
    console = Console(width=80, file=io.StringIO())
    console.print(tables.table(columns, [{"versions": [{"estimate": estimate}]}]))
    assert console.file.getvalue().split("\n")[1].strip() == shown  # type: ignore[attr-defined]


def test_cells_are_shown_as_they_are() -> None:
    """A reason is text: neither its square brackets nor what stands between colons is taken for markup."""
    said = r"a:M: cannot be imported [bold] :warning: C:\[/]"
    console = Console(width=120, file=io.StringIO())
    console.print(tables.table([("WHY", lambda job: job["why"])], [{"why": said}]))
    assert said in console.file.getvalue()  # type: ignore[attr-defined]


async def test_an_empty_id_and_an_unknown_model_are_told(shell: Shell, agent: FakeAgent) -> None:
    """An empty id is no prefix of every id, and a filter for nothing says what there is."""
    code, _, err = await shell.run("job", "cancel", "")
    assert code == USAGE and "empty" in err
    code, _, err = await shell.run("card", "cordon", "")
    assert code == USAGE and "empty" in err
    code, _, err = await shell.run("jobs", "--model", "ecko")
    assert code == MISSING and "ecko" in err and "echo" in err


async def test_version_and_help(shell: Shell) -> None:
    """The bare command shows what there is."""
    code, out, _ = await shell.run("--version", bare=True)
    assert code == DONE and out.startswith("vramgate ")
    code, out, _ = await shell.run(bare=True)
    assert code == DONE and all(name in out for name in ("up", "demo", "cards", "infer"))
    for command in ([], ["infer"], ["job", "cancel"]):
        code, out, _ = await shell.run(*command, "-h", bare=True)
        assert code == DONE and "Usage" in out


async def test_an_unexpected_failure_is_one_line(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stack trace, whatever goes wrong."""

    async def broken(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("vramgate.cli.views.inventory.cards", broken)
    code, _, err = await shell.run("cards")
    assert (code, err) == (FAILED, "vramgate: RuntimeError: two lines\n")


def write_running(data_dir: Path, url: str, *, pool: str = "default", started: int | None = None) -> None:
    own = start_of(os.getpid()) or 0
    upfile.write(data_dir, upfile.Running(os.getpid(), started or own, url, pool, (), None))
