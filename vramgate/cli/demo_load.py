"""The demo's clients: what they ask for, how they ask, and what came of it.

Owns the requests (real audio in mixed lengths, pictures in mixed sizes) and the tally of every answer, those
of tries that were repeated included. Does not own the services, nor the judgement over the tally
(`demo_report`).
"""

from __future__ import annotations

import asyncio
import io
import random
import secrets
import wave
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from vramgate.client import Answer, AsyncClient
from vramgate.errors import Refused, VramgateError

PATIENCE_S = 2.0
"""After so long without an answer an impatient client asks again, under the same key."""

DEADLINE_S = 100.0
_SPEECH_S = (1.0, 2.0, 4.0, 8.0)
_SIDES = (128, 192, 256, 320, 384, 512)
_STEPS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Request:
    """One call of infer: `inputs`, or `body` as the lone bytes field."""

    model: str
    key: str
    inputs: Mapping[str, Any] | None = None
    body: bytes | None = None


@dataclass(slots=True)
class Tally:
    """What the clients saw. `statuses` counts every response, `gave_up` every try that got none."""

    answers: list[tuple[Request, Answer]] = field(default_factory=list)
    failures: list[tuple[Request, VramgateError]] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    gave_up: int = 0

    @property
    def settled(self) -> int:
        return len(self.answers) + len(self.failures)


class _CountingTransport(httpx.AsyncBaseTransport):
    """Passes everything through and counts the statuses that came back."""

    def __init__(self, tally: Tally) -> None:
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None))
        self._tally = tally

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await self._inner.handle_async_request(request)
        except (httpx.RequestError, asyncio.CancelledError):
            self._tally.gave_up += 1
            raise
        self._tally.statuses[str(response.status_code)] += 1
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


def make_requests(count: int, *, recording: Path, chance: random.Random) -> list[Request]:
    """`count` requests over both models in random order: five of speech for three of diffusion."""
    requests = []
    for index in range(count):
        key = secrets.token_hex(8)
        if index % 8 < 5:
            seconds = chance.choice(_SPEECH_S)
            requests.append(Request("speech", key, body=cut(recording, seconds, chance=chance)))
        else:
            inputs = {
                "height": chance.choice(_SIDES),
                "width": chance.choice(_SIDES),
                "steps": chance.choice(_STEPS),
                "seed": chance.randrange(2**32),
            }
            requests.append(Request("diffusion", key, inputs=inputs))
    chance.shuffle(requests)
    return requests


def cut(recording: Path, seconds: float, *, chance: random.Random) -> bytes:
    """A WAV of about `seconds` out of `recording`, from a random place on, repeated where it ends."""
    with wave.open(str(recording)) as source:
        parameters = source.getparams()
        frames = source.readframes(parameters.nframes)
    width = parameters.sampwidth * parameters.nchannels
    start = chance.randrange(parameters.nframes) * width
    wanted = int(seconds * parameters.framerate) * width
    turned = frames[start:] + frames[:start]
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setparams(parameters)
        target.writeframes((turned * (wanted // len(turned) + 1))[:wanted])
    return file.getvalue()


async def run_clients(
    urls: Sequence[str], requests: Sequence[Request], *, clients: int, impatient: int, tally: Tally
) -> None:
    """Let `clients` at once work through `requests`, the first `impatient` of them with little patience."""
    waiting = iter(requests)
    async with asyncio.TaskGroup() as group:
        for index in range(clients):
            patience_s = PATIENCE_S if index < impatient else None
            group.create_task(_client(urls, waiting, patience_s, tally), name=f"client {index}")


async def ask_again(urls: Sequence[str], answers: Sequence[tuple[Request, Answer]]) -> int:
    """Send answered requests once more under their keys; how many got the very same answer, without a run."""
    same = 0
    async with AsyncClient(urls) as client:
        for request, first in answers:
            try:
                second = await _send(client, request)
            except VramgateError:
                continue
            same += second.replayed and second.id == first.id and second.outputs == first.outputs
    return same


async def _client(
    urls: Sequence[str], waiting: Iterator[Request], patience_s: float | None, tally: Tally
) -> None:
    async with AsyncClient(urls, timeout_s=patience_s, transport=_CountingTransport(tally)) as client:
        for request in waiting:
            try:
                tally.answers.append((request, await _send(client, request)))
            except VramgateError as error:
                tally.failures.append((request, error))
                if not isinstance(error, Refused):
                    tally.statuses["no answer"] += 1


async def _send(client: AsyncClient, request: Request) -> Answer:
    return await client.infer(
        request.model,
        request.inputs,
        body=request.body,
        content_type="audio/wav",
        idempotency_key=request.key,
        deadline_s=DEADLINE_S,
    )
