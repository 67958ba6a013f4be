"""What an agent asks of the ledger: take a card, claim, finish, beat, leave.

One sequence number per session covers claim, finish and card_down, with one call outstanding. A call whose
outcome is unknown (errors.StoreUnavailable) is repeated with the same number: it gets the same answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import msgpack
from redis.exceptions import RedisError

from scheduler import records
from scheduler.handover import Beat, BeatAnswer, Cancel, HandedJob, Handout, Report, Start
from scheduler.registration import CardRegistration, HostedModel, Sample
from scheduler.store import Reply, Store
from vramgate import errors

INLINE_RESULT_BYTES = 64 * 1024
REPORTS_PER_CALL = 16
FIRST_RESULT_ARGUMENT = 4
"""ARGV index (1-based) of the first result: after arguments, settings and lease ids."""


class CardTaken(errors.VramgateError):
    """Another live session holds this card."""


class SessionLost(errors.VramgateError):
    """The ledger gave this session up: stop the work, register anew."""


class StaleSeq(errors.VramgateError):
    """A call with a number below the last one: another loop of this agent is ahead."""


def pack_hosted(model: HostedModel) -> bytes:
    packed: bytes = msgpack.packb(asdict(model))
    return packed


def unpack_hosted(packed: bytes) -> HostedModel:
    return HostedModel(**msgpack.unpackb(packed))


def _hosted(models: Sequence[HostedModel], slots: int) -> dict[str, Any]:
    return {
        "slots": slots,
        "resident": sum(model.resident_bytes for model in models if model.ready),
        "packed": msgpack.packb([asdict(model) for model in models]),
        "models": [
            {
                "name": model.name,
                "version": model.version,
                "ready": int(model.ready),
                "slots": model.slots,
                "contract": model.contract,
                "descriptor": pack_hosted(model),
            }
            for model in models
        ],
    }


def _sample(sample: Sample | None) -> dict[str, Any] | None:
    if sample is None:
        return None
    fields: dict[str, Any] = {
        "read": sample.read_ms,
        "total": sample.total,
        "driver": sample.driver,
        "used": sample.used,
        "own": sample.own,
        "allocated": sample.allocated,
        "reserved": sample.reserved,
        "context": sample.context,
    }
    if sample.used_by_lease is not None:
        fields["by_lease"] = dict(sample.used_by_lease)
    return fields


def _starts(starts: Sequence[Start]) -> list[dict[str, Any]]:
    return [{"job": start.job_id, "lease": start.lease_id, "age": start.age_ms} for start in starts]


async def register(
    store: Store, registration: CardRegistration, *, state: str = "starting", reason: str | None = None
) -> int:
    """Take the card; what its former session left is requeued, its leases end. Returns Redis ms. Raises
    CardTaken.

    Call it when the former work is off the card and the sample was read after that.
    """
    given = registration
    while True:
        reply = await store.run(
            "register",
            {
                "card": given.card,
                "session": given.session,
                "state": state,
                "reason": reason,
                "host": given.host,
                "name": given.name,
                "index": given.index,
                "product": given.product,
                "pid": given.pid,
                "headroom": given.headroom,
                "simulated": int(given.simulated),
                "sample": _sample(given.sample),
                "hosted": _hosted(given.models, given.slots),
            },
            keys=(store.keys.card(given.card),),
        )
        if reply.status == "taken":
            raise CardTaken(
                f"card {given.card} is held by another live agent "
                f"(its session lasts {reply.fields['left_ms']} ms more); "
                "stop that agent first"
            )
        if not reply.fields["more"]:
            return reply.now_ms


def _checked(reply: Reply, card: str) -> Reply:
    if reply.status == "lost":
        raise SessionLost(
            f"card {card}: this agent's session was given up by the ledger; it must register anew"
        )
    if reply.status == "stale_seq":
        raise StaleSeq(f"card {card}: call number is below the last one, {reply.fields['last']}")
    return reply


def _handed(job_id: str, job: records.Job, inputs: bytes | None, now_ms: int) -> HandedJob:
    # Events are wanted by listeners, and of an asynchronous job by those who come later.
    has_listeners = any(field.startswith("e:") for field in job)
    return HandedJob(
        job_id=job_id,
        lease_id=job["l"],
        lease_bytes=int(job["lb"]),
        model=job["m"],
        version=job["ve"],
        units=job["u"],
        attempt=int(job["at"]),
        alone="al" in job,
        run_timeout_ms=int(job["rl"]),
        total_left_ms=int(job["ct"] + job["tl"]) - now_ms,
        inputs=inputs,
        wants_events=not job["sy"] or has_listeners,
        request_id=job["rq"] or None,
    )


def _handout(reply: Reply, card: str) -> Handout:
    fields = _checked(reply, card).fields
    packed, inputs = reply.blobs[::2], reply.blobs[1::2]
    jobs = tuple(
        _handed(job_id, records.unpack_job(record), given or None, reply.now_ms)
        for job_id, record, given in zip(fields["jobs"] or (), packed, inputs, strict=True)
    )
    return Handout(reply.now_ms, jobs, tuple(fields["verdicts"] or ()), bool(fields["more"]))


async def claim(
    store: Store,
    *,
    card: str,
    session: str,
    seq: int,
    want: int,
    starts: Sequence[Start] = (),
    sample: Sample | None = None,
) -> Handout:
    """Up to `want` (at most 16 per call) leased jobs. Raises SessionLost, StaleSeq."""
    reply = await store.run(
        "claim",
        {
            "card": card,
            "session": session,
            "seq": seq,
            "want": want,
            "starts": _starts(starts),
            "sample": _sample(sample),
        },
        keys=(store.keys.card(card),),
    )
    return _handout(reply, card)


def _reports(reports: Sequence[Report]) -> tuple[list[dict[str, Any]], list[bytes]]:
    if len(reports) > REPORTS_PER_CALL:
        raise ValueError(f"{len(reports)} reports in one call; at most {REPORTS_PER_CALL}")
    told: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for report in reports:
        fields: dict[str, Any] = {
            "job": report.job_id,
            "lease": report.lease_id,
            "kind": report.kind,
            "peak": report.peak_bytes,
            "run_ms": report.run_ms,
        }
        if report.alone:
            fields["alone"] = True
        if report.code is not None:
            fields["code"] = report.code
        if report.detail is not None:
            # What a model raised may hold anything; the script must not meet it after its first write.
            fields["detail"] = str(report.detail)
        if report.field is not None:
            fields["field"] = report.field
        if report.is_stored:
            fields["result_bytes"] = report.result_bytes
        elif report.result is not None:
            fields["result_index"] = FIRST_RESULT_ARGUMENT + len(blobs)
            blobs.append(report.result)
        told.append(fields)
    return told, blobs


async def finish(
    store: Store,
    *,
    card: str,
    session: str,
    seq: int,
    reports: Sequence[Report],
    starts: Sequence[Start] = (),
    sample: Sample | None = None,
    want: int,
) -> Handout:
    """Report up to 16 jobs and take the next. verdicts answer the reports in order. Raises SessionLost,
    StaleSeq.
    """
    told, blobs = _reports(reports)
    reply = await store.run(
        "finish",
        {
            "card": card,
            "session": session,
            "seq": seq,
            "want": want,
            "starts": _starts(starts),
            "sample": _sample(sample),
            "reports": told,
        },
        keys=(store.keys.card(card),),
        blobs=blobs,
    )
    return _handout(reply, card)


async def card_down(
    store: Store,
    *,
    card: str,
    session: str,
    seq: int,
    reason: str,
    reports: Sequence[Report] = (),
    starts: Sequence[Start] = (),
) -> Handout:
    """Before a kill: nothing is granted until a beat says ready with a fresh sample. Raises SessionLost,
    StaleSeq.
    """
    told, blobs = _reports(reports)
    reply = await store.run(
        "card_down",
        {
            "card": card,
            "session": session,
            "seq": seq,
            "reason": reason,
            "starts": _starts(starts),
            "reports": told,
        },
        keys=(store.keys.card(card),),
        blobs=blobs,
    )
    return _handout(reply, card)


async def heartbeat(store: Store, *, card: str, session: str, beat: Beat, slots: int = 0) -> BeatAnswer:
    """Renew the session. slots: of the card, needed when beat.models is given. Raises SessionLost."""
    reply = await store.run(
        "heartbeat",
        {
            "card": card,
            "session": session,
            "state": beat.state,
            "reason": beat.reason,
            "applied": beat.applied_seq,
            "held": {lease_id: job_id for job_id, lease_id in beat.held},
            "starts": _starts(beat.starts),
            "sample": _sample(beat.sample),
            "hosted": _hosted(beat.models, slots) if beat.models is not None else None,
        },
        keys=(store.keys.card(card),),
    )
    fields = _checked(reply, card).fields
    return BeatAnswer(
        now_ms=reply.now_ms,
        cancels=tuple(
            Cancel(cancel["job"], cancel["lease"], bool(cancel["force"]), cancel["reason"])
            for cancel in fields["cancels"] or ()
        ),
        recalls=tuple(fields["recalls"] or ()),
        operator_state=fields["operator"],
        has_work=bool(fields["has_work"]),
        more=bool(fields["more"]),
        disputed=dict(fields["disputed"] or ()),
    )


async def leave(store: Store, *, card: str, session: str) -> None:
    """A clean end: what is still held runs elsewhere. Raises SessionLost."""
    while True:
        reply = await store.run("leave", {"card": card, "session": session}, keys=(store.keys.card(card),))
        if not _checked(reply, card).fields["more"]:
            return


async def emit(
    store: Store,
    *,
    card: str,
    session: str,
    job_id: str,
    lease_id: str,
    attempt: int,
    events: Sequence[tuple[str, Mapping[str, Any]]],
) -> bool:
    """Progress and streamed output, (type, data) each. False: fenced off. Not repeated on an unknown outcome:
    an event that is lost is no harm, one that comes twice would be.
    """
    reply = await store.run(
        "emit",
        {
            "card": card,
            "session": session,
            "job": job_id,
            "lease": lease_id,
            "attempt": attempt,
            "types": [kind for kind, _ in events],
        },
        keys=(store.keys.card(card), store.keys.job(job_id)),
        blobs=[msgpack.packb(dict(data)) for _, data in events],
        is_idempotent=False,
    )
    return reply.status == "ok"


Hint = Literal["work", "look"]
"""There may be work to claim; or also something that only a beat's answer tells, as a cancel."""


class WakeListener:
    """Blocks on a card's wake list over a connection of its own. A token is a hint, the tables are true."""

    def __init__(self, store: Store, card: str, *, longest_s: float = 5.0) -> None:
        self._store = store
        self._name = store.keys.name("wake", card)
        self._longest_s = longest_s
        self._line = store.blocking_line(longest_s)

    async def wait(self, timeout_s: float) -> Hint | None:
        """The next hint, None when there was none. Raises errors.StoreUnavailable. Never put a timeout of
        your own around it.
        """
        longest_s = max(0.05, min(timeout_s, self._longest_s))
        popped = await self._store.wait_for(self._line, "BLPOP", self._name, longest_s)
        if popped is None:
            return None
        return "work" if popped[1] == b"work" else "look"

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._line.close()
