"""Identifiers out of a request's path, checked before anything looks them up or puts them into a header.

Does not own: whether there is such a job or card (the ledger).
"""

from __future__ import annotations

import re

from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request

from vramgate.errors import UnknownCard, UnknownJob

_JOB_ID = re.compile(r"[0-9a-f]{32}")


class _Segment(Convertor[str]):
    """One segment of a path, also an empty one: an empty id is an id that nobody has, and no other route."""

    regex = "[^/]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("segment", _Segment())


def of(path: str) -> str:
    """A path of the table of routes as Starlette is to match it."""
    return re.sub(r"\{(\w+)\}", r"{\1:segment}", path)


def job_id(request: Request) -> str:
    """The job that the path names. Raises UnknownJob for what was never an id of a job."""
    given: str = request.path_params["job_id"]
    if _JOB_ID.fullmatch(given) is None:
        raise UnknownJob(f"{given[:64]!r} is no id of a job; ids have 32 lower-case hexadecimal digits")
    return given


def card_id(request: Request) -> str:
    """The card that the path names. Raises UnknownCard for what was never an id of a card."""
    given: str = request.path_params["card"]
    if not (given and given.isascii() and given.isprintable()):
        raise UnknownCard(f"{given[:64]!r} is no id of a card; GET /v1/cards lists them")
    return given
