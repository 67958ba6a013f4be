"""What the ledger's scripts cost, in microseconds of the server's own CPU, by number of waiting jobs.

`python -m benchmarks.ledger [--million]`. Counted is the CPU time of the server's main thread by the
number of EVALSHA calls, so that other processes on the machine disturb little. The figures are of this
machine; what may be quoted is how they grow.

`--instructions` counts, under valgrind, the thousands of instructions that a call takes: the same on every
run, whatever else the machine does, and so the measure of a change to a script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgpack

from scheduler import cards, scripts
from scheduler.embedded import EmbeddedServer, bound_to_owner, find_server, free_port
from scheduler.handover import HandedJob, Report
from scheduler.records import pack_submit
from scheduler.registration import CardRegistration, HostedModel, Sample
from scheduler.settings import Settings, load_settings
from scheduler.store import Store
from scheduler.submissions import SubmitRequest
from vramgate import errors

MIB = 2**20
BATCH = 4
ROUNDS = 500
SETTLED = 200
"""Jobs settled before anything is measured: a short sorted set is a list, and costs more than a long one."""


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
                    given = SubmitRequest(
                        job_id=job_id,
                        model="m",
                        inputs=b"\x80",
                        lease_bytes=MIB,
                        units=1.0,
                        worker="w",
                        max_wait_ms=86_400_000,
                        total_timeout_ms=86_400_000,
                    )
                    tombstone = keys.tombstone(job_id)
                    packed = pack_submit(given, "")
                    argv = (
                        packed,
                        self.store.script_settings("submit"),
                        secrets.token_hex(256),
                        given.inputs,
                    )
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

    async def used_bytes(self) -> int:
        """What the server holds in all."""
        return int((await self.store.redis.info("memory"))["used_memory"])

    async def _spent(self) -> tuple[float, int]:
        cpu = await self.store.redis.info("cpu")
        calls = (await self.store.redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
        return cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"], calls


async def warm(store: Store) -> Bench:
    """A bench whose tables are as those of a pool that has run for a while; nobody waits."""
    bench = Bench(store)
    await bench.register()
    await bench.submit(SETTLED + BATCH)
    await bench.finish(SETTLED // BATCH + 1)
    return bench


def settings(url: str) -> Settings:
    """No limit to the queue; beats so rare that a slow server still counts as alive."""
    limits = {"queue_jobs": 10**7, "model_jobs": 10**7, "tenant_jobs": 10**7}
    given = {"limits": limits, "clocks": {"session_s": 280, "beat_s": 60}, "redis": {"command_timeout_s": 60}}
    return load_settings(None, redis_url=url, pool="bench", **given)


class Callgrind:
    """A server under valgrind, whose instructions are counted while `cost` runs."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self.url = f"redis://127.0.0.1:{(port := free_port())}/0"
        self._counted = 0
        tool = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={data}/out")
        server = (str(find_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", "")
        self._process = subprocess.Popen(
            bound_to_owner([str(shutil.which(tool[0])), *tool[1:], *server, "--dir", str(data)]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _control(self, *what: str) -> None:
        subprocess.run(["callgrind_control", *what, str(self._process.pid)], check=True, capture_output=True)

    async def store(self) -> Store:
        while True:
            try:
                return await Store.connect(settings(self.url))
            except errors.StoreUnavailable:
                await asyncio.sleep(0.2)

    async def cost(self, work: Awaitable[None], calls: int) -> float:
        """Thousands of instructions for each of the calls that `work` makes."""
        self._control("--zero")
        self._control("--instr=on")
        await work
        self._control("--instr=off")
        self._control("--dump")
        self._counted += 1
        found: list[str] = []
        while not found:
            await asyncio.sleep(0.2)
            dump = self._data / f"out.{self._counted}"
            found = re.findall(r"^totals: (\d+)$", dump.read_text(), re.MULTILINE) if dump.exists() else []
        return round(int(found[-1]) / calls / 1000, 1)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


async def instructions() -> None:
    """What a submit into a queue of 1,000 costs, and a finish that grants from it."""
    with tempfile.TemporaryDirectory() as data:
        callgrind = Callgrind(Path(data))
        try:
            store = await callgrind.store()
            bench = await warm(store)
            await bench.submit(1000)
            submit = await callgrind.cost(bench.submit(200), 200)
            finish = await callgrind.cost(bench.finish(50), 50)
            print(json.dumps({"submit_kinstructions": submit, f"finish_{BATCH}_kinstructions": finish}))
            await store.close()
        finally:
            callgrind.stop()


async def main(*, with_million: bool, url: str | None) -> None:
    with tempfile.TemporaryDirectory() as data:
        server = None
        if url is None:
            server = EmbeddedServer()
            await server.start(Path(data))
            url = f"redis://127.0.0.1:{server.port}/0"
        store = await Store.connect(settings(url))
        bench = await warm(store)
        figures: dict[str, dict[str, float]] = {}
        waiting = 0
        for target in (100, 10_000, *([1_000_000] if with_million else [])):
            bytes_before = await bench.used_bytes()
            await bench.submit(target - waiting - 2000 if target > 2000 else 0)
            submit_us = await bench.cost_us(bench.submit(min(2000, target - waiting)))
            per_job = round((await bench.used_bytes() - bytes_before) / (target - waiting))
            waiting = target
            rounds = min(ROUNDS, target // BATCH - 5)
            finish_us = await bench.cost_us(bench.finish(rounds))
            await bench.submit(rounds * BATCH)
            figures[str(target)] = {
                "submit_us": submit_us,
                f"finish_{BATCH}_us": finish_us,
                "bytes_per_waiting_job": per_job,
            }
        first, last = figures[min(figures, key=int)], figures[max(figures, key=int)]
        growth = {name: round(last[name] / first[name], 2) for name in first if name.endswith("_us")}
        print(json.dumps(figures | {"growth": growth}))
        await store.close()
        if server is not None:
            await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", action="store_true", help="also with 1,000,000 waiting jobs")
    parser.add_argument("--url", help="a server to use; its pool `bench` is written to")
    parser.add_argument("--instructions", action="store_true", help="count instructions instead (valgrind)")
    given = parser.parse_args()
    if given.instructions:
        asyncio.run(instructions())
    else:
        asyncio.run(main(with_million=given.million, url=given.url))
