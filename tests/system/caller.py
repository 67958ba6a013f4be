"""What tests ask of a box: over HTTP as callers do, and of the ledger what only an operator sees."""

from __future__ import annotations

import secrets
from typing import Any

import httpx

from scheduler import inventory, jobs
from scheduler.store import Store
from scheduler.views import CardView, JobView
from tests.system.box import MODELS, Box
from tests.waiting import until
from vramgate.client import AsyncClient

Json = dict[str, Any]


def new_tag() -> str:
    """A name for a job's runs."""
    return secrets.token_hex(8)


class Caller:
    """Talks to the gateway that the test names, by default the first."""

    def __init__(self, box: Box, store: Store, http: httpx.AsyncClient) -> None:
        self.box, self.store, self.http = box, store, http

    # -- over HTTP

    async def infer(
        self,
        model: str,
        tag: str = "",
        *,
        gateway: int = 0,
        key: str | None = None,
        prefer: str | None = None,
        options: Json | None = None,
        timeout_s: float = 90.0,
        **inputs: Any,
    ) -> httpx.Response:
        """One POST, without any retry."""
        headers = {"Idempotency-Key": key} if key is not None else {}
        if prefer is not None:
            headers["Prefer"] = prefer
        return await self.http.post(
            f"{self.box.gateways[gateway].url}/v1/models/{model}/infer",
            json={"inputs": {"tag": tag, **inputs}, "options": options or {}},
            headers=headers,
            timeout=timeout_s,
        )

    async def submit(self, model: str, tag: str = "", **given: Any) -> str:
        """An async job; its id."""
        response = await self.infer(model, tag, prefer="respond-async", **given)
        assert response.status_code == 202, response.text
        return str(response.json()["id"])

    async def job(self, job_id: str, *, gateway: int = 0) -> Json:
        response = await self.http.get(f"{self.box.gateways[gateway].url}/v1/jobs/{job_id}", timeout=10)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def ended(self, job_id: str, *, gateway: int = 0) -> Json:
        """The job, once it is settled; gateways may come and go meanwhile."""

        async def check() -> Json | None:
            url = f"{self.box.gateways[gateway].url}/v1/jobs/{job_id}?wait_s=5"
            try:
                response = await self.http.get(url, timeout=30)
            except httpx.TransportError:
                return None
            if response.status_code == 503:
                return None
            assert response.status_code == 200, response.text
            job = response.json()
            return dict(job) if job["state"] not in ("queued", "leased", "running") else None

        return await until(f"job {job_id} settles", check)

    def client(self, **given: Any) -> AsyncClient:
        """The client of the package, on both gateways."""
        return AsyncClient(self.box.urls, **given)

    # -- of the ledger

    async def view(self, job_id: str) -> JobView:
        return await jobs.view(self.store, job_id)

    async def in_state(self, job_id: str, state: str) -> JobView:
        async def check() -> JobView | None:
            view = await self.view(job_id)
            return view if view.state == state else None

        return await until(f"job {job_id} is {state}", check)

    async def tagged_run(self, tag: str) -> None:
        """Wait until a model has begun a job with this tag."""

        async def check() -> bool:
            return self.box.runs(tag) > 0

        await until(f"the job tagged {tag} has begun", check)

    async def only_job(self, model: str, state: str) -> JobView:
        """The one job of a model that is in this state."""

        async def check() -> JobView | None:
            found = await self.jobs(state, model=model)
            return found[0] if len(found) == 1 else None

        return await until(f"one job of {model} is {state}", check)

    async def jobs(self, state: str, *, model: str | None = None) -> list[JobView]:
        """All jobs in a state; a page may be short although there are more."""
        found: list[JobView] = []
        cursor: str | None = None
        while True:
            page = await jobs.list_jobs(self.store, state=state, model=model, cursor=cursor, limit=500)
            found += page.data
            cursor = page.next
            if cursor is None:
                return found

    async def cards(self) -> tuple[CardView, ...]:
        return await inventory.cards(self.store)

    async def all_ready(self) -> tuple[CardView, ...]:
        """Both cards are ready and host all that they should."""

        async def check() -> tuple[CardView, ...] | None:
            cards = sorted(await self.cards(), key=lambda card: card.index)
            hosted = {model.name for card in cards for model in card.models if model.ready}
            states = [(card.state, card.operator_state) for card in cards]
            return tuple(cards) if states == [("ready", "ready")] * 2 and hosted == MODELS else None

        return await until("both cards are ready, and every model is", check)

    async def no_leases(self) -> None:
        async def check() -> bool:
            return not await inventory.leases(self.store)

        await until("every lease has ended", check)

    async def totals(self) -> dict[str, int]:
        return dict(await inventory.totals(self.store))

    async def cut_connections(self) -> None:
        """The server closes every connection but ours."""
        redis: Any = self.store.redis
        await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def now_ms(self) -> float:
        """The time of the ledger's server."""
        seconds, micros = await self.store.redis.time()
        return float(seconds * 1000 + micros / 1000)
