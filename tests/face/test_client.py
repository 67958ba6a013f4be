"""vramgate.AsyncClient against answers made up here: what it sends, what it tries again, and what it
raises."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from vramgate import AsyncClient, errors

ANSWER = {
    "id": "0" * 32,
    "model": "defects",
    "version": "1",
    "outputs": {"label": "scratch"},
    "card": "SIM-00000000-0",
    "timing": {"wait_ms": 3, "run_ms": 5, "total_ms": 9},
    "vram": {"leased_bytes": 1024, "peak_bytes": None},
    "degraded": None,
}

Step = httpx.Response | Exception


def ok(**changes: Any) -> httpx.Response:
    return httpx.Response(200, json=ANSWER | changes)


def refused(code: str, *, retry_after: str | None = None, **data: Any) -> httpx.Response:
    problem = errors.by_code(code)("words", job_id="abc", **data).problem()
    headers = {"Content-Type": "application/problem+json"}
    if retry_after is not None:
        headers["Retry-After"] = retry_after
    return httpx.Response(errors.TABLE[code].status, content=json.dumps(problem), headers=headers)


class Script(httpx.MockTransport):
    """Answers each request with the next step, the last one for ever; keeps what was asked, and when."""

    def __init__(self, *steps: Step | Callable[[], Step]) -> None:
        super().__init__(self._next)
        self.steps = list(steps)
        self.requests: list[httpx.Request] = []
        self.at: list[float] = []

    def _next(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.at.append(time.monotonic())
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        step = step() if callable(step) else step
        if isinstance(step, Exception):
            raise step
        return step

    @property
    def keys(self) -> set[str]:
        return {request.headers["Idempotency-Key"] for request in self.requests}


async def test_sends_json_with_bytes_as_base64_and_given_options_only() -> None:
    """The body holds inputs and the options that were given; the key, the form and the bearer are in the
    headers."""
    script = Script(ok())
    async with AsyncClient("http://gate:1/", key="secret", transport=script) as client:
        answer = await client.infer(
            "defects@2",
            {"image": b"\x00\xff", "more": [{"x": b"a"}]},
            priority=9,
            vram="2GiB",
            run_timeout_s=5,
        )
    (request,) = script.requests
    assert str(request.url) == "http://gate:1/v1/models/defects@2/infer"
    assert json.loads(request.content) == {
        "inputs": {"image": base64.b64encode(b"\x00\xff").decode(), "more": [{"x": "YQ=="}]},
        "options": {"priority": 9, "vram": "2GiB", "run_timeout_s": 5},
    }
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["Authorization"] == "Bearer secret"
    assert len(request.headers["Idempotency-Key"]) == 32
    assert (answer.outputs, answer.model, answer.card) == ({"label": "scratch"}, "defects", "SIM-00000000-0")
    assert (answer.timing.wait_ms, answer.vram.leased_bytes, answer.vram.peak_bytes) == (3, 1024, None)
    assert (answer.replayed, answer.degraded, answer.tries) == (False, None, 1)


async def test_sends_a_raw_body_with_its_options_in_the_query() -> None:
    """The bytes go as they are, under the media type given."""
    script = Script(ok())
    async with AsyncClient(transport=script) as client:
        await client.infer(
            "speech", body=b"RIFF", content_type="audio/wav", priority=2, idempotency_key="k 1"
        )
    (request,) = script.requests
    assert (request.content, request.headers["Content-Type"]) == (b"RIFF", "audio/wav")
    assert request.headers["Idempotency-Key"] == "k 1"
    assert dict(request.url.params) == {"priority": "2"}
    assert "Authorization" not in request.headers


async def test_model_names_cannot_reach_another_route() -> None:
    """Whatever a name holds, it stays one part of the path."""
    script = Script(refused("unknown_model"))
    async with AsyncClient(transport=script) as client:
        with pytest.raises(errors.UnknownModel):
            await client.infer("../jobs?x=/y#z")
    assert script.requests[0].url.raw_path == b"/v1/models/..%2Fjobs%3Fx%3D%2Fy%23z/infer"


async def test_says_when_an_answer_was_replayed() -> None:
    """`replayed` follows the header."""
    script = Script(httpx.Response(200, json=ANSWER, headers={"Idempotency-Replayed": "true"}))
    async with AsyncClient(transport=script) as client:
        assert (await client.infer("defects", {})).replayed


@pytest.mark.parametrize("code", sorted(set(errors.TABLE) - {"client_left"}))
async def test_each_code_raises_its_class(code: str) -> None:
    """Without time for another try, a refusal is raised as its class, with its job, pause and data."""
    script = Script(refused(code, retry_after="60", field="image"))
    async with AsyncClient(transport=script) as client:
        with pytest.raises(errors.by_code(code)) as raised:
            await client.infer("defects", {}, deadline_s=0.05)
    assert type(raised.value) is errors.by_code(code)
    assert (raised.value.detail, raised.value.retry_after_s, raised.value.job_id) == ("words", 60, "abc")
    assert len(script.requests) == 1 or errors.TABLE[code].retry == "yes"


@pytest.mark.parametrize(
    "code", sorted(code for code, row in errors.TABLE.items() if row.retry in ("no", "maybe"))
)
async def test_what_a_retry_cannot_help_is_not_tried_again(code: str) -> None:
    """One request, however long the deadline: a pinned outcome would only be replayed."""
    script = Script(refused(code, retry_after="1"), ok())
    async with AsyncClient(transport=script) as client:
        with pytest.raises(errors.by_code(code)):
            await client.infer("defects", {}, deadline_s=30)
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    "code", sorted(code for code, row in errors.TABLE.items() if row.retry in ("after", "yes"))
)
async def test_what_a_retry_can_help_is_tried_again_under_the_same_key(code: str) -> None:
    """The second try carries the key of the first, and its answer is the caller's."""
    script = Script(refused(code), ok())
    async with AsyncClient(transport=script) as client:
        answer = await client.infer("defects", {"a": 1}, deadline_s=30)
    assert answer.tries == 2
    assert len(script.keys) == 1
    assert script.requests[0].content == script.requests[1].content


