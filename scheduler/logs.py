"""Log events with fields: one line per event on stderr, as key=value or as JSON.

Owns the form of a line and nothing else: which events exist is decided where they happen. The name of an
event is the name of its metric where it has one. Values that come from outside are escaped: no request can
write a line of its own into the log.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

_PLAIN = re.compile(r"[A-Za-z0-9_.:/@%+,\[\]{}*-]{1,200}")
_LONGEST_VALUE = 2_000
_ATTRIBUTE = "vramgate_fields"


def log_event(logger: logging.Logger, name: str, /, level: int = logging.INFO, **fields: Any) -> None:
    """Write one event. Fields that are None are left out."""
    if logger.isEnabledFor(level):
        given = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, name, extra={_ATTRIBUTE: given})


def setup_logging(*, as_json: bool = False, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send the root logger's records to `stream` (stderr), one line each. Replaces handlers set up before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if as_json else KeyValueLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # httpx and asyncio speak at INFO of every request and every selector: not our events.
    for chatty in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class KeyValueLines(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info job_started card=SIM-1 model=echo`."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_when(record), record.levelname.lower(), _word(record.getMessage())]
        parts += [f"{key}={_word(value)}" for key, value in _fields(record).items()]
        return " ".join(parts)


class JsonLines(logging.Formatter):
    """One JSON object per event: time, level, event, logger, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _when(record), "level": record.levelname.lower(), "event": record.getMessage()}
        return json.dumps(line | {"logger": record.name} | _fields(record), default=str)


def _when(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: Mapping[str, Any] = getattr(record, _ATTRIBUTE, {})
    shown = dict(fields)
    if record.exc_info and record.exc_info[1] is not None:
        shown["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        trace = record.exc_info[2]
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            shown["at"] = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return shown


def _word(value: Any) -> str:
    text = str(value)
    if len(text) > _LONGEST_VALUE:
        text = text[:_LONGEST_VALUE] + "..."
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=True)
