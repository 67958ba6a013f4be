"""The simulated card as its driver would show it: the supervisor's side, and the handles of tests and the
demo.

Owns the making of cards from a line like `2x24GiB`, and what can be done to one from outside: strangers that
appear and vanish, faults, Xids. The shared state is `sim_card`'s; what torch holds is `sim_torch`'s.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from gpu_agent.device.reading import CardUnreadable, MemoryReading
from gpu_agent.device.sim_card import CardConfig, Fault, Holder, SimCardFile
from vramgate.quantities import format_size, parse_size

_SEGMENT = 2 * 1024**2
_GEOMETRY = re.compile(r"\s*(\d{1,3})\s*[xX]\s*(.+)")
_MOST_CARDS = 64


@dataclass(frozen=True, slots=True)
class SimSpec:
    """How many cards of what size, and how they behave; None is worked out from the size or from the host."""

    count: int
    total: int
    context: int | None = None
    driver: int | None = None
    scale: int | None = None
    return_delay_ms: int = 200
    shows_processes: bool = True

    @classmethod
    def parse(cls, text: str) -> SimSpec:
        """Read `2x24GiB`, optionally followed by
        `,context=300MiB,driver=64MiB,scale=4,delay_ms=200,processes=off`.

        Raises ValueError with one line that says what is wrong and how it is written.
        """
        geometry, *options = text.split(",")
        match = _GEOMETRY.fullmatch(geometry)
        if match is None or not 1 <= int(match[1]) <= _MOST_CARDS:
            raise ValueError(
                f"simulate = {text!r}: write how many (1 to {_MOST_CARDS}) and a size, like '2x24GiB'"
            )
        try:
            spec = cls(count=int(match[1]), total=parse_size(match[2]) // _SEGMENT * _SEGMENT)
            for option in options:
                spec = spec._with(option)
        except ValueError as error:
            raise ValueError(f"simulate = {text!r}: {error}") from None
        if spec.total < 64 * 1024**2:
            raise ValueError(f"simulate = {text!r}: a simulated card has at least 64MiB")
        return spec

    def _with(self, option: str) -> SimSpec:
        name, _, value = (part.strip() for part in option.partition("="))
        match name:
            case "context":
                return replace(self, context=parse_size(value))
            case "driver":
                return replace(self, driver=parse_size(value))
            case "scale" if value.isdecimal() and int(value) >= 1:
                return replace(self, scale=int(value))
            case "delay_ms" if value.isdecimal():
                return replace(self, return_delay_ms=int(value))
            case "processes" if value in ("on", "off"):
                return replace(self, shows_processes=value == "on")
        raise ValueError(
            f"{option.strip()!r} is not known: context, driver, scale, delay_ms, processes=on|off"
        )

    def configure(self, *, available: int) -> CardConfig:
        """Fill in what was left open, for a host with so many bytes of memory available.

        All cards together fit half of it: one byte of the host then stands for `scale` bytes of a card.
        Driver and context cost 1/64 of the card each, about what they cost on a real one of 24 GiB.
        """
        share = max(self.total // 64 // _SEGMENT, 1) * _SEGMENT
        return CardConfig(
            total=self.total,
            driver=share if self.driver is None else self.driver,
            context=share if self.context is None else self.context,
            scale=self.scale or max(1, -(-2 * self.count * self.total // max(available, 1))),
            return_delay_ms=self.return_delay_ms,
            shows_processes=self.shows_processes,
        )


class Stranger:
    """Foreign use of a card, like a training script beside us. Dies with the process it is booked on."""

    def __init__(self, file: SimCardFile, slot: int, nbytes: int) -> None:
        self._file = file
        self._slot = slot
        self._vanished = False
        self.nbytes = nbytes

    def vanish(self) -> None:
        """Free the bytes at once. Idempotent."""
        if not self._vanished:
            self._vanished = True
            self._file.drop(self._slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.vanish()


class SimulatedCard:
    """A `DriverCard` without a card. Any number of processes may open the same one."""

    def __init__(self, path: Path, *, index: int) -> None:
        """Open the card whose file exists at `path`."""
        self._file = SimCardFile(path)
        self._config = self._file.config
        self._seen_xids = self._file.xids_since(0)[1]
        self.index = index

    @property
    def uuid(self) -> str:
        return self._file.uuid

    @property
    def product(self) -> str:
        return f"simulated {format_size(self._config.total)}, scale {self.scale}"

    @property
    def total(self) -> int:
        return self._config.total

    @property
    def scale(self) -> int:
        """How many bytes of this card one byte of host memory counts as."""
        return self._config.scale

    @property
    def headroom(self) -> int:
        return self._config.total // 20

    @property
    def remark(self) -> str:
        return f"simulated on this host's memory: one real byte counts as {self.scale}"

    def read(self) -> MemoryReading:
        while not self._file.closed and self._file.fault is Fault.HANGING:
            time.sleep(0.01)
        if self._file.closed:
            raise CardUnreadable(f"{self.uuid} was closed", lost=False)
        if self._file.fault is Fault.LOST:
            raise CardUnreadable(f"{self.uuid} is lost (simulated fault)", lost=True)
        if self._file.fault is Fault.SILENT:
            raise CardUnreadable(f"{self.uuid} does not report its memory (simulated fault)", lost=False)
        config = self._file.config
        usage = self._file.usage()
        used = sum(usage.values())
        return MemoryReading(
            total=config.total,
            driver=config.driver,
            used=used,
            free=config.total - config.driver - used,
            processes=usage if config.shows_processes else None,
        )

    def xids(self) -> list[int]:
        xids, self._seen_xids = self._file.xids_since(self._seen_xids)
        return xids

    def child_environment(self) -> dict[str, str]:
        # No real card may be touched from here, whatever the host has.
        return {
            "VRAMGATE_SIM": json.dumps({"card": str(self._file.path.resolve()), "uuid": self.uuid}),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def close(self) -> None:
        self._file.close()

    # -- what a test or the demo does to a card

    def stranger(self, nbytes: int, *, pid: int | None = None) -> Stranger:
        """Make foreign use of `nbytes` appear, booked on process `pid` (the caller's own by default).

        Works from any process that opened the card. Raises CardFull.
        """
        return Stranger(self._file, self._file.claim(Holder.STRANGER, nbytes, pid=pid), nbytes)

    def set_fault(self, fault: Fault) -> None:
        """Lose the card, let its driver hang or fall silent; `Fault.NONE` repairs it."""
        self._file.set_fault(fault)

    def show_processes(self, shown: bool) -> None:
        """Choose whether readings name processes, as they do not inside a container."""
        self._file.show_processes(shown)

    def raise_xid(self, xid: int) -> None:
        """Let the driver report a hardware event."""
        self._file.add_xid(xid)

    def poison(self) -> None:
        """Break the context of the child that runs now: its operations and canary fail from then on."""
        self._file.poison()


def create_cards(spec: SimSpec, *, host_dir: Path) -> Sequence[SimulatedCard]:
    """Open the cards of `spec`, made where there are none. Same host, folder and size: same cards again."""
    config = spec.configure(available=available_memory())
    seed = f"{platform.node()}\0{host_dir.resolve()}\0{spec.total}"
    family = hashlib.sha256(seed.encode()).hexdigest()[:8]
    cards = []
    for index in range(spec.count):
        uuid = f"SIM-{family}-{index}"
        path = host_dir / f"{uuid}.card"
        SimCardFile.create(path, uuid=uuid, config=config).close()
        cards.append(SimulatedCard(path, index=index))
    return cards


def available_memory() -> int:
    """Host memory that can still be taken: the kernel's estimate, or less where a cgroup bounds us."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        bound = int(Path("/sys/fs/cgroup/memory.max").read_text())
        held = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return min(available, max(bound - held, 0))
