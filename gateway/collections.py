"""The read-only collections of the pool: models, cards, leases, and the queue."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway import headers, rendering
from gateway.context import Gateway
from scheduler import documents
from vramgate.errors import UnknownModel


async def list_models(gateway: Gateway, request: Request) -> Response:
    """GET /v1/models: what agents have published within `retention.known_ttl_s`."""
    form = headers.parse_accept(headers.get(request, b"accept"))
    views = await gateway.ledger.models()
    return rendering.render(documents.list_document(documents.model_document(view) for view in views), form)


async def get_model(gateway: Gateway, request: Request) -> Response:
    """GET /v1/models/{id}."""
    form = headers.parse_accept(headers.get(request, b"accept"))
    name = request.path_params["model"]
    for view in await gateway.ledger.models():
        if view.name == name:
            return rendering.render(documents.model_document(view), form)
    raise UnknownModel(f"no agent has served {name[:64]!r} lately; GET /v1/models lists those known")


async def list_cards(gateway: Gateway, request: Request) -> Response:
    """GET /v1/cards: every known card with both identities of its memory."""
    form = headers.parse_accept(headers.get(request, b"accept"))
    views = await gateway.ledger.cards()
    return rendering.render(documents.list_document(documents.card_document(view) for view in views), form)


async def list_leases(gateway: Gateway, request: Request) -> Response:
    """GET /v1/leases: live leases of all cards; tokens are never among it."""
    form = headers.parse_accept(headers.get(request, b"accept"))
    views = await gateway.ledger.leases()
    return rendering.render(documents.list_document(documents.lease_document(view) for view in views), form)


async def list_queue(gateway: Gateway, request: Request) -> Response:
    """GET /v1/queue: one row per class of waiting jobs."""
    form = headers.parse_accept(headers.get(request, b"accept"))
    views = await gateway.ledger.queue()
    return rendering.render(documents.list_document(documents.queue_document(view) for view in views), form)
