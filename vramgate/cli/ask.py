"""`infer`: one request to a gateway, from the command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mimetypes
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from vramgate.cli import tables
from vramgate.cli.exits import Misuse, NothingReachable, tell
from vramgate.cli.target import ConfigOption, gateway_urls
from vramgate.client import Answer, AsyncClient
from vramgate.client import logger as client_logger
from vramgate.quantities import parse_duration

_PROBE_TIMEOUT_S = 2.0

DurationOption = typer.Option(metavar="DURATION", help="For example 30s.")


def infer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model, or model@version.")],
    inputs: Annotated[
        str | None,
        typer.Argument(metavar="JSON", help="The inputs as a JSON object; - reads standard input."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="F", help="Send this file as the model's only required field."),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="The gateway.")] = None,
    bearer: Annotated[
        str | None, typer.Option("--bearer", metavar="KEY", help="The key that the gateway asks for.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="Makes a repeated call join or replay the first.")
    ] = None,
    priority: Annotated[int | None, typer.Option(min=0, max=9, help="9 is most urgent.")] = None,
    max_wait: Annotated[str | None, DurationOption] = None,
    run_timeout: Annotated[str | None, DurationOption] = None,
    total_timeout: Annotated[str | None, DurationOption] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer, not its outputs only.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Run a model once and print its outputs."""
    values = _inputs(inputs, file)
    body, content_type = (None, "application/octet-stream") if file is None else _read(file)
    max_wait_s = _seconds("--max-wait", max_wait)
    run_timeout_s = _seconds("--run-timeout", run_timeout)
    total_timeout_s = _seconds("--total-timeout", total_timeout)
    urls = gateway_urls(url, config)

    async def run() -> Answer:
        found = await _reachable(urls)
        async with AsyncClient(found, key=bearer) as client:
            return await client.infer(
                model,
                values,
                body=body,
                content_type=content_type,
                idempotency_key=idempotency_key,
                priority=priority,
                max_wait_s=max_wait_s,
                run_timeout_s=run_timeout_s,
                total_timeout_s=total_timeout_s,
            )

    try:
        with _retries_told():
            answer = asyncio.run(run())
    except ValueError as error:
        raise Misuse(str(error)) from None
    tables.print_json(_document(answer) if as_json else answer.outputs)


class _Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tell(record.getMessage())


@contextlib.contextmanager
def _retries_told() -> Iterator[None]:
    """Whoever waits at a terminal is told why it takes so long."""
    told = _Told()
    client_logger.setLevel(logging.INFO)
    client_logger.addHandler(told)
    try:
        yield
    finally:
        client_logger.removeHandler(told)


def _document(answer: Answer) -> dict[str, Any]:
    """The body that the gateway sent: what the client adds of its own is left out."""
    return {name: value for name, value in asdict(answer).items() if name not in ("replayed", "tries")}


def _inputs(text: str | None, file: Path | None) -> dict[str, Any] | None:
    if file is not None:
        if text is not None:
            raise Misuse("give JSON or --file, not both: the file is the model's only required field")
        return None
    try:
        values = json.loads("{}" if text is None else sys.stdin.read() if text == "-" else text)
    except (ValueError, RecursionError) as error:
        raise Misuse(f"the inputs are no JSON: {error}") from None
    if not isinstance(values, dict):
        raise Misuse(
            f"the inputs are a JSON {type(values).__name__}; write an object like '{{\"height\": 256}}'"
        )
    return values


def _read(file: Path) -> tuple[bytes, str]:
    try:
        return file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    except OSError as error:
        raise Misuse(f"{file} cannot be read: {error.strerror}") from None


def _seconds(option: str, text: str | None) -> float | None:
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise Misuse(f"{option}: {error}") from None


async def _reachable(urls: tuple[str, ...]) -> list[str]:
    """The gateways that answer now: the client would go on trying the others until the job's deadline."""
    async with httpx.AsyncClient(timeout=_PROBE_TIMEOUT_S) as http:
        found = []
        for url in urls:
            try:
                await http.get(f"{url.rstrip('/')}/livez")
                found.append(url)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise Misuse(f"{url} is no address of a gateway: {error}") from None
            except httpx.RequestError:
                continue
    if not found:
        raise NothingReachable(
            f"no gateway at {', '.join(urls)}; start one with `vramgate up`, or name one with --url"
        )
    return found
