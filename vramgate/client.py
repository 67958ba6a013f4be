"""The client of a gateway. It loads httpx and nothing else of weight.

Owns: how a request is written (JSON, or a raw body with its options as query parameters), the idempotency key
that makes a retry safe, when to retry and how long to wait, and the exception for each refusal. Does not own:
what a refusal means (`vramgate.errors.TABLE`), or the clocks of a job, which run in the service.

A retry always carries the key of the first try, so it joins the run in flight or gets its stored answer, and
never starts a second one. What is tried again, until the caller's deadline: connections that fail or fall
silent, a proxy's 502, 503 or 504, and refusals for which the table says `after` (not before Retry-After) or
`yes` (a few times only).
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from vramgate import errors

logger = logging.getLogger("vramgate.client")

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TOTAL_TIMEOUT_S = 100.0
READ_MARGIN_S = 10.0
"""The service answers within the job's total limit; this much later the connection must be broken."""

CONNECT_TIMEOUT_S = 5.0
BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
MAX_TRIES_AFTER_FAILED_RUN = 3
"""A run that ended as oom, crashed or internal may be the input's fault, so it is not hammered until the
deadline.
"""

_PROXY_STATUSES = frozenset({502, 503, 504})
_ACCEPT = "application/json, application/problem+json"


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time went, in ms by the service's clock."""

    wait_ms: int
    run_ms: int
    total_ms: int


@dataclass(frozen=True, slots=True)
class Vram:
    """Bytes that the job held and, where it could be told apart from others, the peak that it took."""

    leased_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a model. Bytes in `outputs` are base64 text, as JSON carries them.

    `degraded` names the fallback that ran instead, or is None. `replayed` says that the answer was stored by
    an earlier try under the same key. `tries` counts the requests that it took.
    """

    id: str
    model: str
    version: str
    outputs: Any
    card: str | None
    timing: Timing
    vram: Vram
    degraded: Any
    replayed: bool
    tries: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One request in the form that every try of it sends."""

    path: str
    params: dict[str, str]
    headers: dict[str, str]
    content: bytes
    read_timeout_s: float


