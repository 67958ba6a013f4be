"""Admission: submit, abandon, cancel. What a gateway asks of the ledger."""

from __future__ import annotations

from scheduler import jobs, records
from scheduler.store import Reply, Store
from scheduler.submissions import SubmitRequest, Submitted
from scheduler.views import JobView
from vramgate import errors
from vramgate.quantities import seconds_up


async def submit(store: Store, request: SubmitRequest) -> Submitted:
    """Store, join or replay, in one round trip.

    Raises the refusals of the table: UnknownModel, ExceedsEveryCard, QueueFull, QuotaExceeded, KeyReused,
    ResultExpired, Cancelled (given up before it arrived), StoreUnavailable.
    """
    tombstone = store.keys.tombstone(request.job_id)
    key = tombstone if request.key is None else store.keys.idempotency(request.tenant, request.key)
    digest = "" if request.key is None else key.rpartition(":")[2]
    reply = await store.run(
        "submit",
        records.pack_submit(request, digest),
        keys=(store.keys.job(request.job_id), key, tombstone),
        blobs=(request.inputs,),
    )
    fields = reply.fields
    if reply.status == "refused":
        raise _refusal(reply, request)
    outcome = jobs.outcome_of(fields["job"], *reply.blobs) if fields["how"] == "replayed" else None
    return Submitted(
        fields["job"],
        fields["how"],
        fields["state"],
        int(fields["position"]),
        fields["card"] or None,
        outcome,
    )


def _refusal(reply: Reply, request: SubmitRequest) -> errors.Refused:
    fields = reply.fields
    code = fields["code"]
    if code in ("queue_full", "quota_exceeded"):
        waiting = int(fields["waiting"])
        whose = "the queue" if code == "queue_full" else f"the share of tenant {request.tenant}"
        return errors.by_code(code)(
            f"{request.model}: {whose} is full, {waiting} jobs wait; come back after Retry-After",
            retry_after_s=max(1, seconds_up(int(fields["retry_ms"]))),
            queue_length=waiting,
        )
    if code == "unknown_model":
        return errors.UnknownModel(f"no agent has served {request.model!r} lately; see GET /v1/models")
    if code == "exceeds_every_card":
        return errors.ExceedsEveryCard(
            f"{request.model}: needs {request.lease_bytes} bytes, "
            f"the largest card has {fields['largest']} for it",
            needed_bytes=request.lease_bytes,
            largest_bytes=int(fields["largest"]),
        )
    details: dict[str, str] = {
        "key_reused": "this Idempotency-Key was used with other inputs; use a new key",
        "result_expired": "the answer under this Idempotency-Key is no longer stored; it never runs again",
        "cancelled": "this request was given up before it arrived",
    }
    return errors.by_code(code)(details[code], job_id=fields.get("job"))


async def abandon(store: Store, *, job_id: str | None, client: str, tenant: str, key: str | None) -> None:
    """This client left, or the outcome of its submit is unknown: then a tombstone lets this call overtake it.

    client: SubmitRequest.job_id of the submit. job_id: the job that it got, None where that is unknown.
    """
    tombstone = store.keys.tombstone(client)
    name = tombstone if key is None else store.keys.idempotency(tenant, key)
    await store.run(
        "abandon",
        {
            "client": client,
            "job": job_id or client,
            "keyed": True if key is not None else None,
            "unknown": True if job_id is None else None,
        },
        keys=(store.keys.job(job_id or client), name, tombstone),
    )


async def cancel(store: Store, job_id: str, *, tenant: str | None = None, force: bool = False) -> JobView:
    """End a job for all its clients; a finished one is returned as it is. tenant None: an operator. Raises
    UnknownJob.
    """
    reply = await store.run(
        "cancel",
        {"id": job_id, "tenant": tenant, "force": True if force else None},
        keys=(store.keys.job(job_id),),
    )
    if reply.status == "unknown":
        raise jobs.unknown(job_id)
    return await jobs.view(store, job_id, tenant=tenant)
