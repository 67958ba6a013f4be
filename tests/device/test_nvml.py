"""Real cards behind a stand-in for the pynvml module: readings, what is unsupported, what is lost, MIG."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpu_agent.device import nvml
from gpu_agent.device.listing import list_cards
from gpu_agent.device.reading import CardUnreadable, DriverCard, NoNvml

MIB, GIB = 1024**2, 1024**3


@dataclass
class Gpu:
    """One device as the driver has it; `fails` maps a function's name to the NVML error that it answers."""

    uuid: str
    total: int = 24 * GIB
    reserved: int = 400 * MIB
    used: int = 1 * GIB
    compute: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)
    xids: list[int] = field(default_factory=list)
    mig: list[Gpu | None] | None = None


class FakeNvml:
    """The functions of pynvml that are called, over a list of Gpu. Counts its initialisations."""

    def __init__(self, gpus: list[Gpu]) -> None:
        self.gpus = gpus
        self.users = 0
        self.inits = 0
        self.init_error: int | None = None
        self.freed_events = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)  # error classes and constants are the real ones

    def _ask(self, gpu: Gpu, function: str) -> None:
        if self.users == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if function in gpu.fails:
            raise pynvml.NVMLError(gpu.fails[function])

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.users += 1
        self.inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        if self.users == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        self._ask(self.gpus[index], "handle")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:  # noqa: N802
        for gpu in self.gpus:
            for each in (gpu, *(gpu.mig or [])):
                if each is not None and each.uuid == uuid:
                    self._ask(each, "handle")
                    return each
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:  # noqa: N802
        self._ask(gpu, "uuid")
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: Gpu) -> bytes:  # noqa: N802
        return b"NVIDIA Test"  # older versions of pynvml answer bytes

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu, version: int | None = None) -> Any:  # noqa: N802
        assert version == pynvml.nvmlMemory_v2
        self._ask(gpu, "memory")
        free = gpu.total - gpu.reserved - gpu.used
        return SimpleNamespace(total=gpu.total, reserved=gpu.reserved, used=gpu.used, free=free)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:  # noqa: N802
        self._ask(gpu, "compute")
        return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in gpu.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: Gpu) -> list[Any]:  # noqa: N802
        self._ask(gpu, "graphics")
        return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in gpu.graphics]

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:  # noqa: N802
        self._ask(gpu, "mig")
        return [int(gpu.mig is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:  # noqa: N802
        return len(gpu.mig or [])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, number: int) -> Gpu:  # noqa: N802
        instance = (gpu.mig or [])[number]
        if instance is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return instance

    def nvmlEventSetCreate(self) -> list[Gpu]:  # noqa: N802
        return []

    def nvmlDeviceRegisterEvents(self, gpu: Gpu, kinds: int, events: list[Gpu]) -> None:  # noqa: N802
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        self._ask(gpu, "events")
        events.append(gpu)

    def nvmlEventSetWait_v2(self, events: list[Gpu], timeout_ms: int) -> Any:  # noqa: N802
        assert timeout_ms == 0
        if not events[0].xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=ctypes.c_ulonglong(events[0].xids.pop(0)).value)

    def nvmlEventSetFree(self, events: list[Gpu]) -> None:  # noqa: N802
        self.freed_events += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """A driver with two cards, in the host's pid namespace. Every initialisation must be given back."""
    fake = FakeNvml([Gpu("GPU-aaaa"), Gpu("GPU-bbbb")])
    monkeypatch.setattr(nvml, "pynvml", fake)
    monkeypatch.setattr(nvml, "sees_host_pids", lambda: True)
    opened: list[nvml.NvmlCard] = []
    create = nvml.NvmlCard.__init__

    def remember(card: nvml.NvmlCard, *args: Any, **kwargs: Any) -> None:
        create(card, *args, **kwargs)
        opened.append(card)

    monkeypatch.setattr(nvml.NvmlCard, "__init__", remember)
    yield fake
    for card in opened:
        card.close()
        card.close()
    assert fake.users == 0


