"""A job's events as a stream (server-sent events): for infer, and for GET /v1/jobs/{id}/events.

Owns: what is told and in which order (`queued`, `running`, `progress`, `output`, `reset`, then exactly one
`done` or `error`), the ids that a client resumes from, and the end when the client leaves. Does not own: when
something happened to the job; the ledger's news say so, and the position in the queue is looked up on an
interval.

An id is `<attempt>-<stream id>`. Only what the agent emitted and `reset` carry one, so a client that resumes
is told its place in the queue anew, and nothing that it has already seen.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import headers, paths, rendering
from gateway.context import Gateway
from gateway.headers import ANONYMOUS
from gateway.waiter import until_disconnect
from scheduler import documents
from scheduler.logs import log_event
from scheduler.states import SETTLED
from scheduler.submissions import Outcome, SubmitRequest
from scheduler.views import JobView
from vramgate.errors import Draining, Lost, Malformed, StoreUnavailable, UnknownJob
from vramgate.quantities import seconds_up

logger = logging.getLogger("gateway")

LOOK_S = 1.0
EVENTS_PER_READ = 512
_ID = re.compile(r"(\d{1,9})-(\d{1,20}(?:-\d{1,20})?)", re.ASCII)
_MAX_ID_PART = 2**64 - 1
"""A stream id of the store is two unsigned numbers of 64 bits; beyond them it refuses the read."""


async def job_events(gateway: Gateway, request: Request) -> Response:
    """The job's events as they come; 404 for a job that is not there, before the stream begins."""
    headers.parse_accept(headers.get(request, b"accept"), events=True)
    resume = parse_event_id(headers.get(request, b"last-event-id"))
    job_id = paths.job_id(request)
    client = None if request.method == "HEAD" else secrets.token_hex(16)
    await gateway.ledger.view(job_id, tenant=ANONYMOUS, client=client, events=client is not None)
    return EventStream(gateway, job_id, client=client, resume=resume)


def parse_event_id(text: str | None) -> tuple[int, str] | None:
    """(attempt, stream id) of a Last-Event-ID. Raises Malformed for one that this service never sent."""
    if not text:
        return None
    match = _ID.fullmatch(text)
    if match is None or any(int(part) > _MAX_ID_PART for part in match[2].split("-")):
        raise Malformed(f"Last-Event-ID {text[:60]!r} is not an id of this stream")
    return int(match[1]), match[2]


def encode(event: str, data: Any, event_id: str | None = None) -> bytes:
    """One event on the wire."""
    head = b"" if event_id is None else f"id: {event_id}\n".encode()
    return head + f"event: {event}\ndata: ".encode() + rendering.dumps(data) + b"\n\n"


