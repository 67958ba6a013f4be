"""The child's entry: ties its life to the supervisor's, opens the card, and answers messages until the end.

Three kinds of threads: the main one reads messages and never runs a model's code; one answers for the
memory, so that a reading never waits for a run; and the lanes. The process dies by the kernel's hand
(parent-death signal, interval timer) even when none of them gets to run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_agent.ipc import Channel
from gpu_agent.text import plain_text

if TYPE_CHECKING:
    from gpu_agent.device.torch_device import TorchDevice

EXIT_NO_PARENT = 71
EXIT_NO_DEVICE = 72
UNLOAD_TIMEOUT_S = 5.0
START_S = 180.0
"""Longest start: nobody speaks to a child before its hello, and torch may come from a cold disk."""
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> None:
    """Run the child; leaves by os._exit, because atexit handlers of a broken CUDA context can hang."""
    parser = argparse.ArgumentParser(prog="gpu_agent.child")
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--setup", type=json.loads, required=True)
    args = parser.parse_args(argv)
    tie_to(args.parent)
    watchdog = Watchdog(float(args.setup["watchdog_s"]))
    watchdog.allow(START_S)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    control = Channel(socket.socket(fileno=args.control))
    memory = Channel(socket.socket(fileno=args.memory))
    _guard_from_models(control, memory)
    try:
        _serve(control, memory, args.setup, watchdog)
    except OSError:
        # The supervisor is gone while we were writing to it: there is nobody left to tell.
        os._exit(EXIT_NO_PARENT)
    os._exit(0)


def tie_to(parent: int) -> None:
    """Die with the supervisor: the kernel sends SIGKILL when the thread that spawned us ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It may have died before the line above: then no signal will ever come.
    if os.getppid() != parent:
        os._exit(EXIT_NO_PARENT)


def _guard_from_models(*channels: Channel) -> None:
    """This thread serves no model: an interrupt that one raises is not for it, and a process that one forks
    does not speak for us.
    """
    signal.signal(signal.SIGINT, lambda number, frame: None)
    for channel in channels:
        os.register_at_fork(after_in_child=channel.close)


class Watchdog:
    """Ends this process when the supervisor says nothing: by SIGALRM at its default, for which no GIL is
    needed.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._busy_until = 0.0
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def allow(self, seconds: float) -> None:
        """Be silent for so long, this once."""
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def arm(self, *, busy_s: float = 0.0) -> None:
        """A message came. `busy_s`: how long the work that it brings may hold the GIL."""
        now = time.monotonic()
        self._busy_until = max(self._busy_until, now + busy_s)
        signal.setitimer(signal.ITIMER_REAL, max(self._silence_s, self._busy_until - now))


def _serve(control: Channel, memory: Channel, setup: Mapping[str, Any], watchdog: Watchdog) -> None:
    # Late, so that the ties and the timer above are in place before seconds of imports.
    import torch

    from gpu_agent.child.hosting import Hosting
    from gpu_agent.child.runner import Runner
    from gpu_agent.device.torch_device import open_device

    # What was imported stays. Collections need not walk through it, least of all the one between an
    # out-of-memory and the next try.
    gc.collect()
    gc.freeze()
    if not _await_begin(control, watchdog):
        return
    directories = [Path(directory) for directory in setup["directories"]]
    try:
        device = open_device()
    except Exception as error:
        control.send({"t": "no_device", "reason": f"{type(error).__name__}: {plain_text(error)}"})
        os._exit(EXIT_NO_DEVICE)
    if device.device.type == "cpu":
        # A simulated card is one of several on this host, and nobody may take the host's cores for itself.
        torch.set_num_threads(1)
    # Our own packages are imported by now: what the user's directories call scheduler or gateway is theirs.
    sys.path[:0] = [str(directory) for directory in directories]
    runner = Runner(device, control.send, output_limit=int(setup["output_limit"]))
    hosting = Hosting(device, runner, directories)
    caps: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_answer_for_memory, args=(memory, device), name="memory", daemon=True).start()
    threading.Thread(target=_keep_cap, args=(caps, device), name="cap", daemon=True).start()
    control.send(
        {
            "t": "hello",
            "pid": os.getpid(),
            "uuid": device.uuid,
            "total": device.total,
            "context": device.context_bytes,
        }
    )
    watchdog.arm()
    while (message := control.receive()) is not None:
        watchdog.arm(busy_s=float(message.get("busy_s", 0.0)))
        match message["t"]:
            case "ping":
                pass
            case "load":
                hosting.load(message)
            case "run":
                hosting.run(message)
            case "cancel":
                hosting.cancel(int(message["batch"]), int(message["item"]))
            case "cap":
                caps.put(int(message["bytes"]))
            case "stop":
                hosting.unload_all(timeout_s=UNLOAD_TIMEOUT_S)
                return
            case other:
                raise RuntimeError(
                    f"unknown message {other!r}: supervisor and child are of different versions"
                )


def _await_begin(control: Channel, watchdog: Watchdog) -> bool:
    """Until now this process holds nothing of the card: it may be a spare, and wait for long."""
    watchdog.arm()
    while (message := control.receive()) is not None:
        if message["t"] == "begin":
            watchdog.allow(START_S)
            return True
        if message["t"] == "stop":
            return False
        watchdog.arm()
    return False


def _answer_for_memory(memory: Channel, device: TorchDevice) -> None:
    try:
        while (question := memory.receive()) is not None:
            memory.send(
                {
                    "n": question["n"],
                    "allocated": device.allocated(),
                    "reserved": device.reserved(),
                    "segments": device.segments(),
                }
            )
    except OSError:
        return


def _keep_cap(caps: queue.SimpleQueue[int], device: TorchDevice) -> None:
    """Set the allocator's bound; on its own thread, since emptying a cache waits for the card."""
    while True:
        cap = caps.get()
        device.set_cap(cap)
        if device.reserved() > cap:
            device.empty_cache()


if __name__ == "__main__":
    main()
