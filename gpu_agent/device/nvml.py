"""Real cards as NVML shows them, MIG instances included.

Owns every call to pynvml. Creates no CUDA context and imports no torch. What the driver does not support is a
value here (None, no events, a total of 0), never an exception on the way to the other cards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml

from gpu_agent.device.reading import CardUnreadable, MemoryReading, NoNvml

_log = logging.getLogger(__name__)

_LEAST_HEADROOM = 512 * 1024**2
# The inode of the first pid namespace, fixed in the kernel's ABI (PROC_PID_INIT_INO).
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
_ALLOCATOR = "expandable_segments:True"
_REMEDIES = {
    "NVMLError_LibraryNotFound": "no libnvidia-ml.so.1: install the NVIDIA driver, run a container with "
    "--gpus all, or use --simulate 1x24GiB",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is not loaded: run nvidia-smi on the host and see dmesg",
    "NVMLError_NoPermission": "this user may not talk to the driver: see the permissions of /dev/nvidia*",
    "NVMLError_LibRmVersionMismatch": "NVIDIA library and loaded driver differ: reboot after a driver update",
    "NVMLError_Unknown": "NVML does not start: in a container, restart it, for it lost its devices "
    "(systemctl daemon-reload on the host does that)",
}
# The card, or our sight of it, is gone; anything else may be a passing failure.
_LOST = frozenset(
    {
        "NVMLError_GpuIsLost",
        "NVMLError_ResetRequired",
        "NVMLError_DriverNotLoaded",
        "NVMLError_LibraryNotFound",
        "NVMLError_LibRmVersionMismatch",
        "NVMLError_NotFound",
        "NVMLError_Unknown",
    }
)


class NvmlCard:
    """A `DriverCard` that asks NVML. Used by one thread at a time."""

    def __init__(self, uuid: str, *, index: int, product: str, total: int, is_mig: bool) -> None:
        """Open the card of that id lazily: nothing is asked before the first reading."""
        self.uuid = uuid
        self.index = index
        self.product = product
        self.total = total
        self.remark = "" if total else "the driver does not report this card's memory, so it admits nothing"
        self._handle: Any = None
        self._events: Any = None
        self._has_events = not is_mig
        self._closed = False

    @property
    def headroom(self) -> int:
        return max(self.total // 20, _LEAST_HEADROOM)

    def read(self) -> MemoryReading:
        if self._closed:
            raise CardUnreadable(f"{self.uuid} was closed", lost=False)
        try:
            handle = self._open()
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            processes = _processes(handle)
        except pynvml.NVMLError as error:
            self._reset()
            kind = type(error).__name__
            raise CardUnreadable(f"{self.uuid}: {error}; {_next_step(kind)}", lost=kind in _LOST) from error
        return MemoryReading(
            total=int(memory.total),
            driver=int(memory.reserved),
            used=int(memory.used),
            free=int(memory.free),
            processes=processes,
        )

    def xids(self) -> list[int]:
        if not self._has_events or self._closed:
            return []
        found: list[int] = []
        try:
            events = self._subscribe()
            while len(found) < 64:
                found.append(int(pynvml.nvmlEventSetWait_v2(events, 0).eventData))
        except pynvml.NVMLError as error:
            kind = type(error).__name__
            if kind in ("NVMLError_NotSupported", "NVMLError_FunctionNotFound", "NVMLError_NoPermission"):
                self._has_events = False
            elif kind != "NVMLError_Timeout":  # which says that there are no more
                self._reset()
        return found

    def child_environment(self) -> dict[str, str]:
        return {
            "CUDA_VISIBLE_DEVICES": self.uuid,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            # Two names for one setting: torch renamed it, and older ones know only the second.
            "PYTORCH_ALLOC_CONF": _ALLOCATOR,
            "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR,
        }

    def close(self) -> None:
        self._reset()
        self._closed = True

    def _open(self) -> Any:
        if self._handle is None:
            pynvml.nvmlInit()
            try:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
            except pynvml.NVMLError:
                pynvml.nvmlShutdown()
                raise
        return self._handle

    def _subscribe(self) -> Any:
        if self._events is None:
            handle = self._open()
            events = pynvml.nvmlEventSetCreate()
            try:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            except pynvml.NVMLError:
                pynvml.nvmlEventSetFree(events)
                raise
            self._events = events
        return self._events

    def _reset(self) -> None:
        """Drop all that belongs to this initialisation, so that the next reading starts a new one."""
        if self._events is not None:
            _quietly(lambda: pynvml.nvmlEventSetFree(self._events))
            self._events = None
        if self._handle is not None:
            self._handle = None
            _quietly(pynvml.nvmlShutdown)


def list_nvml_cards() -> Sequence[NvmlCard]:
    """Every card that can be used, in NVML's order; the index counts lost ones too, so that names do not
    move.

    A card in MIG mode stands for its instances. Raises NoNvml when there is no driver or no usable card.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        remedy = _REMEDIES.get(type(error).__name__, "see nvidia-smi on this host")
        raise NoNvml(f"no NVIDIA card: {error}; {remedy}") from error
    try:
        cards = list(_each_card())
    finally:
        pynvml.nvmlShutdown()
    if not cards:
        raise NoNvml(
            "no NVIDIA card: the driver runs but no card answers; see nvidia-smi -L, or use --simulate"
        )
    return cards


