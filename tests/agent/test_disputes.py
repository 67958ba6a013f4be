"""Two boxes whose code differs under one pinned version, seen through a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agent.conftest import Start
from tests.agent.harness import Agent, Caller
from tests.conftest import TestServer
from tests.gateway.process import run_service
from tests.waiting import until

SPEECH = """
import pydantic, vramgate

class Words(pydantic.BaseModel):
    FIELD: str

class Speech(vramgate.Model):
    input_schema = Words
    def load(self, ctx): pass
    def predict(self, batch, ctx): return [item.FIELD for item in batch]
    def sample(self, units): return Words(FIELD="x")
"""
REASON = (
    "speech@1.0: another input schema is published under this version by box:0; "
    "give the entry point another version"
)
MODELS = {
    "speech": 'entrypoint = "speech.py:Speech"\nversion = "1.0"',
    "echo": 'entrypoint = "models_plain.py:Echo"',
}


@pytest.fixture
async def http(server: TestServer, pool: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway process on this test's pool."""
    async with (
        run_service("--redis", server.url, "--pool", pool, "--port", "0") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as client,
    ):
        yield client


def _start(start_agent: Start, folder: Path, index: int, field: str) -> Agent:
    folder.mkdir()
    (folder / "speech.py").write_text(SPEECH.replace("FIELD", field))
    card = ("--card", f"box:{index}")
    return start_agent(folder=folder, simulate="2x256MiB", models=MODELS, arguments=card)


OnCards = dict[str, tuple[bool, str | None]]


async def _are_said(http: httpx.AsyncClient, model: str, expected: OnCards) -> None:
    """Wait until /v1/cards and /v1/models say the same: card name -> ready and reason of the model there."""

    async def check() -> bool:
        cards = (await http.get("/v1/cards")).json()["data"]
        found = {c["name"]: (m["ready"], m["reason"]) for c in cards for m in c["models"] if m["id"] == model}
        by_model = (await http.get(f"/v1/models/{model}")).json()["cards"]
        names = {card["id"]: card["name"] for card in cards}
        said = {names.get(card["id"]): (card["ready"], card["reason"]) for card in by_model}
        return all(found.get(name) == said.get(name) == what for name, what in expected.items())

    await until(f"{model} on the cards is {expected}", check)


async def _infer(http: httpx.AsyncClient, **inputs: str) -> dict[str, Any]:
    answer = await http.post("/v1/models/speech/infer", json={"inputs": inputs})
    return {"status": answer.status_code, **answer.json()}


async def test_two_contracts_under_one_version(
    http: httpx.AsyncClient, own_caller: Caller, start_agent: Start, tmp_path: Path
) -> None:
    """The second box's model is not ready, with the reason, in its log too; its other model is; callers are
    held to the first one's schema and served by it alone, until it leaves: then the second one's counts.
    """
    first = _start(start_agent, tmp_path / "a", 0, "text")
    await own_caller.ready("speech", "echo")
    second = _start(start_agent, tmp_path / "b", 1, "audio")
    await own_caller.logged(second, "card_ready")
    assert (await own_caller.logged(second, "version_disputed"))["reason"] == REASON
    await _are_said(http, "speech", {"box:0": (True, None), "box:1": (False, REASON)})
    await _are_said(http, "echo", {"box:0": (True, None), "box:1": (True, None)})

    answers = await asyncio.gather(*(_infer(http, text=str(i)) for i in range(12)))
    assert [each["outputs"] for each in answers] == [str(i) for i in range(12)]
    (card,) = {each["card"] for each in answers}
    assert card == first.events("card_registered")[0]["card"]
    assert (await _infer(http, audio="x"))["code"] == "invalid_input"

    assert await asyncio.to_thread(first.stop) == 0

    async def is_taken() -> dict[str, Any] | None:
        answer = await _infer(http, audio="y")
        return answer if answer["status"] == 200 else None

    answer = await until("callers are held to the second one's schema", is_taken)
    assert (answer["outputs"], answer["card"]) == ("y", second.events("card_registered")[0]["card"])
    assert (await _infer(http, text="x"))["code"] == "invalid_input"
    await _are_said(http, "speech", {"box:1": (True, None)})
    assert [len(second.events(name)) for name in ("version_disputed", "version_free")] == [1, 1]
