"""The state of a simulated card that several processes share: one small mapped file per card.

Owns who holds how many bytes (a child, a stranger), the delay after which a dead process's bytes are back,
and the faults that tests put on a card. Knows no torch and no allocator: `sim_torch` and `simulated` both map
this file.

The file is a header and a table of slots, all little-endian 64-bit integers. Whoever moves bytes holds a lock
on the file, which the kernel drops when its holder is killed; single fields are read without it.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vramgate.pids import start_of

_MAGIC = int.from_bytes(b"vgsim-01", "little")
_WORD = struct.Struct("<Q")
_WORDS = struct.Struct("<6Q")
_SLOTS_AT = 4096
_SLOTS = 256
_FILE_BYTES = _SLOTS_AT + _SLOTS * _WORDS.size
_UUID_AT = 512
_XIDS_AT = 256
_XIDS = 16


class _Field(enum.IntEnum):
    """Offsets of the header's words."""

    MAGIC = 0
    TOTAL = 8
    DRIVER = 16
    CONTEXT = 24
    SCALE = 32
    RETURN_DELAY_MS = 40
    SHOWS_PROCESSES = 48
    FAULT = 56
    XID_COUNT = 64


class Fault(enum.IntEnum):
    """What is wrong with the simulated driver."""

    NONE = 0
    LOST = 1
    HANGING = 2
    SILENT = 3
    """Readings are refused although the card is there, as where the driver does not support them."""


# Plain numbers for the one check that every operation of a child makes.
_FAULT_AT, _LOST, _SLOT_BYTES = int(_Field.FAULT), int(Fault.LOST), _WORDS.size


class Holder(enum.IntEnum):
    """Who holds a slot; FREE is nobody."""

    FREE = 0
    CHILD = 1
    STRANGER = 2


class CardFull(Exception):
    """The simulated card has no room for what a stranger, or a context, wanted to take."""


@dataclass(frozen=True, slots=True)
class CardConfig:
    """What a simulated card is like. `scale` bytes of the card stand for one byte of host memory."""

    total: int
    driver: int
    context: int
    scale: int
    return_delay_ms: int
    shows_processes: bool


@dataclass(frozen=True, slots=True)
class _Slot:
    number: int
    holder: int
    pid: int
    started: int
    nbytes: int
    dead_since_ns: int
    poisoned: int

    def write(self, file: mmap.mmap) -> None:
        packed = (
            self.holder | self.poisoned << 8,
            self.pid,
            self.started,
            self.nbytes,
            self.dead_since_ns,
            0,
        )
        _WORDS.pack_into(file, _SLOTS_AT + self.number * _WORDS.size, *packed)