def _each_card() -> Iterator[NvmlCard]:
    index = 0
    for position in range(int(pynvml.nvmlDeviceGetCount())):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(position)
            is_mig = _is_mig_parent(handle)
            parts = _mig_instances(handle) if is_mig else [handle]
            found = [_describe(part, index=index + n, is_mig=is_mig) for n, part in enumerate(parts)]
        except pynvml.NVMLError as error:
            _log.warning("card_skipped", extra={"position": position, "reason": str(error)})
            index += 1
            continue
        yield from found
        index += max(len(found), 1)


def _describe(handle: Any, *, index: int, is_mig: bool) -> NvmlCard:
    try:
        total = int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).total)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
        total = 0
    uuid, product = _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle))
    return NvmlCard(uuid, index=index, product=product, total=total, is_mig=is_mig)


def _is_mig_parent(handle: Any) -> bool:
    try:
        return int(pynvml.nvmlDeviceGetMigMode(handle)[0]) == int(pynvml.NVML_DEVICE_MIG_ENABLE)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return False


def _mig_instances(handle: Any) -> list[Any]:
    """Handles of the instances; the numbers between them may have gaps."""
    instances = []
    for number in range(int(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle))):
        try:
            instances.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            continue
    return instances


def _processes(handle: Any) -> Mapping[int, int] | None:
    """Bytes by pid; None where pids would be another namespace's, or where one's bytes are not told."""
    if not sees_host_pids():
        return None
    usage: dict[int, int] = {}
    for ask in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        try:
            shown = ask(handle)
        except (
            pynvml.NVMLError_NotSupported,
            pynvml.NVMLError_FunctionNotFound,
            pynvml.NVMLError_NoPermission,
        ):
            return None
        for process in shown:
            if process.usedGpuMemory is None:
                return None
            # A process with both kinds of context is listed twice with the same figure.
            usage[process.pid] = max(usage.get(process.pid, 0), int(process.usedGpuMemory))
    return usage


def sees_host_pids() -> bool:
    """Whether pids that the driver names are pids here: it names them as the host's first namespace does."""
    try:
        return os.stat(Path("/proc/self/ns/pid")).st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _next_step(kind: str) -> str:
    if kind == "NVMLError_FunctionNotFound":
        return "update the driver: 510 is the first that tells its own reserve apart"
    if kind == "NVMLError_NotSupported":
        return "this card does not report its memory, so it admits nothing"
    return _REMEDIES.get(kind, "see nvidia-smi and dmesg on this host")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _quietly(call: Callable[[], Any]) -> None:
    try:
        call()
    except pynvml.NVMLError:
        pass  # there is nothing left to let go of
