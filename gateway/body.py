"""Request bodies: read within their limits, and taken apart by their media type.

Owns: the size limit (by Content-Length before reading, and while reading), and what of a body are inputs and
what are options. Does not own: how documents are parsed (`gateway.parsing`), or whether the inputs fit the
model (`gateway.validation`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from gateway import headers
from gateway.hints import did_you_mean
from gateway.options import Options, read_options, read_query
from gateway.parsing import Allowance, count_values, parse_json, parse_msgpack
from gateway.problems import BODY_BYTES, BODY_READ
from gateway.threads import LARGE_BYTES, VALUE_BYTES
from scheduler.settings import LimitSettings
from vramgate.errors import InvalidInput, Malformed, Refused, TooLarge, UnsupportedMediaType

Kind = Literal["json", "msgpack", "fields", "raw"]

_MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
_ENVELOPE = ("inputs", "options")
_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")


@dataclass(frozen=True, slots=True)
class Body:
    """A body taken apart.

    inputs: an object; for `fields` its values are bytes, str or lists of them; for `raw` bytes. values: how
    many of `limits.values` it holds so far; packed arrays and parts of a form are still to be counted.
    content_type: as it was sent.
    """

    kind: Kind
    inputs: Any
    options: Options
    limits: LimitSettings = field(default_factory=LimitSettings)
    values: int = 0
    content_type: str | None = None


def not_read(content_type: str | None, taken: str, *, by: str) -> Refused:
    """The refusal of a body that `by` does not read, with the media types that are `taken`."""
    media = (content_type or "").partition(";")[0].strip()
    sent = f"a body of {media[:80]!r}" if media else "a body without Content-Type"
    return UnsupportedMediaType(f"{by} does not read {sent}; send {taken}")


@functools.lru_cache(maxsize=256)
def kind_of(content_type: str | None) -> Kind:
    """How a body of this media type is taken apart; what is none of ours is raw."""
    media = (content_type or "").partition(";")[0].strip().lower()
    if media == "application/json" or (media.startswith("application/") and media.endswith("+json")):
        return "json"
    if media in _MSGPACK:
        return "msgpack"
    return "fields" if media == "multipart/form-data" else "raw"


def check_length(request: Request, limit: int) -> None:
    """Refuse by the headers alone what would be refused later. Raises TooLarge, UnsupportedMediaType."""
    declared = headers.get(request, b"content-length") or "0"
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise TooLarge(f"the body has {declared[:20]} bytes, the limit is {limit}", limit_bytes=limit)
    encoding = (headers.get(request, b"content-encoding") or "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(f"Content-Encoding {encoding[:40]!r} is not read; send the body as it is")


async def read(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises TooLarge as soon as it is over `limit`, ClientDisconnect when the client left. How long it may
    take is bounded by the protocol (`gateway.protocol`), at no cost for each body.
    """
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        request.scope[BODY_BYTES] = size
        if size > limit:
            raise TooLarge(f"the body is larger than the limit of {limit} bytes", limit_bytes=limit)
        chunks.append(chunk)
        more = message.get("more_body", False)
    request.scope[BODY_READ] = True
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def weigh(kind: Kind, content: bytes) -> int:
    """How many bytes' worth of work a body is; a value is worth VALUE_BYTES, however few it has. No more than
    needed to tell whether that is much.
    """
    if kind == "raw" or not LARGE_BYTES / VALUE_BYTES <= len(content) < LARGE_BYTES:
        return len(content)
    # An element of a packed array may be a single byte.
    values = len(content) if kind == "msgpack" else count_values(content)
    return max(len(content), values * VALUE_BYTES)


def take_apart(
    request: Request, content: bytes, form: Mapping[str, Any] | None, limits: LimitSettings
) -> Body:
    """Inputs and options of a body that was read. `form`: its parts, of `read_form`.

    Raises Malformed, InvalidInput, TooLarge.
    """
    content_type = headers.get(request, b"content-type")
    kind = kind_of(content_type)
    if kind in ("raw", "fields"):
        inputs = content if form is None else form
        options = read_query(request.query_params.multi_items())
        return Body(kind, inputs, options, limits, content_type=content_type)
    if request.scope["query_string"]:
        raise InvalidInput("options of this media type belong into the body, not into the query")
    parse = parse_json if kind == "json" else parse_msgpack
    allowance = Allowance(limits.values)
    document = parse(content, limits.nesting, allowance)
    inputs, options = _open_envelope(document)
    return Body(kind, inputs, options, limits, limits.values - allowance.left)


def _open_envelope(document: Any) -> tuple[dict[str, Any], Options]:
    if not isinstance(document, dict):
        raise InvalidInput(f'the body must be an object {{"inputs": {{...}}}}, got {_json_name(document)}')
    for name in document:
        if name not in _ENVELOPE:
            hint = did_you_mean(name, _ENVELOPE, otherwise='there are "inputs" and "options"')
            raise InvalidInput(f"unknown member {name[:80]!r} of the body; {hint}", field=name[:80])
    inputs = document.get("inputs")
    if not isinstance(inputs, dict):
        what = f"got {_json_name(inputs)}" if "inputs" in document else "it is missing"
        raise InvalidInput(f"inputs must be an object; {what}", field="inputs")
    return inputs, read_options(document.get("options"))


def _json_name(value: Any) -> str:
    names: Mapping[type, str] = {list: "an array", str: "a string", bool: "a boolean", dict: "an object"}
    return "null" if value is None else names.get(type(value), "a number")


def _check_charset(content_type: str) -> None:
    """Raises Malformed unless the fields are UTF-8: other codecs decode to what no text may hold."""
    _, parameters = parse_options_header(content_type)
    charset = parameters.get(b"charset", b"utf-8").decode("latin-1").strip().lower()
    if charset not in _CHARSETS:
        raise Malformed(f"the body's charset is {charset[:40]!r}; send fields as UTF-8")


async def read_form(request: Request, content: bytes) -> dict[str, Any]:
    """Parts of a form by name, several of one name as a list. Raises Malformed."""
    _check_charset(headers.get(request, b"content-type") or "")

    async def stream() -> AsyncGenerator[bytes, None]:
        for at in range(0, len(content), LARGE_BYTES):
            yield content[at : at + LARGE_BYTES]
            await asyncio.sleep(0)

    # The whole is bounded already, so that one part may be all of it.
    parser = MultiPartParser(
        request.headers, stream(), max_files=64, max_fields=256, max_part_size=len(content) + 1
    )
    # Its bytes are in memory anyway; none of them need go to a disk.
    parser.spool_max_size = len(content) + 1
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        detail = getattr(error, "message", None) or str(error)
        raise Malformed(f"the body is not multipart/form-data: {detail}"[:300]) from None
    try:
        parts: dict[str, Any] = {}
        for name, part in form.multi_items():
            value = await part.read() if isinstance(part, UploadFile) else part
            if name not in parts:
                parts[name] = value
            elif isinstance(parts[name], list):
                parts[name].append(value)
            else:
                parts[name] = [parts[name], value]
        return parts
    finally:
        await form.close()
