"""What the driver says about one card: the supervisor's side of the device interface.

Owns the shape of a reading and of a card, and the two ways in which there is none. Knows nothing of leases
and imports no torch: what a reading means for grants is decided in the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One look at the driver, in bytes: `total = driver + used + free`.

    `used` leaves out the driver's own reserve (NVML's v2 figure). `processes` maps a pid to its bytes, and is
    None where the driver does not show processes of this pid namespace: unknown is not the same as none.
    """

    total: int
    driver: int
    used: int
    free: int
    processes: Mapping[int, int] | None


class CardUnreadable(Exception):
    """The driver gave no reading. `lost` tells a card that is gone from one that is only slow or silent."""

    def __init__(self, reason: str, *, lost: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lost = lost


class NoNvml(Exception):
    """This host shows no card at all; the message is one line that names the remedy."""


class DriverCard(Protocol):
    """One card as its driver knows it. Ids are opaque strings and are never parsed."""

    @property
    def uuid(self) -> str:
        """The driver's id: `GPU-...`, `MIG-...`, or `SIM-<8 hex>-<n>`."""
        ...

    @property
    def index(self) -> int:
        """Position among this host's cards: the n of the name `host:n`. Identifies nothing by itself."""
        ...

    @property
    def product(self) -> str:
        """What a person calls it."""
        ...

    @property
    def total(self) -> int:
        """Bytes on the card; 0 where the driver cannot say, and then `read` raises."""
        ...

    @property
    def headroom(self) -> int:
        """Bytes to leave free unless a setting says otherwise: 5 %, and on a real card at least 512 MiB."""
        ...

    @property
    def remark(self) -> str:
        """What a person should know of this card beside its numbers, in one line; empty for most."""
        ...

    def read(self) -> MemoryReading:
        """Ask the driver now. May hang on a lost card: call it on a thread of its own, under a deadline.

        Raises CardUnreadable. The next call after a failure initialises the driver library again by itself.
        """
        ...

    def xids(self) -> list[int]:
        """Hardware Xid events since the last call, oldest first; empty where none are reported."""
        ...

    def child_environment(self) -> dict[str, str]:
        """What the torch child's environment must hold before exec: it sees this card and no other."""
        ...

    def close(self) -> None:
        """Let go of the driver. Idempotent; the card itself is left as it is."""
        ...
