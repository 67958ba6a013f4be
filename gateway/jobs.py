"""The jobs of a caller: one by id (also waited for), a page of them, and the end of one.

Owns: the routes under /v1/jobs but for the events. Does not own: the rules of cancelling
(`scheduler.admission`).
"""

from __future__ import annotations

import math
import secrets
from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from gateway import headers, paths, rendering
from gateway.context import Gateway
from gateway.headers import ANONYMOUS, Form
from gateway.threads import off_loop
from gateway.waiter import wait_for_outcome
from scheduler import documents
from scheduler.states import SETTLED, State
from scheduler.submissions import Outcome
from scheduler.views import JobView
from vramgate.errors import InvalidInput

MAX_WAIT_S = 3600.0
MAX_PAGE = 500
STATES: tuple[str, ...] = get_args(State)


async def get_job(gateway: Gateway, request: Request) -> Response:
    """A job in any state; with wait_s, not before it is settled or so many seconds have passed."""
    form = headers.parse_accept(headers.get(request, b"accept"))
    wait_s = _wait_s(request.query_params.get("wait_s"))
    job_id = paths.job_id(request)
    client = secrets.token_hex(16) if wait_s > 0 else None
    view = await gateway.ledger.view(job_id, tenant=ANONYMOUS, client=client)
    if client is not None and view.state not in SETTLED:
        await wait_for_outcome(gateway, job_id, request, timeout_s=wait_s, is_listener=True)
        view = await gateway.ledger.view(job_id, tenant=ANONYMOUS)
        if view.state not in SETTLED:
            await gateway.ledger.unwatch(job_id, client=client)
    return await render_job(gateway, view, form)


async def delete_job(gateway: Gateway, request: Request) -> Response:
    """Cancel a job for all its callers; the same answer when it was finished before."""
    form = headers.parse_accept(headers.get(request, b"accept"))
    force = _flag(request.query_params.get("force"), "force")
    if force:
        headers.require_operator(request)
    view = await gateway.ledger.cancel(paths.job_id(request), tenant=ANONYMOUS, force=force)
    return await render_job(gateway, view, form, status=202)


async def list_jobs(gateway: Gateway, request: Request) -> Response:
    """A page of jobs, newest first."""
    form = headers.parse_accept(headers.get(request, b"accept"))
    query = request.query_params
    state = query.get("state")
    if state is not None and state not in STATES:
        raise InvalidInput(f"state must be one of {', '.join(STATES)}, got {state[:40]!r}", field="state")
    page = await gateway.ledger.list_jobs(
        state=state,
        model=query.get("model"),
        tenant=ANONYMOUS,
        cursor=query.get("cursor"),
        limit=_limit(query.get("limit")),
    )
    document = documents.list_document([documents.job_document(view) for view in page.data], page.next)
    return rendering.render(document, form)


async def render_job(
    gateway: Gateway,
    view: JobView,
    form: Form,
    *,
    status: int = 200,
    extra: dict[str, str] | None = None,
) -> Response:
    """A job, and once it is settled its outcome."""
    outcome: Outcome | None = None
    if view.state in SETTLED:
        outcome = await gateway.ledger.outcome(view.id, tenant=ANONYMOUS)
    size = len(outcome.result or b"") if outcome is not None else 0
    return await off_loop(size, lambda: rendering.render_job(view, outcome, form, status=status, extra=extra))


def _wait_s(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise InvalidInput(
            f"wait_s must be from 0 to {MAX_WAIT_S:g} seconds, got {text[:40]!r}", field="wait_s"
        )
    return wait_s


def _limit(text: str | None) -> int:
    if text is None:
        return 50
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_PAGE):
        raise InvalidInput(f"limit must be from 1 to {MAX_PAGE}, got {text[:40]!r}", field="limit")
    return int(text)


def _flag(text: str | None, name: str) -> bool:
    if text in (None, "false", "0"):
        return False
    if text in ("true", "1", ""):
        return True
    raise InvalidInput(f"{name} must be true or false, got {str(text)[:40]!r}", field=name)
