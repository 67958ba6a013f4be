"""Is this process alive, may a balancer send it requests, can the pool serve, and what does it count.

/livez asks nobody. /readyz?scope=gateway is for load balancers: an overloaded or cardless pool still gets
requests, so that callers see our refusal and not the balancer's. /readyz alone says whether a request could
succeed.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway import metrics, problems, rendering
from gateway.context import Gateway
from vramgate.errors import Draining, InvalidInput, NoReadyCard, StoreUnavailable


async def livez(gateway: Gateway, request: Request) -> Response:
    """200 while the process answers at all."""
    return rendering.render({"status": "alive"})


async def readyz(gateway: Gateway, request: Request) -> Response:
    """200 when a request could succeed now, else 503 with the reason.

    Not logged as a refusal: it is asked all the time.
    """
    scope = request.query_params.get("scope")
    if scope not in (None, "gateway"):
        raise InvalidInput(f"scope must be gateway or left out, got {scope[:40]!r}", field="scope")
    if gateway.lifecycle.is_draining or not gateway.lifecycle.is_started:
        return problems.problem_response(Draining())
    if scope is None and not gateway.ledger.is_answering:
        return problems.problem_response(StoreUnavailable())
    if scope is None and gateway.ledger.ready_cards < 1:
        why = gateway.catalogue.why_nothing()
        no_card = "no card of this pool is ready with a model" + (f": {why}" if why else "")
        return problems.problem_response(NoReadyCard(no_card))
    return rendering.render({"status": "ready"})


async def show_metrics(gateway: Gateway, request: Request) -> Response:
    """Prometheus text. A silent ledger is a gauge at 0 and not a failed scrape."""
    try:
        ledger = gateway.ledger
        pool = metrics.PoolCollector(await ledger.cards(), await ledger.queue(), await ledger.totals())
    except StoreUnavailable:
        pool = metrics.PoolCollector(None)
    return Response(metrics.exposition(pool), media_type=metrics.CONTENT_TYPE)
