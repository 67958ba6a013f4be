"""What the ledger's scripts cost, in microseconds of the server's own CPU, by number of waiting jobs.

`python -m benchmarks.ledger [--million]`. Counted is the CPU time of the server's main thread by the
number of EVALSHA calls, so that other processes on the machine disturb little. The figures are of this
machine; what may be quoted is how they grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import tempfile
from pathlib import Path
from typing import Any

import msgpack

from scheduler import cards, scripts
from scheduler.embedded import EmbeddedServer
from scheduler.models import CardRegistration, HandedJob, HostedModel, Report, Sample
from scheduler.settings import load_settings
from scheduler.store import Store, pack

MIB = 2**20
BATCH = 4
ROUNDS = 500


def _model(name: str) -> HostedModel:
    return HostedModel(
        name=name,
        version="v1",
        ready=True,
        reason=None,
        slots=BATCH,
        max_batch=BATCH,
        lanes=1,
        resident_bytes=0,
        c0_item=MIB,
        c1=0.0,
        units="1",
        batch_units="sum",
        schema=None,
        schema_hash="",
    )


class Bench:
    """One card that is always busy, and a queue before it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.session = secrets.token_hex(16)
        self.seq = 0
        self.now_ms = 0
        self.held: tuple[HandedJob, ...] = ()

    def _sample(self) -> Sample:
        return Sample(self.now_ms, 2**40, 0, 0, 0, 0, 0, 0)

    async def register(self) -> None:
        given = CardRegistration(
            card="GPU-0",
            session=self.session,
            host="host",
            name="host:0",
            index=0,
            product="bench",
            pid=1,
            headroom=0,
            slots=BATCH,
            models=(_model("m"),),
            sample=None,
        )
        self.now_ms = await cards.register(self.store, given, state="ready")

    async def submit(self, number: int) -> None:
        """Pipelined, so that a million takes minutes and not hours."""
        script = scripts.load("submit")
        keys = self.store.keys
        for at in range(0, number, 500):
            async with self.store.redis.pipeline(transaction=False) as pipe:
                for _ in range(min(500, number - at)):
                    job_id = secrets.token_hex(16)
                    given = {
                        "id": job_id,
                        "model": "m",
                        "bytes": MIB,
                        "units": 1.0,
                        "worker": "w",
                        "priority": 4,
                        "wait_ms": 86_400_000,
                        "run_ms": 60_000,
                        "total_ms": 86_400_000,
                        "tenant": "-",
                    }
                    tombstone = keys.tombstone(job_id)
                    argv = (pack(given), self.store._script_settings, secrets.token_hex(256), b"\x80")
                    pipe.evalsha(script.sha, 4, keys.meta, keys.job(job_id), tombstone, tombstone, *argv)
                await pipe.execute()

    async def finish(self, rounds: int) -> None:
        """Each reports BATCH jobs, grants BATCH waiters and hands them out."""
        for _ in range(rounds):
            seconds, micros = await self.store.redis.time()
            self.now_ms = seconds * 1000 + micros // 1000
            self.seq += 1
            reports = [
                Report(job.job_id, job.lease_id, "succeeded", result=msgpack.packb({"y": 1}), run_ms=1)
                for job in self.held
            ]
            handout = await cards.finish(
                self.store,
                card="GPU-0",
                session=self.session,
                seq=self.seq,
                reports=reports,
                sample=self._sample(),
                want=BATCH,
            )
            self.held = handout.jobs
            assert len(self.held) == BATCH

    async def cost_us(self, work: Any) -> float:
        """Mean CPU time of the server for one of the EVALSHA calls that `work` makes."""
        before_s, calls = await self._spent()
        await work
        after_s, calls_after = await self._spent()
        return round((after_s - before_s) * 1e6 / (calls_after - calls), 1)

    async def _spent(self) -> tuple[float, int]:
        cpu = await self.store.redis.info("cpu")
        calls = (await self.store.redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
        return cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"], calls


async def main(*, with_million: bool, url: str | None) -> None:
    with tempfile.TemporaryDirectory() as data:
        server = None
        if url is None:
            server = EmbeddedServer()
            await server.start(Path(data))
            url = f"redis://127.0.0.1:{server.port}/0"
        limits = {"queue_jobs": 10**7, "model_jobs": 10**7, "tenant_jobs": 10**7}
        store = await Store.connect(
            load_settings(None, redis_url=url, pool="bench", limits=limits, redis={"command_timeout_s": 60})
        )
        bench = Bench(store)
        await bench.register()
        await bench.submit(2 * BATCH)
        await bench.finish(2)
        figures: dict[str, dict[str, float]] = {}
        waiting = 0
        for target in (100, 10_000, *([1_000_000] if with_million else [])):
            await bench.submit(target - waiting - 2000 if target > 2000 else 0)
            submit_us = await bench.cost_us(bench.submit(min(2000, target - waiting)))
            waiting = target
            rounds = min(ROUNDS, target // BATCH - 5)
            finish_us = await bench.cost_us(bench.finish(rounds))
            await bench.submit(rounds * BATCH)
            figures[str(target)] = {"submit_us": submit_us, f"finish_{BATCH}_us": finish_us}
        first, last = figures[min(figures, key=int)], figures[max(figures, key=int)]
        print(json.dumps(figures | {"growth": {name: round(last[name] / first[name], 2) for name in first}}))
        await store.close()
        if server is not None:
            await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", action="store_true", help="also with 1,000,000 waiting jobs")
    parser.add_argument("--url", help="a server to use; its pool `bench` is written to")
    given = parser.parse_args()
    asyncio.run(main(with_million=given.million, url=given.url))