class SimCardFile:
    """One mapping of a card's file. Safe between threads and processes."""

    def __init__(self, path: Path) -> None:
        """Map an existing file. Raises ValueError when it is not a simulated card of this version."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._thread_lock = threading.Lock()
        try:
            if os.fstat(self._fd).st_size != _FILE_BYTES:
                raise ValueError(f"{path} is not a simulated card of this version; remove it")
            self._map = mmap.mmap(self._fd, _FILE_BYTES)
            if self._get(_Field.MAGIC) != _MAGIC:
                raise ValueError(f"{path} is not a simulated card of this version; remove it")
        except BaseException:
            os.close(self._fd)
            raise
        self.uuid = self._map[_UUID_AT : _UUID_AT + 64].rstrip(b"\0").decode()

    @classmethod
    def create(cls, path: Path, *, uuid: str, config: CardConfig) -> SimCardFile:
        """Map the card at `path`, made first if need be. A card in use keeps its configuration."""
        path.parent.mkdir(parents=True, exist_ok=True)
        guard = os.open(path.with_suffix(".card-lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX)
            try:
                card = cls(path)
            except (FileNotFoundError, ValueError):
                _write_new(path, uuid)
                card = cls(path)
            with card._locked():
                card._reap()
                if all(slot.dead_since_ns for slot in card._slots()):
                    card._configure(config)
            return card
        finally:
            os.close(guard)

    def close(self) -> None:
        """Unmap; the slots stay as they are."""
        if not self._map.closed:
            self._map.close()
            os.close(self._fd)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._map.closed

    # -- the header

    @property
    def config(self) -> CardConfig:
        """How the card was made."""
        return CardConfig(
            total=self._get(_Field.TOTAL),
            driver=self._get(_Field.DRIVER),
            context=self._get(_Field.CONTEXT),
            scale=self._get(_Field.SCALE),
            return_delay_ms=self._get(_Field.RETURN_DELAY_MS),
            shows_processes=bool(self._get(_Field.SHOWS_PROCESSES)),
        )

    @property
    def fault(self) -> Fault:
        """What is wrong with the driver now."""
        return Fault(self._get(_Field.FAULT))

    def set_fault(self, fault: Fault) -> None:
        """Break the driver, or repair it with `Fault.NONE`."""
        self._put(_Field.FAULT, fault)

    def show_processes(self, shown: bool) -> None:
        """Choose whether readings name processes, as they do not inside a container."""
        self._put(_Field.SHOWS_PROCESSES, int(shown))

    def add_xid(self, xid: int) -> None:
        """Append a hardware event."""
        with self._locked():
            count = self._get(_Field.XID_COUNT)
            self._put(_XIDS_AT + 8 * (count % _XIDS), xid)
            self._put(_Field.XID_COUNT, count + 1)

    def xids_since(self, count: int) -> tuple[list[int], int]:
        """Events after the first `count`, and the new count; of a long burst only the last 16 are kept."""
        with self._locked():
            now = self._get(_Field.XID_COUNT)
            first = max(count, now - _XIDS)
            return [self._get(_XIDS_AT + 8 * (n % _XIDS)) for n in range(first, now)], now

    # -- the table

    def claim(self, holder: Holder, nbytes: int, *, pid: int | None = None) -> int:
        """Take a slot that holds `nbytes` for a live process, ours by default. Returns its number.

        Raises CardFull, and ProcessLookupError when there is no such process.
        """
        pid = os.getpid() if pid is None else pid
        started = start_of(pid)
        if started is None:
            raise ProcessLookupError(f"no process {pid} that could hold bytes of {self.uuid}")
        with self._locked():
            self._reap()
            taken = {slot.number for slot in self._slots()}
            number = next((n for n in range(_SLOTS) if n not in taken), None)
            if number is None or nbytes > self._free():
                raise CardFull(f"{self.uuid}: no room for {nbytes} bytes; {self._free()} are free")
            _Slot(number, holder, pid, started, nbytes, 0, 0).write(self._map)
            return number

    def grow(self, number: int, nbytes: int) -> bool:
        """Add to a slot's bytes; False, and nothing changed, where the card has no room."""
        with self._locked():
            if nbytes > self._free():
                self._reap()
                if nbytes > self._free():
                    return False
            self._add(number, nbytes)
            return True

    def shrink(self, number: int, nbytes: int) -> None:
        """Take from a slot's bytes."""
        with self._locked():
            self._add(number, -nbytes)

    def drop(self, number: int) -> None:
        """Empty a slot at once, as a live process frees what it holds."""
        with self._locked():
            _Slot(number, Holder.FREE, 0, 0, 0, 0, 0).write(self._map)

    def poison(self) -> None:
        """Break the context of every child that holds a slot now; a new child is not affected."""
        with self._locked():
            for slot in list(self._slots()):
                if slot.holder == Holder.CHILD:
                    replace(slot, poisoned=1).write(self._map)

    def is_broken(self, number: int) -> bool:
        """Whether work of this slot fails: its context is poisoned, or the card lost. Takes no lock."""
        return self._map[_FAULT_AT] == _LOST or self._map[_SLOTS_AT + number * _SLOT_BYTES + 1] != 0

    def usage(self) -> dict[int, int]:
        """Bytes by pid, processes that died too recently included."""
        with self._locked():
            self._reap()
            usage: dict[int, int] = {}
            for slot in self._slots():
                usage[slot.pid] = usage.get(slot.pid, 0) + slot.nbytes
            return usage

    # -- inside

    def _configure(self, config: CardConfig) -> None:
        self._put(_Field.TOTAL, config.total)
        self._put(_Field.DRIVER, config.driver)
        self._put(_Field.CONTEXT, config.context)
        self._put(_Field.SCALE, config.scale)
        self._put(_Field.RETURN_DELAY_MS, config.return_delay_ms)
        self._put(_Field.SHOWS_PROCESSES, int(config.shows_processes))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # flock is held by the open file, so it keeps other mappings out but not this one's other threads.
        with self._thread_lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _get(self, at: int) -> int:
        return int(_WORD.unpack_from(self._map, at)[0])

    def _put(self, at: int, value: int) -> None:
        _WORD.pack_into(self._map, at, value)

    def _slots(self) -> Iterator[_Slot]:
        for number in range(_SLOTS):
            state, pid, started, nbytes, dead_since_ns, _ = _WORDS.unpack_from(
                self._map, _SLOTS_AT + number * _WORDS.size
            )
            if state:
                yield _Slot(number, state & 0xFF, pid, started, nbytes, dead_since_ns, state >> 8)

    def _add(self, number: int, nbytes: int) -> None:
        at = _SLOTS_AT + number * _WORDS.size + 24
        self._put(at, self._get(at) + nbytes)

    def _free(self) -> int:
        held = sum(slot.nbytes for slot in self._slots())
        return self._get(_Field.TOTAL) - self._get(_Field.DRIVER) - held

    def _reap(self) -> None:
        """Stamp the slots of the dead, and empty those that were stamped a delay ago."""
        now = time.monotonic_ns()  # one clock for all processes of a host
        delay_ns = self._get(_Field.RETURN_DELAY_MS) * 1_000_000
        for slot in list(self._slots()):
            if slot.dead_since_ns == 0:
                if start_of(slot.pid) != slot.started:
                    replace(slot, dead_since_ns=now).write(self._map)
            elif now - slot.dead_since_ns >= delay_ns:
                _Slot(slot.number, Holder.FREE, 0, 0, 0, 0, 0).write(self._map)


def _write_new(path: Path, uuid: str) -> None:
    """Put a blank card in place in one step, so that nobody maps half of one."""
    blank = bytearray(_FILE_BYTES)
    _WORD.pack_into(blank, _Field.MAGIC, _MAGIC)
    blank[_UUID_AT : _UUID_AT + len(uuid)] = uuid.encode()
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(blank)
    fresh.replace(path)
