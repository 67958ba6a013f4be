"""`--all`: one agent process per card, watched, and started again with a growing pause when it ends.

Owns: the processes and their pauses. A card that fails never takes another with it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence

from gpu_agent.device.reading import DriverCard
from gpu_agent.ending import happens_within
from scheduler.embedded import bound_to_owner
from scheduler.logs import log_event

_LOG = logging.getLogger(__name__)
PAUSES_S = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
HEALTHY_S = 60.0
FINAL = (2, 3)
"""Exit statuses that another start would only repeat: a wrong configuration, a card that is not there."""


async def run_fleet(cards: Sequence[DriverCard], arguments: Sequence[str]) -> int:
    """Run an agent for each card until SIGTERM or SIGINT. Returns 1 when every one of them has given up."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    keepers = [
        asyncio.create_task(_keep(card.uuid, arguments, stopping), name=f"keep-{card.uuid}") for card in cards
    ]
    for card in cards:
        card.close()
    statuses = await asyncio.gather(*keepers)
    return 0 if stopping.is_set() or not all(statuses) else max(statuses)


async def _keep(uuid: str, arguments: Sequence[str], stopping: asyncio.Event) -> int:
    failures, status = 0, 0
    while not stopping.is_set():
        began = time.monotonic()
        command = [sys.executable, "-P", "-m", "gpu_agent", "--card", uuid, *arguments]
        # It drains when this process is killed: it would otherwise serve unwatched for ever.
        process = await asyncio.create_subprocess_exec(*bound_to_owner(command), start_new_session=True)
        status = await _watch(process, stopping)
        if stopping.is_set() or status == 0:
            break
        failures = 0 if time.monotonic() - began > HEALTHY_S else failures
        pause = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
        failures += 1
        if status in FINAL:
            log_event(_LOG, "agent_given_up", logging.ERROR, card=uuid, status=status)
            break
        log_event(_LOG, "agent_ended", logging.ERROR, card=uuid, status=status, again_in_s=pause)
        await happens_within(stopping, pause)
    return status


async def _watch(process: asyncio.subprocess.Process, stopping: asyncio.Event) -> int:
    """Wait for its end; pass a stop on, and then wait again: it drains within its own bound."""
    ended = asyncio.create_task(process.wait())
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not ended.done():
        process.send_signal(signal.SIGTERM)
    return await ended