async def test_never_comes_back_before_retry_after() -> None:
    """A server's integer of seconds is waited out in full."""
    script = Script(refused("queue_full", retry_after="1"), ok())
    async with AsyncClient(transport=script) as client:
        await client.infer("defects", {}, deadline_s=30)
    assert script.at[1] - script.at[0] >= 1.0


async def test_a_retry_after_past_the_deadline_is_raised_at_once() -> None:
    """There is no use in sleeping first; the caller gets the refusal with its pause."""
    script = Script(refused("wait_timeout", retry_after="40"), ok())
    async with AsyncClient(transport=script) as client:
        with pytest.raises(errors.WaitTimeout) as raised:
            await client.infer("defects", {}, deadline_s=30)
    assert raised.value.retry_after_s == 40
    assert len(script.requests) == 1


async def test_a_failed_run_is_not_hammered() -> None:
    """Three tries, and the crash is the caller's: its input may be what crashes."""
    script = Script(lambda: refused("crashed"))
    async with AsyncClient(transport=script) as client:
        with pytest.raises(errors.Crashed):
            await client.infer("defects", {}, deadline_s=30)
    assert len(script.requests) == 3


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.ReadTimeout("silent"),
        httpx.WriteError("broken pipe"),
        httpx.RemoteProtocolError("closed without an answer"),
        httpx.Response(502, html="<h1>Bad Gateway</h1>"),
        httpx.Response(503, text=""),
        httpx.Response(504, json=["no", "problem"]),
    ],
    ids=lambda failure: type(failure).__name__ + str(getattr(failure, "status_code", "")),
)
async def test_a_try_without_an_answer_goes_to_the_next_gateway(failure: Step) -> None:
    """A broken connection or a proxy's word is tried again under the same key, at the other address."""
    script = Script(failure, ok())
    async with AsyncClient(["http://one", "http://two"], transport=script) as client:
        assert (await client.infer("defects", {}, deadline_s=30)).tries == 2
    assert len(script.keys) == 1
    assert {request.url.host for request in script.requests} == {"one", "two"}


async def test_unreachable_at_the_deadline() -> None:
    """When nobody answers in time the last cause is chained and the address named."""
    script = Script(httpx.ConnectError("refused"))
    async with AsyncClient("http://gate:1", transport=script) as client:
        with pytest.raises(errors.Unreachable, match="http://gate:1: no answer") as raised:
            await client.infer("defects", {}, deadline_s=0.4)
    assert isinstance(raised.value.__cause__, httpx.ConnectError)
    assert len(script.requests) > 1


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(404, html="<h1>nginx</h1>"),
        httpx.Response(500, text="oops"),
        httpx.Response(301, headers={"Location": "/"}),
        httpx.Response(200, text="hello"),
        httpx.Response(200, json=[1]),
        httpx.Response(200, json={"id": "x"}),
        httpx.Response(200, json=ANSWER | {"timing": 5}),
    ],
)
async def test_what_is_no_gateway_is_called_so(response: httpx.Response) -> None:
    """An answer of another form is `Internal` in one line that names the address, and is not tried again."""
    script = Script(response)
    async with AsyncClient("http://gate:1", transport=script) as client:
        with pytest.raises(errors.Internal, match="http://gate:1") as raised:
            await client.infer("defects", {}, deadline_s=5)
    assert "\n" not in str(raised.value)
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inputs": {}, "body": b""}, "not both"),
        ({"idempotency_key": ""}, "1 to 255"),
        ({"idempotency_key": "x" * 256}, "1 to 255"),
        ({"idempotency_key": "schlüssel"}, "ASCII"),
        ({"idempotency_key": "a\nb"}, "printable"),
        ({"inputs": {"x": float("nan")}}, "JSON"),
        ({"inputs": {"x": object()}}, "object is neither"),
        ({"inputs": {"x": {1, 2}}}, "set is neither"),
    ],
)
async def test_a_call_that_makes_no_sense_sends_nothing(arguments: dict[str, Any], words: str) -> None:
    """ValueError in words, before any connection."""
    script = Script(ok())
    async with AsyncClient(transport=script) as client:
        with pytest.raises(ValueError, match=words):
            await client.infer("defects", **arguments)
    assert not script.requests


@pytest.mark.parametrize("url", ["gate:8000", "ftp://gate", "http://", "http://[::1", ""])
async def test_a_wrong_address_is_named_at_once(url: str) -> None:
    """An address that cannot be one is a ValueError that holds it, and is not tried until the deadline."""
    with pytest.raises(ValueError, match="address of a gateway"):
        async with AsyncClient(url) as client:
            await client.infer("defects", {}, deadline_s=30)


def test_no_address_at_all_is_refused() -> None:
    """An empty list of gateways is a ValueError."""
    with pytest.raises(ValueError, match="at least one"):
        AsyncClient([])