def test_a_reading_is_nvmls_second_version(driver: FakeNvml, tmp_path: Path) -> None:
    """The driver's reserve stands apart from what is used, and the four figures add up."""
    card: DriverCard = list_cards(None, host_dir=tmp_path)[0]
    reading = card.read()
    assert (reading.total, reading.driver, reading.used) == (24 * GIB, 400 * MIB, GIB)
    assert reading.total == reading.driver + reading.used + reading.free
    assert (card.uuid, card.index, card.product, card.total) == ("GPU-aaaa", 0, "NVIDIA Test", 24 * GIB)


def test_the_child_is_pinned_by_id(driver: FakeNvml) -> None:
    """The child's environment names the card by its id, in PCI order, and sets up its allocator."""
    environment = nvml.list_nvml_cards()[1].child_environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-bbbb"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["PYTORCH_ALLOC_CONF"] == environment["PYTORCH_CUDA_ALLOC_CONF"]
    assert "expandable_segments:True" in environment["PYTORCH_ALLOC_CONF"]


def test_headroom_is_at_least_512_mib(driver: FakeNvml) -> None:
    """A real card keeps the larger of 5 % and 512 MiB free."""
    driver.gpus[1].total = 4 * GIB
    assert [card.headroom for card in nvml.list_nvml_cards()] == [24 * GIB // 20, 512 * MIB]


def test_processes_are_the_larger_of_both_lists(driver: FakeNvml) -> None:
    """A process with compute and graphics contexts is counted once."""
    driver.gpus[0].compute = [(10, 5 * MIB), (11, 7 * MIB)]
    driver.gpus[0].graphics = [(10, 5 * MIB), (12, MIB)]
    assert nvml.list_nvml_cards()[0].read().processes == {10: 5 * MIB, 11: 7 * MIB, 12: MIB}


@pytest.mark.parametrize("case", ["not told", "not supported", "no permission", "container"])
def test_unknown_processes_are_none(driver: FakeNvml, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes are hidden, or named in another pid namespace, the map is None; the rest stands."""
    gpu = driver.gpus[0]
    gpu.compute = [(10, 5 * MIB)]
    match case:
        case "not told":
            gpu.compute.append((11, None))
        case "not supported":
            gpu.fails["graphics"] = pynvml.NVML_ERROR_NOT_SUPPORTED
        case "no permission":
            gpu.fails["compute"] = pynvml.NVML_ERROR_NO_PERMISSION
        case "container":
            monkeypatch.setattr(nvml, "sees_host_pids", lambda: False)
    reading = nvml.list_nvml_cards()[0].read()
    assert (reading.used, reading.processes) == (GIB, None)


def test_one_lost_card_hides_no_other(driver: FakeNvml) -> None:
    """A card that is lost when the host is listed is left out, and the names of the others do not move."""
    driver.gpus[0].fails["handle"] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert [(card.uuid, card.index) for card in nvml.list_nvml_cards()] == [("GPU-bbbb", 1)]


def test_a_card_lost_later_leaves_the_other_readable(driver: FakeNvml) -> None:
    """A card that is lost later says so in its own readings only."""
    first, second = nvml.list_nvml_cards()
    assert first.read().used == second.read().used
    driver.gpus[0].fails["memory"] = pynvml.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(CardUnreadable, match="GPU-aaaa") as lost:
        first.read()
    assert lost.value.lost
    assert second.read().used == GIB


def test_a_failed_reading_starts_nvml_again(driver: FakeNvml) -> None:
    """After a failure the next reading initialises the library anew, and succeeds once the card is back."""
    card = nvml.list_nvml_cards()[0]
    card.read()
    inits = driver.inits
    driver.gpus[0].fails["memory"] = pynvml.NVML_ERROR_UNKNOWN
    with pytest.raises(CardUnreadable):
        card.read()
    del driver.gpus[0].fails["memory"]
    assert card.read().used == GIB
    assert driver.inits == inits + 1


def test_a_driver_that_is_gone_is_a_lost_card(driver: FakeNvml) -> None:
    """When NVML no longer starts, as in a container that lost its devices, the card counts as lost."""
    card = nvml.list_nvml_cards()[0]
    driver.init_error = pynvml.NVML_ERROR_UNKNOWN
    with pytest.raises(CardUnreadable, match="restart") as gone:
        card.read()
    assert gone.value.lost


def test_a_passing_failure_is_not_a_lost_card(driver: FakeNvml) -> None:
    """A time-out of the driver is unreadable, not lost."""
    card = nvml.list_nvml_cards()[0]
    driver.gpus[0].fails["memory"] = pynvml.NVML_ERROR_TIMEOUT
    with pytest.raises(CardUnreadable) as failed:
        card.read()
    assert not failed.value.lost


def test_unsupported_memory_is_a_total_of_0(driver: FakeNvml) -> None:
    """A card that does not report its memory is listed and says why it admits nothing; others are as ever."""
    driver.gpus[0].fails["memory"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    first, second = nvml.list_nvml_cards()
    assert (first.total, second.total) == (0, 24 * GIB)
    assert "admits nothing" in first.remark and second.remark == ""
    with pytest.raises(CardUnreadable, match="does not report") as silent:
        first.read()
    assert not silent.value.lost


def test_mig_instances_stand_for_their_card(driver: FakeNvml) -> None:
    """Instances are cards with ids of their own, gaps are skipped, and the parent is not a card."""
    driver.gpus[0].mig = [Gpu("MIG-1", total=5 * GIB), None, Gpu("MIG-2", total=10 * GIB)]
    driver.gpus[0].fails["memory"] = pynvml.NVML_ERROR_NO_PERMISSION
    cards = nvml.list_nvml_cards()
    assert [(card.uuid, card.index, card.total) for card in cards] == [
        ("MIG-1", 0, 5 * GIB),
        ("MIG-2", 1, 10 * GIB),
        ("GPU-bbbb", 2, 24 * GIB),
    ]
    assert cards[0].read().total == 5 * GIB
    assert cards[0].child_environment()["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    assert cards[0].xids() == []


def test_cards_without_mig_are_cards(driver: FakeNvml) -> None:
    """Where MIG is not supported at all, that is no error."""
    driver.gpus[0].fails["mig"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert len(nvml.list_nvml_cards()) == 2


def test_xids_are_told_once(driver: FakeNvml) -> None:
    """Events since the last call, in order, and then none."""
    card = nvml.list_nvml_cards()[0]
    driver.gpus[0].xids = [79, 48]
    assert (card.xids(), card.xids()) == ([79, 48], [])
    card.close()
    assert driver.freed_events == 1


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_unsupported_events_are_no_events(driver: FakeNvml, code: int) -> None:
    """Where the driver does not report events there are none, and readings go on."""
    card = nvml.list_nvml_cards()[0]
    driver.gpus[0].fails["events"] = code
    assert (card.xids(), card.xids()) == ([], [])
    assert card.read().used == GIB


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "--simulate"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "nvidia-smi"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot"),
        (pynvml.NVML_ERROR_UNKNOWN, "restart"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia"),
    ],
)
def test_no_nvml_names_the_remedy(driver: FakeNvml, code: int, remedy: str, tmp_path: Path) -> None:
    """A host without a usable driver gets one line that says what to do."""
    driver.init_error = code
    with pytest.raises(NoNvml, match=remedy) as refused:
        list_cards(None, host_dir=tmp_path)
    assert "\n" not in str(refused.value)


def test_a_driver_without_cards_is_no_nvml(driver: FakeNvml, tmp_path: Path) -> None:
    """A driver that shows no card that answers is refused like none, and given back."""
    driver.gpus.clear()
    with pytest.raises(NoNvml, match="no card answers"):
        list_cards(None, host_dir=tmp_path)
    assert driver.users == 0


def test_a_closed_card_is_not_opened_again(driver: FakeNvml) -> None:
    """After close, readings fail and hold nothing of the driver."""
    card = nvml.list_nvml_cards()[0]
    card.read()
    card.close()
    with pytest.raises(CardUnreadable, match="closed"):
        card.read()
    assert (card.xids(), driver.users) == ([], 0)
