"""Jobs as callers and operators see them: views, outcomes, pages, inputs, events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgpack

from scheduler import records
from scheduler.states import SETTLED
from scheduler.store import Reply, Store
from scheduler.submissions import Outcome
from scheduler.views import JobView, Page
from vramgate import errors


def unknown(job_id: str) -> errors.Refused:
    return errors.UnknownJob(
        f"there is no job {job_id}; settled jobs are kept for a while only", job_id=job_id
    )


def outcome_of(job_id: str, record: bytes, result: bytes | None) -> Outcome:
    """The outcome that a settled job's record holds; result: the stored bytes, empty or None when there are
    none.
    """
    job = records.unpack_job(record)
    total_ms, run_ms = int(job["st"] - job["ct"]), _run_ms(job, int(job["st"]))
    return Outcome(
        job_id=job_id,
        state=job["s"],
        model=job["m"],
        version=job["ve"],
        code=job.get("co"),
        detail=job.get("er") or None,
        result=result or None,
        card=job["d"] or None,
        wait_ms=max(0, total_ms - run_ms),
        run_ms=run_ms,
        total_ms=total_ms,
        leased_bytes=int(job["lb"]),
        peak_bytes=int(job["pk"]),
        attempts=int(job["at"]),
        data=_data(job),
    )


def _data(job: records.Job) -> Mapping[str, Any]:
    """What a failure says beside its code and detail."""
    data: dict[str, Any] = {}
    if "ra" in job:
        data["retry_ms"] = int(job["ra"])
    if "fi" in job:
        data["field"] = job["fi"]
    return data


def _run_ms(job: records.Job, end_ms: int) -> int:
    """How long its last run took, or has taken: measured by its agent, else by the ledger's stamps."""
    if job["rt"] >= 0:
        return int(job["rt"])
    return max(0, end_ms - int(job["rs"])) if job["rs"] else 0


def _view(told: Mapping[str, Any], record: bytes, now_ms: int) -> JobView:
    job = records.unpack_job(record)
    named = [field[:2] for field in job if len(field) > 2]
    return JobView(
        id=told["id"],
        model=job["c"],
        version=job["ve"] or None,
        state=job["s"],
        tenant=job["t"],
        has_key=bool(job["k"]),
        priority=int(job["p"]),
        attempt=int(job["at"]),
        clients=named.count("c:") + bool(job["w"]),
        card=job["d"] or None,
        lease_id=job["l"] or None,
        lease_bytes=int(job["n"]),
        units=job["u"],
        peak_bytes=int(job["pk"]),
        position=int(told["position"]),
        eta_ms=int(told["eta_ms"]) if "eta_ms" in told else None,
        why=told.get("why"),
        created_ms=int(job["ct"]),
        wait_started_ms=int(job["ws"]),
        granted_ms=int(job["gr"]) or None,
        started_ms=int(job["rs"]) or None,
        settled_ms=int(job["st"]) or None,
        deadline_ms=int(told["deadline"]) if "deadline" in told else None,
        now_ms=now_ms,
        run_ms=_run_ms(job, int(job["st"]) or now_ms),
        crashes=int(job.get("cr", 0)),
        losses=int(job.get("ls", 0)),
        code=job.get("co"),
        detail=job.get("er"),
        data=_data(job),
        has_result=job["s"] == "succeeded" and "rx" not in job,
        events="e:" in named,
    )


async def _ask(store: Store, job_id: str, args: Mapping[str, Any]) -> Reply:
    reply = await store.run("job_view", {"id": job_id, **args}, keys=(store.keys.job(job_id),))
    if reply.status == "unknown":
        raise unknown(job_id)
    return reply


async def view(
    store: Store,
    job_id: str,
    *,
    tenant: str | None = None,
    watch: tuple[str, str] | None = None,
    events: bool = False,
) -> JobView:
    """One job. watch=(worker, client id): that worker's stream is told when it settles, with events=True also
    of news.

    tenant None: an operator. Raises UnknownJob, also for another tenant's job.
    """
    worker, client = watch or (None, None)
    reply = await _ask(
        store,
        job_id,
        {"tenant": tenant, "worker": worker, "watcher": client, "events": True if events else None},
    )
    return _view(reply.fields, reply.blobs[0], reply.now_ms)


async def unwatch(store: Store, job_id: str, *, client: str) -> None:
    """Stop watching; a job that is gone is no error."""
    await store.run("job_view", {"id": job_id, "unwatch": client}, keys=(store.keys.job(job_id),))


async def outcome(store: Store, job_id: str, *, tenant: str | None = None) -> Outcome | None:
    """How a job settled; None while it lives. A succeeded outcome without a result: the result is no longer
    stored.
    """
    reply = await _ask(store, job_id, {"tenant": tenant, "result": True})
    record, result = reply.blobs
    return outcome_of(job_id, record, result) if records.unpack_job(record)["s"] in SETTLED else None


async def list_jobs(
    store: Store,
    *,
    state: str | None = None,
    model: str | None = None,
    tenant: str | None = None,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[JobView]:
    """One page, newest first. A page may be short while `next` is set. Raises errors.InvalidInput for a
    foreign cursor.
    """
    after_ms, _, after_id = (cursor or "").partition("-")
    # 15 digits are below 2**53, which is as far as a number of the store's scripts goes.
    if cursor is not None and re.fullmatch(r"[0-9]{1,15}-[0-9a-f]{32}", cursor) is None:
        raise errors.InvalidInput(
            f"cursor {cursor[:60]!r} is not one that a former page gave", field="cursor"
        )
    reply = await store.run(
        "list",
        {
            "limit": limit,
            "state": state,
            "model": model,
            "tenant": tenant,
            "after_ms": int(after_ms) if cursor else None,
            "after_id": after_id or None,
        },
        keys=(store.keys.name("jobs"),),
    )
    fields = reply.fields
    following = f"{int(fields['next_ms'])}-{fields['next_id']}" if fields.get("next_id") else None
    found = zip(fields["jobs"] or (), reply.blobs, strict=True)
    return Page(tuple(_view(told, record, reply.now_ms) for told, record in found), following)


async def payload(store: Store, job_id: str) -> bytes | None:
    """The stored inputs (canonical msgpack), None when they are gone."""
    inputs: bytes | None = await store.guarded(store.redis.get, store.keys.name("pay", job_id))
    return inputs


async def read_events(store: Store, job_id: str, *, after: str = "0") -> list[tuple[str, dict[str, Any]]]:
    """Progress and output after a stream id: (stream id, {"attempt", "type", "data"})."""
    entries = await store.guarded(
        store.redis.xrange, store.keys.name("ev", job_id), f"({after}" if after != "0" else "-", "+", 512
    )
    return [
        (
            entry_id.decode(),
            {
                "attempt": int(fields[b"a"]),
                "type": fields[b"t"].decode(),
                "data": msgpack.unpackb(fields[b"d"]),
            },
        )
        for entry_id, fields in entries
    ]
