"""The states of jobs and cards, as they are stored and shown.

What leads from one state of a job to the next is in `transitions`.
"""

from __future__ import annotations

from typing import Literal

State = Literal["queued", "leased", "running", "succeeded", "failed", "cancelled", "expired"]
SETTLED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled", "expired"})
OperatorState = Literal["ready", "cordoned", "draining"]
AgentState = Literal["starting", "ready", "down", "draining"]
