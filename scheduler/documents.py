"""The public objects: how jobs, cards, leases, queues and models are shown over HTTP and by `--json`.

Owns: the shape of every object that a caller sees, in one place, so that a gateway and the command line print
the same. Does not own: reading the ledger (`inventory`, `jobs`), nor headers and statuses (`gateway`).

Every function is pure. Bytes inside outputs become base64 text, unless `binary` asks for them as they are
(msgpack).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import msgpack

from scheduler.registration import HostedModel, Sample
from scheduler.states import SETTLED
from scheduler.submissions import Outcome
from scheduler.views import CardView, JobView, LeaseView, ModelView, QueueView
from vramgate import errors
from vramgate.quantities import seconds_up

Document = dict[str, Any]


def list_document(data: Iterable[Document], cursor: str | None = None) -> Document:
    """One page of a collection; `next` is the cursor of the following page, or None."""
    return {"object": "list", "data": list(data), "next": cursor}


def text_form(value: Any) -> Any:
    """`value` with every bytes in it as base64 text: what JSON can carry."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(name): text_form(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [text_form(item) for item in value]
    return value


def outputs(outcome: Outcome, *, binary: bool = False) -> Any:
    """The outputs of a succeeded job. Raises ValueError when the outcome holds no result."""
    if outcome.result is None:
        raise ValueError(f"job {outcome.job_id} holds no result")
    value = msgpack.unpackb(outcome.result, raw=False, strict_map_key=False)
    return value if binary else text_form(value)


def outcome_error(outcome: Outcome) -> errors.Refused | None:
    """The refusal that an outcome stands for, None when it succeeded and its result is still stored."""
    if outcome.code is not None:
        return _error(outcome.job_id, outcome.code, outcome.detail, outcome.data)
    if outcome.state == "succeeded" and outcome.result is None:
        return errors.ResultExpired(job_id=outcome.job_id)
    return None


def answer_document(outcome: Outcome, *, binary: bool = False) -> Document:
    """The body of a 200 of infer. Raises ValueError when the outcome holds no result."""
    return {
        "id": outcome.job_id,
        "model": outcome.model,
        "version": outcome.version,
        "outputs": outputs(outcome, binary=binary),
        "card": outcome.card,
        "timing": _outcome_timing(outcome),
        "vram": {"leased_bytes": outcome.leased_bytes, "peak_bytes": outcome.peak_bytes},
        "degraded": outcome.degraded,
    }


def job_document(view: JobView, outcome: Outcome | None = None, *, binary: bool = False) -> Document:
    """A job in any state. Once settled it has an `error`, or, where its outcome was given too, a `result`."""
    document: Document = {
        "id": view.id,
        "object": "job",
        "state": view.state,
        "model": view.model,
        "version": view.version,
        "priority": view.priority,
        "position": view.position,
        "eta_s": None if view.eta_ms is None else seconds_up(view.eta_ms),
        "why": view.why,
        "attempts": view.attempt,
        "crashes": view.crashes,
        "clients": view.clients,
        "timing": _view_timing(view) if outcome is None else _outcome_timing(outcome),
        "card": view.card if outcome is None else outcome.card,
        "vram": {
            "leased_bytes": view.lease_bytes if outcome is None else outcome.leased_bytes,
            "peak_bytes": view.peak_bytes if outcome is None else outcome.peak_bytes,
        },
        "created_ms": view.created_ms,
        "started_ms": view.started_ms,
        "settled_ms": view.settled_ms,
    }
    if view.state not in SETTLED:
        return document
    error = _view_error(view) if outcome is None else outcome_error(outcome)
    if error is not None:
        document["error"] = error.problem()
    elif outcome is not None:
        document |= {"result": outputs(outcome, binary=binary), "degraded": outcome.degraded}
    return document


