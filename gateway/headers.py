"""What a request's headers ask for: the form of the answer, the key, how long to wait, and who calls.

Owns: parsing of Accept, Prefer and Idempotency-Key, the headers that are echoed, and which peers count as
local. Does not own: what is done about any of it.
"""

from __future__ import annotations

import functools
import ipaddress
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request

from vramgate.errors import Forbidden, Malformed, NotAcceptable

Form = Literal["json", "msgpack", "events"]
ANONYMOUS = "-"
"""The tenant of every caller until keys exist."""

_FORMS: dict[str, Form] = {
    "application/json": "json",
    "application/msgpack": "msgpack",
    "application/x-msgpack": "msgpack",
    "application/vnd.msgpack": "msgpack",
    "text/event-stream": "events",
}
_FORWARDING = (
    b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", b"via",
)  # fmt: skip
_ECHOED = (("x-request-id", b"x-request-id"), ("traceparent", b"traceparent"))
_MAX_ECHO = 255
_FIELDS = "vramgate.headers"


@dataclass(frozen=True, slots=True)
class Preference:
    """RFC 7240 as far as this service goes: `respond-async` and `wait`, and what was applied of it."""

    is_async: bool = False
    wait_s: float = 0.0
    applied: str | None = None


def get(request: Request, name: bytes) -> str | None:
    """One header by its lower-case name, repeated ones joined; the list is gone through once per request."""
    fields: dict[bytes, bytes] | None = request.scope.get(_FIELDS)
    if fields is None:
        given = request.scope["headers"]
        fields = dict(given)
        if len(fields) != len(given):
            fields = {each: b", ".join(value for other, value in given if other == each) for each in fields}
        request.scope[_FIELDS] = fields
    value = fields.get(name)
    return None if value is None else value.decode("latin-1")


@functools.lru_cache(maxsize=256)
def parse_accept(header: str | None, *, events: bool = False) -> Form:
    """The form of the answer. Raises NotAcceptable where none that this route has is allowed.

    The highest quality wins; among equals JSON comes first, since that is what a plain wildcard means.
    """
    if not header or header == "*/*":
        return "json"
    best: tuple[float, int, Form] | None = None
    for part in header.split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        quality = _quality(parameters)
        form = _form_of(media.lower(), events=events)
        if form is None or quality <= 0:
            continue
        rank = (quality, -("json", "msgpack", "events").index(form), form)
        if best is None or rank[:2] > best[:2]:
            best = rank
    if best is None:
        offered = "application/json, application/msgpack" + (", text/event-stream" if events else "")
        raise NotAcceptable(f"Accept: {header[:200]!r} allows none of {offered}")
    return best[2]


def _form_of(media: str, *, events: bool) -> Form | None:
    if media in ("*/*", "application/*"):
        return "json"
    form = _FORMS.get(media)
    return None if form == "events" and not events else form


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


@functools.lru_cache(maxsize=256)
def parse_prefer(header: str | None) -> Preference:
    """`respond-async` and `respond-async, wait=10`. Preferences that are not understood are ignored."""
    if not header:
        return Preference()
    wanted = [part.split(";")[0].strip().lower() for part in header.split(",")]
    if "respond-async" not in wanted:
        return Preference()
    waits = [part.partition("=")[2].strip(' "') for part in wanted if part.startswith("wait=")]
    if waits and waits[0].isascii() and waits[0].isdigit() and len(waits[0]) < 6:
        return Preference(True, float(waits[0]), f"respond-async, wait={int(waits[0])}")
    return Preference(True, 0.0, "respond-async")


def parse_key(request: Request) -> str | None:
    """The idempotency key, bare or quoted. Raises Malformed for anything but 1 to 255 printable ASCII."""
    given = get(request, b"idempotency-key")
    if given is None:
        return None
    if sum(name == b"idempotency-key" for name, _ in request.scope["headers"]) > 1:
        raise Malformed("the header Idempotency-Key was sent more than once")
    text = given.strip(" \t")
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = text[1:-1]
    if not 1 <= len(text) <= 255:
        raise Malformed(f"Idempotency-Key must have 1 to 255 characters, it has {len(text)}")
    if not (text.isascii() and text.isprintable()):
        raise Malformed("Idempotency-Key must be printable ASCII")
    return text


def echoed(request: Request) -> dict[str, str]:
    """The tracing headers that go back as they came; those too long or not printable are dropped."""
    back = {}
    for name, key in _ECHOED:
        value = get(request, key)
        if value and len(value) <= _MAX_ECHO and value.isascii() and value.isprintable():
            back[name] = value
    return back


def request_id(request: Request) -> str | None:
    """What ties this request to a trace in the logs of gateway and agent: X-Request-Id, else traceparent."""
    back = echoed(request)
    return back.get("x-request-id") or back.get("traceparent")


def is_local(request: Request) -> bool:
    """Whether the caller sits on this host: a loopback peer, and no sign of a proxy in between."""
    if request.client is None or any(get(request, name) is not None for name in _FORWARDING):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def require_operator(request: Request) -> None:
    """Raises Forbidden unless the caller may operate the pool: until there are keys, local callers only."""
    if not is_local(request):
        raise Forbidden("operating routes answer callers on this host only; use the vramgate command there")
