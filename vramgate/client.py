"""The client of a gateway: `AsyncClient.infer`."""

from __future__ import annotations


class Answer: ...


class AsyncClient: ...