class Teller:
    """What one listener was told so far, and therefore what is to be told next.

    Pure: no clock, no connection.
    """

    def __init__(self, resume: tuple[int, str] | None = None) -> None:
        self.cursor = "0" if resume is None else resume[1]
        self._live_attempt: int | None = None if resume is None else resume[0]
        self._running_attempt: int | None = None
        self._seen_running: int | None = None
        self._place: tuple[int, int | None] | None = None

    def tell(self, view: JobView, news: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[bytes]:
        """The events between the last look and this one; `view` was read before `news`."""
        if self._is_over(view):
            yield self._reset(view.attempt)
        yield from self._tell_state(view)
        for stream_id, entry in news:
            attempt = int(entry["attempt"])
            self.cursor = stream_id
            if self._live_attempt is not None and attempt < self._live_attempt:
                continue
            yield from self._tell_running(attempt, view.card)
            yield encode(entry["type"], entry["data"], f"{attempt}-{stream_id}")

    def _is_over(self, view: JobView) -> bool:
        """Whether the attempt of which was told has ended without settling the job."""
        live = self._live_attempt
        if view.state == "running":
            self._seen_running = view.attempt
        if live is None:
            return False
        # An agent may emit before it reports the start; leased after running is a new grant.
        was_running = view.state == "leased" and self._seen_running == live
        return view.state == "queued" or view.attempt > live or was_running

    def _tell_state(self, view: JobView) -> Iterator[bytes]:
        if view.state in ("queued", "leased"):
            place = (view.position, None if view.eta_ms is None else seconds_up(view.eta_ms))
            if place != self._place and self._live_attempt is None:
                self._place = place
                yield encode("queued", {"position": place[0], "eta_s": place[1]})
        elif view.state == "running":
            yield from self._tell_running(view.attempt, view.card)

    def _tell_running(self, attempt: int, card: str | None) -> Iterator[bytes]:
        if self._live_attempt is not None and attempt > self._live_attempt:
            yield self._reset(attempt)
        if self._running_attempt != attempt and (self._live_attempt is None or attempt >= self._live_attempt):
            self._running_attempt = self._live_attempt = attempt
            yield encode("running", {"card": card})

    def _reset(self, attempt: int) -> bytes:
        self._live_attempt = self._running_attempt = self._place = None
        return encode("reset", {"attempt": attempt}, f"{attempt}-{self.cursor}")


class EventStream(Response):
    """Streams a job's events to one client until its end, the client's, or this worker's.

    submit: the infer call that this answers, whose job is given up when the client leaves. outcome: known
    already.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        gateway: Gateway,
        job_id: str,
        *,
        submit: SubmitRequest | None = None,
        client: str | None = None,
        resume: tuple[int, str] | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Job-Id": job_id})
        del self.headers["content-length"]
        self._gateway = gateway
        self._job_id = job_id
        self._submit = submit
        self._client = client
        self._outcome = outcome
        self._teller = Teller(resume)
        self._is_settled = False
        self._has_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            if self._outcome is not None:
                await self._send(send, self._end(self._outcome))
            elif scope["method"] != "HEAD":
                # For a client HEAD is over with its head, and the next request may follow at once.
                await self._stream(receive, send)
        finally:
            await self._part()
        if not self._has_left:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(until_disconnect(receive), name="events-disconnect")
        closing = asyncio.get_running_loop().create_future()

        def send_away() -> None:
            if not closing.done():
                closing.set_result(None)

        ticket = self._gateway.lifecycle.wait_here(send_away, is_listener=self._submit is None)
        try:
            async with self._gateway.ledger.news(self._job_id) as news:
                await self._follow(news, gone, closing, send)
        except StoreUnavailable as error:
            await self._send(send, encode("error", error.problem()))
        finally:
            gone.cancel()
            self._gateway.lifecycle.leave(ticket)

    async def _follow(
        self, news: asyncio.Event, gone: asyncio.Task[None], closing: asyncio.Future[None], send: Send
    ) -> None:
        said = time.monotonic()
        while not self._is_settled:
            news.clear()
            chunk = await self._look()
            if not chunk and time.monotonic() - said >= self._gateway.settings.gateway.heartbeat_s:
                chunk = b": still here\n\n"
            if chunk:
                said = time.monotonic()
                await self._send(send, chunk)
            if self._is_settled:
                return
            heard = asyncio.ensure_future(news.wait())
            ends: set[asyncio.Future[Any]] = {heard, gone, closing}
            try:
                await asyncio.wait(ends, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                heard.cancel()
            if gone.done():
                self._has_left = True
                return
            if closing.done():
                if self._submit is not None:
                    await self._send(
                        send, encode("error", Draining(job_id=self._job_id, retry_after_s=1).problem())
                    )
                return

    async def _look(self) -> bytes:
        ledger = self._gateway.ledger
        try:
            view = await ledger.view(self._job_id, tenant=None)
            chunks: list[bytes] = []
            entries = None
            while entries is None or len(entries) >= EVENTS_PER_READ:
                entries = await ledger.read_events(self._job_id, after=self._teller.cursor)
                chunks.extend(self._teller.tell(view, entries))
            if view.state in SETTLED:
                outcome = await ledger.outcome(self._job_id, tenant=None)
                if outcome is not None:
                    chunks.append(self._end(outcome))
        except StoreUnavailable:
            # The job goes on without us; so does this stream, silent until the ledger answers.
            return b""
        except UnknownJob:
            self._is_settled = True
            return encode("error", Lost(job_id=self._job_id, retry_after_s=1).problem())
        return b"".join(chunks)

    def _end(self, outcome: Outcome) -> bytes:
        self._is_settled = True
        error = documents.outcome_error(outcome)
        if error is not None:
            return encode("error", error.problem())
        return encode("done", documents.answer_document(outcome, binary=True))

    async def _part(self) -> None:
        if self._has_left and self._submit is not None:
            log_event(logger, "client_left", code="client_left", status=499, job=self._job_id)
            submit = self._submit
            self._gateway.ledger.give_up(
                self._job_id, client=submit.job_id, tenant=submit.tenant, key=submit.key
            )
        if self._client is not None and not self._is_settled:
            await self._gateway.ledger.unwatch(self._job_id, client=self._client)

    async def _send(self, send: Send, chunk: bytes) -> None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
