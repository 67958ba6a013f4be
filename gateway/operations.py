"""What only an operator may do over HTTP: PATCH of a card's state. Cancelling by force lies with the jobs."""

from __future__ import annotations

from typing import cast, get_args

from starlette.requests import Request
from starlette.responses import Response

from gateway import body, headers, paths, rendering
from gateway.context import Gateway
from gateway.parsing import Allowance, parse_json
from scheduler import documents
from scheduler.states import OperatorState
from vramgate.errors import InvalidInput

STATES: tuple[str, ...] = get_args(OperatorState)
MAX_REASON = 200
MAX_WISH_BYTES = 4096


async def patch_card(gateway: Gateway, request: Request) -> Response:
    """Make a card ready, cordoned or draining: {"state": ..., "reason": ...}; for operators."""
    headers.require_operator(request)
    form = headers.parse_accept(headers.get(request, b"accept"))
    card = paths.card_id(request)
    body.check_length(request, MAX_WISH_BYTES)
    content_type = headers.get(request, b"content-type")
    if body.kind_of(content_type) != "json":
        raise body.not_read(content_type, "application/json", by="this route")
    limits = gateway.settings.limits
    wish = parse_json(await body.read(request, MAX_WISH_BYTES), limits.nesting, Allowance(limits.values))
    state, reason = _read_wish(wish)
    view = await gateway.ledger.set_card_state(card, state, reason=reason)
    return rendering.render(documents.card_document(view), form)


def _read_wish(wish: object) -> tuple[OperatorState, str]:
    if not isinstance(wish, dict) or not wish.keys() <= {"state", "reason"} or "state" not in wish:
        raise InvalidInput(
            f'the body must be {{"state": one of {", ".join(STATES)}, "reason": optional text}}'
        )
    state, reason = wish["state"], wish.get("reason", "")
    if state not in STATES:
        raise InvalidInput(
            f"state must be one of {', '.join(STATES)}, got {str(state)[:40]!r}", field="state"
        )
    if not isinstance(reason, str) or len(reason) > MAX_REASON:
        raise InvalidInput(f"reason must be text of at most {MAX_REASON} characters", field="reason")
    return cast(OperatorState, state), reason
