"""What every route of one worker shares."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.catalogue import Catalogue
from gateway.ledger import Ledger
from gateway.lifecycle import Lifecycle
from scheduler.settings import Settings


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of one worker."""

    settings: Settings
    ledger: Ledger
    catalogue: Catalogue
    lifecycle: Lifecycle
