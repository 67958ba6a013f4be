"""How many times an answer is handed to the system, and that nothing of it is kept back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from gateway.joining import JoiningTransport


class Recording(asyncio.Transport):
    """A transport that notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[bytes | str] = []
        self.is_lost = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.said.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.said.append(b"".join(list_of_data))

    def close(self) -> None:
        self.said.append("closed")

    def is_closing(self) -> bool:
        return self.is_lost or "closed" in self.said


@pytest.fixture
def inner() -> Recording:
    return Recording()


@pytest.fixture
async def joining(inner: Recording) -> JoiningTransport:
    return JoiningTransport(inner, asyncio.get_running_loop())


async def test_a_head_and_its_body_are_sent_together(inner: Recording, joining: JoiningTransport) -> None:
    """At once, when the body is there; the loop's next turn adds nothing."""
    joining.write(b"head ")
    assert inner.said == []
    joining.write(b"body")
    assert inner.said == [b"head body"]
    await asyncio.sleep(0)
    assert inner.said == [b"head body"]


async def test_a_head_alone_is_sent_in_the_same_turn(inner: Recording, joining: JoiningTransport) -> None:
    """A stream whose first event is minutes away has begun for its client."""
    joining.write(b"head")
    await asyncio.sleep(0)
    assert inner.said == [b"head"]
    joining.write(b"event")
    await asyncio.sleep(0)
    assert inner.said == [b"head", b"event"]


async def test_closing_sends_what_is_held(inner: Recording, joining: JoiningTransport) -> None:
    """Nothing that was written before is lost, and nothing is written after."""
    joining.write(b"last words")
    joining.close()
    await asyncio.sleep(0)
    assert inner.said == [b"last words", "closed"]


async def test_nothing_is_written_to_a_lost_connection(inner: Recording, joining: JoiningTransport) -> None:
    """What is held when the client goes away is dropped."""
    joining.write(b"head")
    inner.is_lost = True
    await asyncio.sleep(0)
    assert inner.said == []
