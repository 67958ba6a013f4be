"""The simulated card from the driver's side: sums, strangers, deaths, faults."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpu_agent.device.listing import list_cards
from gpu_agent.device.reading import CardUnreadable, DriverCard
from gpu_agent.device.sim_card import CardFull, Fault, Holder, SimCardFile
from gpu_agent.device.simulated import SimSpec, SimulatedCard, available_memory, create_cards
from tests.waiting import wait_for

MIB, GIB = 1024**2, 1024**3

_HOLDER = """
import sys, time
from pathlib import Path
from gpu_agent.device.simulated import SimulatedCard
card = SimulatedCard(Path(sys.argv[1]), index=0)
stranger = card.stranger(int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
stranger.vanish()
print("vanished", flush=True)
time.sleep(60)
"""


def _hold(card: SimulatedCard, host_dir: Path, nbytes: int) -> subprocess.Popen[str]:
    """A process of its own that holds `nbytes` of the card until its stdin is closed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(host_dir / f"{card.uuid}.card"), str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_quiet_card_adds_up(card: SimulatedCard) -> None:
    """total = driver + used + free, and nobody is shown on a card that nobody uses."""
    reading = card.read()
    assert reading.total == 512 * MIB
    assert reading.total == reading.driver + reading.used + reading.free
    assert (reading.used, reading.processes) == (0, {})


def test_a_stranger_appears_and_vanishes(card: SimulatedCard) -> None:
    """Foreign use is in the next reading, booked on its process, and gone from the one after it vanished."""
    with card.stranger(100 * MIB):
        reading = card.read()
        assert (reading.used, reading.processes) == (100 * MIB, {os.getpid(): 100 * MIB})
    assert card.read().used == 0


def test_a_stranger_of_another_process_counts(card: SimulatedCard, tmp_path: Path) -> None:
    """A second process makes foreign use appear and vanish on the same card."""
    holder = _hold(card, tmp_path, 64 * MIB)
    try:
        assert card.read().processes == {holder.pid: 64 * MIB}
        assert holder.stdin is not None
        holder.stdin.close()
        wait_for("the stranger vanished", lambda: card.read().used == 0)
    finally:
        holder.kill()
        holder.wait()


def test_killed_memory_is_back_after_a_delay(tmp_path: Path) -> None:
    """Bytes of a killed process are in use at the first reading after its death, and come back later."""
    (card,) = create_cards(SimSpec.parse("1x512MiB,delay_ms=300"), host_dir=tmp_path)
    holder = _hold(card, tmp_path, 64 * MIB)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert card.read().used == 64 * MIB
    wait_for("the bytes are back", lambda: card.read().used == 0)


def test_a_zombie_is_dead(card: SimulatedCard, tmp_path: Path) -> None:
    """Memory comes back although nobody has waited for the killed process yet, as it does on a real card."""
    holder = _hold(card, tmp_path, 64 * MIB)
    os.kill(holder.pid, signal.SIGKILL)
    wait_for("the bytes are back", lambda: card.read().used == 0)
    holder.wait()


def test_a_reused_pid_is_another_process(card: SimulatedCard, tmp_path: Path) -> None:
    """A slot belongs to the pair of pid and start time, so a reused pid does not keep a dead one's bytes."""
    with card.stranger(64 * MIB):
        path = tmp_path / f"{card.uuid}.card"
        content = bytearray(path.read_bytes())
        content[4096 + 16] ^= 1  # the start time in the first slot
        path.write_bytes(content)
        wait_for("the bytes are back", lambda: card.read().used == 0)


def test_a_full_card_refuses(card: SimulatedCard) -> None:
    """No more is ever used than the card has beside its driver, and a refusal takes nothing."""
    with card.stranger(500 * MIB), pytest.raises(CardFull):
        card.stranger(5 * MIB)
    assert card.read().used == 0


def test_only_a_live_process_can_hold(card: SimulatedCard) -> None:
    """A stranger cannot be booked on a process that does not exist."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(ProcessLookupError):
        card.stranger(MIB, pid=ended.pid)


def _grow_and_shrink(path: Path, rounds: int) -> None:
    file = SimCardFile(path)
    slot = file.claim(Holder.CHILD, 0)
    for _ in range(rounds):
        if file.grow(slot, 2 * MIB):
            file.shrink(slot, 2 * MIB)
    file.grow(slot, 2 * MIB)
    file.close()
    os.kill(os.getpid(), signal.SIGSTOP)


def test_processes_do_not_lose_each_others_bytes(card: SimulatedCard, tmp_path: Path) -> None:
    """Several processes that grow and shrink at once end with exactly what each of them holds."""
    path = tmp_path / f"{card.uuid}.card"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_grow_and_shrink, args=(path, 300)) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        wait_for("each holds 2 MiB", lambda: card.read().processes == {w.pid: 2 * MIB for w in workers})
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def test_a_lost_card_says_so(card: SimulatedCard) -> None:
    """A lost card raises with `lost`, a silent one without, and a repaired one reads again."""
    card.set_fault(Fault.LOST)
    with pytest.raises(CardUnreadable) as lost:
        card.read()
    card.set_fault(Fault.SILENT)
    with pytest.raises(CardUnreadable) as silent:
        card.read()
    card.set_fault(Fault.NONE)
    assert (lost.value.lost, silent.value.lost) == (True, False)
    assert card.read().used == 0


def test_a_hanging_driver_hangs(card: SimulatedCard) -> None:
    """A reading of a hanging driver does not return until the driver does."""
    card.set_fault(Fault.HANGING)
    done = threading.Event()

    def read() -> None:
        card.read()
        done.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert not done.wait(0.1)
    card.set_fault(Fault.NONE)
    assert done.wait(20)
    reader.join()


def test_xids_are_told_once(card: SimulatedCard, tmp_path: Path) -> None:
    """Each event is reported once to each who watches, in order."""
    other = SimulatedCard(tmp_path / f"{card.uuid}.card", index=0)
    card.raise_xid(79)
    other.raise_xid(13)
    assert (card.xids(), card.xids()) == ([79, 13], [])
    assert other.xids() == [79, 13]
    other.close()


def test_hidden_processes_are_unknown_not_absent(card: SimulatedCard) -> None:
    """Where the driver shows no processes, the map is None and the bytes still count."""
    card.show_processes(False)
    with card.stranger(MIB):
        assert (card.read().used, card.read().processes) == (MIB, None)


def test_the_same_line_gives_the_same_cards(tmp_path: Path) -> None:
    """Ids are stable over restarts, differ between cards, and have the form that is promised."""
    first, again = (list_cards("2x512MiB", host_dir=tmp_path) for _ in range(2))
    assert [card.uuid for card in first] == [card.uuid for card in again]
    assert [card.index for card in first] == [0, 1]
    family = first[0].uuid.removesuffix("-0")
    assert first[1].uuid == f"{family}-1"
    assert family.startswith("SIM-") and len(family) == len("SIM-") + 8


def test_a_card_in_use_keeps_its_configuration(tmp_path: Path) -> None:
    """A second opener with other options cannot change a card under those who hold bytes of it."""
    (card,) = create_cards(SimSpec.parse("1x512MiB,scale=3"), host_dir=tmp_path)
    with card.stranger(MIB):
        (other,) = create_cards(SimSpec.parse("1x512MiB,scale=5"), host_dir=tmp_path)
        assert other.scale == 3
    (later,) = create_cards(SimSpec.parse("1x512MiB,scale=5"), host_dir=tmp_path)
    assert later.scale == 5


def test_all_cards_fit_half_of_the_hosts_memory() -> None:
    """The scale is the least at which all cards together fit half of what is available."""
    spec = SimSpec.parse("2x24GiB")
    assert spec.configure(available=200 * GIB).scale == 1
    assert spec.configure(available=20 * GIB).scale == 5
    assert 2 * 24 * GIB / spec.configure(available=available_memory()).scale <= available_memory() * 0.51


def test_headroom_is_a_twentieth(card: SimulatedCard) -> None:
    """A simulated card keeps 5 % free, without the 512 MiB of a real one, and says what it is."""
    assert card.headroom == 512 * MIB // 20
    assert "one real byte counts as 1" in card.remark


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "x24GiB",
        "0x24GiB",
        "99x1GiB",
        "2x",
        "2x24",
        "2xfoo",
        "1x512MiB,scale=0",
        "1x512MiB,colour=red",
    ],
)
def test_a_bad_line_is_refused(text: str, tmp_path: Path) -> None:
    """What is no description of simulated cards is refused in one line that quotes it."""
    with pytest.raises(ValueError, match="simulate = ") as refused:
        list_cards(text, host_dir=tmp_path)
    assert "\n" not in str(refused.value)


def test_a_damaged_file_is_made_anew(card: SimulatedCard, tmp_path: Path) -> None:
    """A card's file of another version, or half of one, does not keep the card from being made."""
    path = tmp_path / f"{card.uuid}.card"
    path.write_bytes(b"not a card")
    (again,) = create_cards(SimSpec.parse("1x512MiB"), host_dir=tmp_path)
    assert again.read().total == 512 * MIB


def test_a_simulated_card_is_a_driver_card(card: SimulatedCard) -> None:
    """The simulated card has the whole protocol (checked by the type checker here), and hides real cards."""
    as_card: DriverCard = card
    assert as_card.child_environment()["CUDA_VISIBLE_DEVICES"] == ""
