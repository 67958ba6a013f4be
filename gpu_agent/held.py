"""What the ledger believes this agent to hold: jobs until their end is acknowledged, starts, and reports.

Owns: the three lists and that they agree with each other. Does not own what runs (`intake`), nor the calls
that carry reports and starts (`exchange`, `heartbeat`). `pairs` and `starts` are read by the heartbeat's
thread as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from scheduler.handover import HandedJob, OutcomeKind, Report, Start


class Held:
    """The jobs of one session. has_report: called for each that is put into the outbox."""

    def __init__(self, has_report: Callable[[], None]) -> None:
        self._has_report = has_report
        self._leases: dict[str, str] = {}
        self._starts: dict[str, tuple[str, float]] = {}
        self.outbox: list[Report] = []

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(job, lease) of everything whose end the ledger has not acknowledged."""
        return tuple(self._leases.items())

    @property
    def unreported(self) -> int:
        """Jobs that wait or run."""
        return len(self._leases) - len(self.outbox)

    def has(self, job_id: str, lease_id: str) -> bool:
        return self._leases.get(job_id) == lease_id

    def take(self, job: HandedJob) -> None:
        self._leases[job.job_id] = job.lease_id

    def start(self, job: HandedJob) -> None:
        """The job runs from now on."""
        self._starts[job.job_id] = (job.lease_id, time.monotonic())

    def starts(self) -> tuple[Start, ...]:
        """Runs that the ledger does not know to have begun, as old as they are now."""
        now = time.monotonic()
        known = list(self._starts.items())
        return tuple(Start(job, lease, round((now - since) * 1000)) for job, (lease, since) in known)

    def starts_are_known(self, starts: Sequence[Start]) -> None:
        """The ledger has heard of these starts."""
        for start in starts:
            known = self._starts.get(start.job_id)
            if known is not None and known[0] == start.lease_id:
                del self._starts[start.job_id]

    def report(
        self,
        job: HandedJob,
        kind: OutcomeKind,
        *,
        result: bytes | None = None,
        code: str | None = None,
        detail: str | None = None,
        field: str | None = None,
        peak: int = 0,
        run_ms: int = 0,
        alone: bool = False,
    ) -> None:
        """Say how a job ended; nothing is said of one that another lease holds by now."""
        if not self.has(job.job_id, job.lease_id):
            return
        self.outbox.append(
            Report(
                job.job_id,
                job.lease_id,
                kind,
                result=result,
                result_bytes=len(result) if result is not None else 0,
                code=code,
                detail=detail,
                field=field,
                peak_bytes=peak,
                run_ms=run_ms,
                alone=alone,
            )
        )
        self._has_report()

    def acknowledge(self, reports: Sequence[Report]) -> None:
        """The ledger has taken these reports in."""
        gone = {(report.job_id, report.lease_id) for report in reports}
        for job_id, lease_id in gone:
            if self.has(job_id, lease_id):
                del self._leases[job_id]
                self._starts.pop(job_id, None)
        self.outbox = [r for r in self.outbox if (r.job_id, r.lease_id) not in gone]

    def forget(self) -> None:
        """Another session owns all of it."""
        self._leases.clear()
        self._starts.clear()
        self.outbox.clear()
