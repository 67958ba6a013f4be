"""POST /v1/models/{model}/infer: from a request to an answer.

Owns: the order of the checks (sizes, key, form, schema, units, all before anything is stored) and the three
ways to answer: wait for it, 202 at once or after a while, or a stream of events. Does not own: each of those
checks.
"""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response

from gateway import body, headers, jobs, metrics, rendering
from gateway.body import Body
from gateway.catalogue import Entry
from gateway.context import Gateway
from gateway.events import EventStream
from gateway.headers import ANONYMOUS, Form, Preference
from gateway.threads import off_loop
from gateway.waiter import Ended, wait_for_outcome
from scheduler.fingerprint import canonical, fingerprint
from scheduler.submissions import Outcome, SubmitRequest, Submitted
from vramgate.errors import ClientLeft, Draining, Lost, Refused, StoreUnavailable, UnknownJob

SETTLE_MARGIN_S = 5.0
"""The ledger settles a job at its total clock; so much later its outcome must have arrived here."""

_NO_CARD = ("no_ready_card", "wait_timeout")


async def infer(gateway: Gateway, request: Request) -> Response:
    """Validate, submit, and answer in the way that was asked for."""
    body.check_length(request, gateway.settings.limits.body_bytes)
    form = headers.parse_accept(headers.get(request, b"accept"), events=True)
    preference = headers.parse_prefer(headers.get(request, b"prefer"))
    key = headers.parse_key(request)
    entry = await gateway.catalogue.find(request.path_params["model"])
    content = await body.read(request, gateway.settings.limits.body_bytes)
    kind = body.kind_of(headers.get(request, b"content-type"))
    parts = await body.read_form(request, content) if kind == "fields" else None
    submit = await off_loop(
        body.weigh(kind, content),
        lambda: _submit_request(
            gateway,
            entry,
            body.take_apart(request, content, parts, gateway.settings.limits),
            key=key,
            request_id=headers.request_id(request),
            is_async=preference.is_async and form != "events",
            wants_events=form == "events",
        ),
    )
    try:
        response = await _answer(gateway, request, submit, form, preference)
    except Refused as failure:
        error = failure
        if isinstance(failure, UnknownJob):
            # Whoever asks for a run names no job: it is the ledger that has forgotten the one that it stored.
            error = Lost(job_id=failure.job_id, retry_after_s=1)
        refused = gateway.catalogue.forget(entry.asked) if error.code == "unknown_model" else error
        metrics.inferences(entry.name, refused.code).inc()
        if refused.code in _NO_CARD and (why := gateway.catalogue.why_nowhere(entry.name)) is not None:
            refused.detail = f"{refused.detail}; {why}"
        raise refused from None
    metrics.inferences(entry.name, "accepted" if response.status_code == 202 else "answered").inc()
    return response


def _submit_request(
    gateway: Gateway,
    entry: Entry,
    parts: Body,
    *,
    key: str | None,
    request_id: str | None,
    is_async: bool,
    wants_events: bool,
) -> SubmitRequest:
    clocks, options = gateway.settings.clocks, parts.options
    measured = entry.measure(parts, options.vram)
    inputs = canonical(measured.inputs)
    return SubmitRequest(
        job_id=secrets.token_hex(16),
        model=entry.asked,
        inputs=inputs,
        lease_bytes=measured.lease_bytes,
        units=measured.units,
        worker=gateway.ledger.worker,
        is_async=is_async,
        priority=options.priority,
        max_wait_ms=options.max_wait_ms(clocks),
        run_timeout_ms=options.run_timeout_ms(clocks),
        total_timeout_ms=options.total_timeout_ms(clocks),
        tenant=ANONYMOUS,
        key=key,
        fingerprint=None if key is None else fingerprint(entry.name, inputs),
        request_id=request_id,
        wants_events=wants_events,
    )


async def _answer(
    gateway: Gateway, request: Request, submit: SubmitRequest, form: Form, preference: Preference
) -> Response:
    if gateway.lifecycle.is_closing:
        raise Draining()
    submitted = await gateway.ledger.submit(submit)
    if form == "events":
        return EventStream(gateway, submitted.job_id, submit=submit, outcome=submitted.outcome)
    if submitted.outcome is not None:
        return await _rendered(submitted.outcome, form, is_replayed=True)
    wait_s = _wait_s(submit, preference)
    if wait_s <= 0:
        return await _accepted(gateway, submitted, form, preference)
    outcome = await wait_for_outcome(gateway, submitted.job_id, request, timeout_s=wait_s)
    return await _conclude(gateway, submit, submitted, outcome, form, preference)


def _wait_s(submit: SubmitRequest, preference: Preference) -> float:
    return preference.wait_s if submit.is_async else submit.total_timeout_ms / 1000 + SETTLE_MARGIN_S


async def _conclude(
    gateway: Gateway,
    submit: SubmitRequest,
    submitted: Submitted,
    outcome: Outcome | Ended,
    form: Form,
    preference: Preference,
) -> Response:
    if isinstance(outcome, Outcome):
        response = await _rendered(outcome, form)
        if preference.applied:
            response.headers["Preference-Applied"] = preference.applied
        return response
    if submit.is_async:
        return await _accepted(gateway, submitted, form, preference)
    job_id = submitted.job_id
    if outcome is Ended.LEFT:
        gateway.ledger.give_up(job_id, client=submit.job_id, tenant=submit.tenant, key=submit.key)
        raise ClientLeft(job_id=job_id)
    if outcome is Ended.CLOSING:
        raise Draining(
            "this gateway ends before the job; send the request again under the same key, or GET the job",
            job_id=job_id,
        )
    found = await gateway.ledger.outcome(job_id, tenant=submit.tenant)
    if found is None:
        raise StoreUnavailable(
            "the job is past its clocks and the ledger has not settled it yet; ask for it again",
            job_id=job_id,
        )
    return await _rendered(found, form)


async def _rendered(outcome: Outcome, form: Form, *, is_replayed: bool = False) -> Response:
    return await off_loop(
        len(outcome.result or b""), lambda: rendering.render_answer(outcome, form, is_replayed=is_replayed)
    )


async def _accepted(gateway: Gateway, submitted: Submitted, form: Form, preference: Preference) -> Response:
    """202 with the job; its outcome in it where it has just settled."""
    view = await gateway.ledger.view(submitted.job_id, tenant=ANONYMOUS)
    extra = {"Location": f"/v1/jobs/{view.id}", "Vary": rendering.VARY}
    if preference.applied:
        extra["Preference-Applied"] = preference.applied
    return await jobs.render_job(gateway, view, form, status=202, extra=extra)
