"""The pool as operators see it: cards with their sums, leases, queues, models; and the operators' levers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgpack

from scheduler.cards import unpack_hosted
from scheduler.registration import HostedModel, Sample
from scheduler.states import OperatorState
from scheduler.store import Reply, Store
from scheduler.views import CardView, LeaseView, Ledger, ModelOnCard, ModelView, QueueView, with_reason
from vramgate import errors


async def _ask(store: Store, *parts: str) -> Reply:
    return await store.run("inventory", dict.fromkeys(parts, True))


async def cards(store: Store) -> tuple[CardView, ...]:
    """Every card that is known, by host and index."""
    reply = await _ask(store, "cards")
    views = [
        _card_view(told, msgpack.unpackb(packed) if packed else [], reply.now_ms, store)
        for told, packed in zip(reply.fields["cards"] or (), reply.blobs, strict=True)
    ]
    return tuple(sorted(views, key=lambda view: (view.host, view.index, view.id)))


def _state(raw: Mapping[str, str], is_open: bool) -> tuple[str, str | None]:
    operator, agent = raw.get("op", "ready"), raw.get("ag", "lost")
    if agent == "lost" or not raw.get("sid"):
        return "lost", raw.get("rs") or "its agent is not there"
    if operator != "ready":
        return operator, raw.get("or") or f"{operator} by an operator"
    if agent != "ready":
        return agent, raw.get("rs") or None
    return ("ready", None) if is_open else ("down", "its memory reading is older than two beats")


def _as_taken(model: HostedModel, dispute: str | None) -> HostedModel:
    """A model as the ledger takes it: not ready where its version is in dispute, whatever its agent says."""
    if dispute is None:
        return model
    return replace(model, ready=False, slots=0, reason=model.reason or dispute)


def _card_view(told: Mapping[str, Any], hosted: list[dict[str, Any]], now_ms: int, store: Store) -> CardView:
    raw: Mapping[str, str] = told["raw"]
    total = told["sum"]

    def number(field: str) -> int:
        return int(float(raw.get(field) or 0))

    state, reason = _state(raw, bool(told["open"]))
    sample = None
    if number("to"):
        sample = Sample(
            read_ms=number("sm"),
            total=number("to"),
            driver=number("dr"),
            used=number("us"),
            own=number("ow"),
            allocated=number("al"),
            reserved=number("rv"),
            context=number("cx"),
        )
    return CardView(
        id=told["id"],
        host=raw.get("host", ""),
        name=raw.get("nm", told["id"]),
        index=number("ix"),
        product=raw.get("pr", ""),
        state=state,
        reason=reason,
        operator_state=raw.get("op", "ready"),
        session_left_ms=max(0, int(told["left_ms"])),
        simulated=raw.get("si") == "1",
        slots=number("sl"),
        jobs=number("nj"),
        running=int(told["running"]),
        ledger=Ledger(
            usable=int(total["usable"]),
            resident=number("re"),
            jobs=number("jb"),
            external=number("ex"),
            lingering=number("li"),
            foreign=number("fo"),
            overrun=number("ov"),
            withheld=int(total["withheld"]),
            reserved_for_head=int(total["reserved"]),
            grantable=int(total["grantable"]),
        ),
        sample=sample,
        sample_age_ms=now_ms - number("sm") if number("sm") else None,
        headroom=number("hr"),
        peak_leased_bytes=number("pk"),
        models=tuple(_as_taken(HostedModel(**fields), raw.get(f"d:{fields['name']}")) for fields in hosted),
        head=raw.get("hj") or None,
    )


async def card(store: Store, name: str) -> CardView:
    """One card by its id, by a unique prefix of it or by its `host:0` name. Raises UnknownCard, also when
    several fit.
    """
    known = await cards(store)
    exact = [view for view in known if name in (view.id, view.name)]
    fitting = exact or [view for view in known if view.id.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise errors.UnknownCard(
            f"{name!r} fits {len(fitting)} cards: {', '.join(view.id for view in fitting)}"
        )
    raise errors.UnknownCard(
        f"there is no card {name!r}; known: {', '.join(view.id for view in known) or 'none'}"
    )


async def set_card_state(store: Store, name: str, state: OperatorState, *, reason: str = "") -> CardView:
    """Make a card ready, cordoned (nothing new is granted) or draining (what waits on it goes elsewhere)."""
    target = await card(store, name)
    while True:
        reply = await store.run(
            "card_state",
            {"card": target.id, "state": state, "reason": reason},
            keys=(store.keys.card(target.id),),
        )
        if reply.status == "unknown":
            raise errors.UnknownCard(f"there is no card {target.id!r}")
        if not reply.fields["more"]:
            return await card(store, target.id)


async def leases(store: Store) -> tuple[LeaseView, ...]:
    """Every live lease, oldest first."""
    reply = await _ask(store, "leases")
    found = []
    for told in reply.fields["leases"] or ():
        record = told["record"]
        state = "running" if record["started"] else "handed" if record["handed"] else "leased"
        found.append(
            LeaseView(
                id=told["id"],
                card=told["card"],
                kind="job",
                bytes=int(record["bytes"]),
                job_id=record["job"],
                model=record["model"],
                state="ending" if record["ending"] else state,
                granted_ms=int(record["granted"]),
                age_ms=reply.now_ms - int(record["granted"]),
            )
        )
    return tuple(sorted(found, key=lambda view: (view.granted_ms, view.id)))


async def queue(store: Store) -> tuple[QueueView, ...]:
    """The classes with waiting jobs."""
    reply = await _ask(store, "queue")
    views = [
        QueueView(
            model=told["model"],
            waiting=int(told["waiting"]),
            waiting_bytes=int(told["bytes"]),
            oldest_ms=max(0, reply.now_ms - int(told["oldest"])) if told["oldest"] else None,
            interval_ms=round(told["interval"]) or None,
        )
        for told in reply.fields["queue"] or ()
    ]
    return tuple(sorted(views, key=lambda view: view.model))


async def models(store: Store) -> tuple[ModelView, ...]:
    """Every model that is known, with its versions and the cards that host it."""
    reply = await _ask(store, "models")
    places: dict[str, dict[str, ModelOnCard]] = {}
    for view in await cards(store):
        for model in view.models:
            places.setdefault(model.name, {})[view.id] = _on_card(model, view)
    return tuple(
        ModelView(
            name=told["name"],
            created_ms=int(told["since"]),
            last_seen_ms=int(told["seen"]),
            versions=tuple(unpack_hosted(reply.blobs[index - 1]) for index in told["versions"] or ()),
            cards=places.get(told["name"], {}),
        )
        for told in reply.fields["models"] or ()
    )


def _on_card(model: HostedModel, card: CardView) -> ModelOnCard:
    """What the agent says of the model goes first; a loaded model is no readier than its card."""
    is_ready = model.ready and card.state == "ready"
    if is_ready or not model.ready:
        return ModelOnCard(model.version, model.ready, is_ready, model.reason)
    return ModelOnCard(model.version, True, False, f"the card is {with_reason(card.state, card.reason)}")


async def audit(store: Store) -> Mapping[str, int]:
    """Recompute every card's sums from its leases, and look at every live job: card -> drift found and
    mended. 0 everywhere, or something is wrong; what was put right beside sums is drift in `totals` too.
    """
    reply = first = await store.run("audit", {"cards": []})
    while reply.fields["more"]:
        reply = await store.run("audit", {"go_on": 1})
    return {card_id: int(drift) for card_id, drift in first.fields["drift"] or ()}


async def totals(store: Store) -> Mapping[str, int]:
    """The pool's counters: submitted, joined, replayed, granted, runs, runs_again, settled.<state>,
    code.<code>, refused.<code>, requeued.<event>, settled_twice, drift, mended.<fault>, graces,
    sessions_lost, client_left.
    """
    raw = await store.guarded(store.redis.hgetall, store.keys.name("stats"))
    return {name.decode(): int(value) for name, value in raw.items()}
