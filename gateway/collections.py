"""The read-only collections of the pool: models, cards, leases, and the queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway import headers, rendering
from gateway.context import Gateway
from scheduler import documents

View = TypeVar("View")


async def list_models(gateway: Gateway, request: Request) -> Response:
    """The models that agents have published within `retention.known_ttl_s`."""
    return await _list(request, gateway.ledger.models, documents.model_document)


async def get_model(gateway: Gateway, request: Request) -> Response:
    """One model: its versions, schemas, estimates and cards."""
    form = headers.parse_accept(headers.get(request, b"accept"))
    name = request.path_params["model"]
    views = {view.name: view for view in await gateway.ledger.models()}
    if name not in views:
        raise gateway.catalogue.refusal(name, views)
    return rendering.render(documents.model_document(views[name]), form)


async def list_cards(gateway: Gateway, request: Request) -> Response:
    """Every known card with both identities of its memory."""
    return await _list(request, gateway.ledger.cards, documents.card_document)


async def list_leases(gateway: Gateway, request: Request) -> Response:
    """The live leases of all cards; tokens are never shown."""
    return await _list(request, gateway.ledger.leases, documents.lease_document)


async def list_queue(gateway: Gateway, request: Request) -> Response:
    """What waits: one row per class of jobs (a model, or a model at a version)."""
    return await _list(request, gateway.ledger.queue, documents.queue_document)


async def _list(
    request: Request,
    read: Callable[[], Awaitable[Iterable[View]]],
    show: Callable[[View], documents.Document],
) -> Response:
    form = headers.parse_accept(headers.get(request, b"accept"))
    return rendering.render(documents.list_document(map(show, await read())), form)