def card_document(view: CardView) -> Document:
    """A card with both identities of its memory.

    ledger: usable = resident + jobs + external + lingering + foreign + overrun + withheld + reserved_for_head
    + grantable.
    measured: total = driver + context + allocated + cached + external + unattributed + free; None while
    nothing was read.
    gap_bytes: what is leased to the agent's own process beyond what its tensors hold; below 0 they hold more.
    """
    leased = view.ledger.resident + view.ledger.jobs
    return {
        "id": view.id,
        "object": "card",
        "name": view.name,
        "host": view.host,
        "index": view.index,
        "product": view.product,
        "simulated": view.simulated,
        "state": view.state,
        "reason": view.reason,
        "operator_state": view.operator_state,
        "session_left_ms": view.session_left_ms,
        "slots": view.slots,
        "jobs": view.jobs,
        "running": view.running,
        "headroom_bytes": view.headroom,
        "leased_bytes": leased,
        "peak_leased_bytes": view.peak_leased_bytes,
        "gap_bytes": None if view.sample is None else leased - view.sample.allocated,
        "ledger": asdict(view.ledger),
        "measured": None if view.sample is None else _measured(view.sample),
        "sample_age_ms": view.sample_age_ms,
        "models": [
            {
                "id": model.name,
                "version": model.version,
                "ready": model.ready,
                "reason": model.reason,
                "slots": model.slots,
            }
            for model in view.models
        ],
        "head": view.head,
    }


def lease_document(view: LeaseView) -> Document:
    """A live lease. Tokens are never shown."""
    return {
        "id": view.id,
        "object": "lease",
        "kind": view.kind,
        "state": view.state,
        "cards": [view.card],
        "bytes": view.bytes,
        "job": view.job_id,
        "model": view.model,
        "granted_ms": view.granted_ms,
        "age_ms": view.age_ms,
    }


def queue_document(view: QueueView) -> Document:
    """One class of waiting jobs."""
    return {
        "id": view.model,
        "object": "queue",
        "model": view.model,
        "waiting": view.waiting,
        "waiting_bytes": view.waiting_bytes,
        "oldest_ms": view.oldest_ms,
        "interval_ms": view.interval_ms,
    }


def model_document(view: ModelView) -> Document:
    """A model, its versions and its cards. `created` is since when it is known, in seconds. ready: on a card
    that takes jobs now.
    """
    return {
        "id": view.name,
        "object": "model",
        "created": view.created_ms // 1000,
        "owned_by": view.versions[0].owned_by if view.versions else "vramgate",
        "ready": any(place.is_ready for place in view.cards.values()),
        "versions": [_version(version) for version in view.versions],
        "cards": [
            {"id": card, "version": place.version, "ready": place.is_ready, "reason": place.reason}
            for card, place in sorted(view.cards.items())
        ],
    }


def _version(model: HostedModel) -> Document:
    return {
        "version": model.version,
        "schema": model.schema,
        "output_schema": model.output_schema,
        "schema_hash": model.schema_hash,
        "units": model.units,
        "batch_units": model.batch_units,
        "max_batch": model.max_batch,
        "lanes": model.lanes,
        "estimate": {
            "resident_bytes": model.resident_bytes,
            "bytes_per_item": model.c0_item,
            "bytes_per_unit": model.c1,
        },
    }


def _measured(sample: Sample) -> Document:
    external = sum((sample.used_by_lease or {}).values())
    return {
        "total": sample.total,
        "driver": sample.driver,
        "context": sample.context,
        "allocated": sample.allocated,
        "cached": sample.reserved - sample.allocated,
        "external": external,
        # The remainders absorb what moved between two readings, so that the identity stays exact.
        "unattributed": sample.used - sample.reserved - sample.context - external,
        "free": sample.total - sample.driver - sample.used,
    }


def _view_timing(view: JobView) -> Document:
    end = view.now_ms if view.settled_ms is None else view.settled_ms
    total_ms = max(0, end - view.created_ms)
    return {"wait_ms": max(0, total_ms - view.run_ms), "run_ms": view.run_ms, "total_ms": total_ms}


def _outcome_timing(outcome: Outcome) -> Document:
    return {"wait_ms": outcome.wait_ms, "run_ms": outcome.run_ms, "total_ms": outcome.total_ms}


def _view_error(view: JobView) -> errors.Refused | None:
    return None if view.code is None else _error(view.id, view.code, view.detail, view.data)


def _error(job_id: str, code: str, detail: str | None, data: Mapping[str, Any]) -> errors.Refused:
    # A code from a newer release must not hide the job behind a failure of ours.
    kind = errors.by_code(code) if code in errors.TABLE else errors.Internal
    shown = {name: text_form(value) for name, value in data.items() if name != "retry_ms"}
    retry_ms = data.get("retry_ms")
    retry_after_s = None if retry_ms is None else max(1, seconds_up(int(retry_ms)))
    return kind(detail or "", job_id=job_id, retry_after_s=retry_after_s, **shown)