class AsyncClient:
    """Talks to one gateway, or to several that serve one ledger: a try that got no answer goes on to the
    next.

    `key` is the bearer key. `timeout_s` is how long one try may stay without an answer before the request is
    sent again under the same key; by default the job's total limit and 10 s. Use it as an async context
    manager, or call `aclose`. It is safe to use from any number of tasks of one event loop.
    """

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        *,
        key: str | None = None,
        timeout_s: float | None = None,
        max_connections: int = 1000,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._urls = [one.rstrip("/") for one in ([url] if isinstance(url, str) else url)]
        if not self._urls:
            raise ValueError("url must name at least one gateway")
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            headers={"Accept": _ACCEPT} | ({"Authorization": f"Bearer {key}"} if key else {}),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=100),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections. A request that is under way fails."""
        await self._http.aclose()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        body: bytes | None = None,
        content_type: str = "application/octet-stream",
        idempotency_key: str | None = None,
        priority: int | None = None,
        max_wait_s: float | None = None,
        run_timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        vram: int | str | None = None,
        deadline_s: float | None = None,
    ) -> Answer:
        """Run `model` (or `model@version`) on `inputs`, or on `body`, its only required field as it is.

        Options left out have the service's defaults. `deadline_s` bounds everything, waiting and retries
        included; by default the job's total limit and 10 s. Raises ValueError for a call that makes no sense,
        the class of the refusal's code (`vramgate.errors`), or `Unreachable` when no gateway answered in
        time.
        """
        options = {
            "priority": priority,
            "max_wait_s": max_wait_s,
            "run_timeout_s": run_timeout_s,
            "total_timeout_s": total_timeout_s,
            "vram": vram,
        }
        options = {name: value for name, value in options.items() if value is not None}
        total_s = (DEFAULT_TOTAL_TIMEOUT_S if total_timeout_s is None else total_timeout_s) + READ_MARGIN_S
        call = _Call(
            path=f"/v1/models/{quote(model, safe='@')}/infer",
            params={} if body is None else {name: str(value) for name, value in options.items()},
            headers={
                "Idempotency-Key": _checked_key(idempotency_key),
                "Content-Type": "application/json" if body is None else content_type,
            },
            content=_json_body(inputs, options) if body is None else _raw_body(inputs, body),
            read_timeout_s=total_s if self._timeout_s is None else self._timeout_s,
        )
        response, tries = await self._send_until(call, total_s if deadline_s is None else deadline_s)
        return _answer(response, tries)

    async def _send_until(self, call: _Call, deadline_s: float) -> tuple[httpx.Response, int]:
        """Send `call` until it is answered with 200; or raise its last failure."""
        deadline = (began := time.monotonic()) + deadline_s
        tries, failed_runs, turn = 0, 0, random.randrange(len(self._urls))
        while True:
            tries += 1
            url = self._urls[turn % len(self._urls)]
            failure = await self._try(call, url, deadline)
            if isinstance(failure, httpx.Response):
                return failure, tries
            pause_s = random.uniform(0.5, 1.0) * min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(tries - 1, 10))
            if isinstance(failure, errors.Refused):
                failed_runs += failure.retry == "yes"
                if failure.retry not in ("after", "yes") or failed_runs >= MAX_TRIES_AFTER_FAILED_RUN:
                    raise failure
                # Spread over a tenth more, so that callers who were refused together do not return together.
                pause_s = max(pause_s, (failure.retry_after_s or 0) * random.uniform(1.0, 1.1))
            else:
                turn += 1
            if time.monotonic() + pause_s >= deadline:
                if isinstance(failure, errors.Unreachable):
                    failure.detail += f"; tried for {time.monotonic() - began:.3g} s"
                raise failure
            logger.info("%s; asking again in %.1f s", failure.detail, pause_s)
            await asyncio.sleep(pause_s)

    async def _try(
        self, call: _Call, url: str, deadline: float
    ) -> httpx.Response | errors.Refused | errors.Unreachable:
        left_s = max(0.001, deadline - time.monotonic())
        read_s = min(call.read_timeout_s, left_s)
        try:
            async with asyncio.timeout(read_s):
                response = await self._http.post(
                    url + call.path,
                    params=call.params,
                    headers=call.headers,
                    content=call.content,
                    timeout=httpx.Timeout(read_s, connect=min(CONNECT_TIMEOUT_S, left_s)),
                )
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ValueError(f"{url!r} is no address of a gateway: {error}") from None
        except (httpx.RequestError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            failure = errors.Unreachable(f"{url}: no answer within {read_s:.3g} s ({why})")
            failure.__cause__ = error
            return failure
        return response if response.status_code == 200 else _refusal(response, url)


def _checked_key(key: str | None) -> str:
    if key is None:
        return secrets.token_hex(16)
    if not (1 <= len(key) <= 255 and key.isascii() and key.isprintable()):
        raise ValueError(f"an idempotency key is 1 to 255 printable ASCII characters, got {key!r:.80}")
    return key


def _json_body(inputs: Mapping[str, Any] | None, options: Mapping[str, Any]) -> bytes:
    document: dict[str, Any] = {"inputs": {} if inputs is None else inputs}
    if options:
        document["options"] = options
    try:
        return json.dumps(document, default=_json_value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the inputs cannot be written as JSON: {error}") from None


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is neither a JSON value nor bytes")


def _raw_body(inputs: Mapping[str, Any] | None, body: bytes) -> bytes:
    if inputs is not None:
        raise ValueError("give inputs or body, not both: body is the model's only required field")
    return body


def _refusal(response: httpx.Response, url: str) -> errors.Refused | errors.Unreachable:
    header = response.headers.get("Retry-After", "")
    retry_after_s = int(header) if header.isascii() and header.isdigit() and len(header) < 10 else None
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if isinstance(problem, dict) and ("code" in problem or "type" in problem):
        return errors.from_problem(problem, retry_after_s)
    seen = f"{url}: status {response.status_code} and no problem document"
    if response.status_code in _PROXY_STATUSES:
        return errors.Unreachable(f"{seen}; a proxy says that no gateway answered it")
    raise errors.Internal(f"{seen}; is this the address of a vramgate gateway?")


def _answer(response: httpx.Response, tries: int) -> Answer:
    try:
        document = response.json()
        timing, vram = document["timing"], document["vram"]
        return Answer(
            id=document["id"],
            model=document["model"],
            version=document["version"],
            outputs=document["outputs"],
            card=document.get("card"),
            timing=Timing(wait_ms=timing["wait_ms"], run_ms=timing["run_ms"], total_ms=timing["total_ms"]),
            vram=Vram(leased_bytes=vram["leased_bytes"], peak_bytes=vram.get("peak_bytes")),
            degraded=document.get("degraded"),
            replayed=response.headers.get("Idempotency-Replayed", "").lower() == "true",
            tries=tries,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.Internal(
            f"{response.url}: status 200 and an answer of another form ({error!r})"
        ) from None
