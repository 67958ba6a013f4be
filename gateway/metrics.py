"""What `/metrics` shows: this gateway's own counts, and the pool's gauges as the ledger has them at a scrape.

Owns: the names and labels; labels are bounded (route, code, card, model known to the pool), never a job id.
With several workers the counts live in files that all of them share (prometheus_client's multiprocess mode,
switched on by `gateway.__main__` before this is imported); the pool's gauges are read anew, so no worker's
copy is ever stale.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import REGISTRY, Collector

from scheduler.views import CardView, QueueView

MULTIPROCESS_DIR = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

REQUESTS = Counter("vramgate_requests", "HTTP requests answered", ("route", "status"))
SECONDS = Histogram("vramgate_request_seconds", "Time from request to answer", ("route",), buckets=_SECONDS)
REFUSED = Counter("vramgate_request_refused", "Refusals by code", ("code",))
INFERENCES = Counter(
    "vramgate_inferences", "Answers of infer by model and how they ended", ("model", "outcome")
)
WAITING = Gauge("vramgate_waiting_requests", "Requests that wait for an outcome", multiprocess_mode="livesum")
BEAT_FAILURES = Counter("vramgate_gateway_beat_failures", "Beats of gateway workers that failed")


@functools.lru_cache(maxsize=1024)
def inferences(model: str, outcome: str) -> Counter:
    """The count of one model and outcome; looking it up by its labels costs more than counting."""
    return INFERENCES.labels(model, outcome)


class PoolCollector(Collector):
    """The pool as the ledger showed it a moment ago; `None` when the ledger did not answer."""

    def __init__(
        self,
        cards: Iterable[CardView] | None,
        queue: Iterable[QueueView] = (),
        totals: Mapping[str, int] | None = None,
    ) -> None:
        self._cards = cards
        self._queue = tuple(queue)
        self._totals = totals or {}

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("vramgate_store_up", "Whether the ledger answered this scrape")
        up.add_metric([], float(self._cards is not None))
        yield up
        if self._cards is None:
            return
        yield from self._card_metrics(tuple(self._cards))
        yield from self._queue_metrics()
        total = CounterMetricFamily("vramgate_pool_events", "Counters of the whole pool", labels=["event"])
        for name, value in sorted(self._totals.items()):
            total.add_metric([name], value)
        yield total

    def _card_metrics(self, cards: tuple[CardView, ...]) -> Iterator[Metric]:
        parts = GaugeMetricFamily(
            "vramgate_card_bytes", "Terms of a card's ledger identity", labels=["card", "part"]
        )
        state = GaugeMetricFamily(
            "vramgate_card_state", "1 for the state that the card is in", labels=["card", "state"]
        )
        jobs = GaugeMetricFamily("vramgate_card_jobs", "Jobs leased on the card", labels=["card"])
        running = GaugeMetricFamily("vramgate_card_running_jobs", "Jobs running on the card", labels=["card"])
        peak = GaugeMetricFamily(
            "vramgate_card_peak_leased_bytes", "Most bytes leased at once", labels=["card"]
        )
        for card in cards:
            for part, value in asdict(card.ledger).items():
                parts.add_metric([card.id, part], value)
            state.add_metric([card.id, card.state], 1)
            jobs.add_metric([card.id], card.jobs)
            running.add_metric([card.id], card.running)
            peak.add_metric([card.id], card.peak_leased_bytes)
        yield from (parts, state, jobs, running, peak)

    def _queue_metrics(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("vramgate_queue_jobs", "Jobs that wait", labels=["model"])
        size = GaugeMetricFamily("vramgate_queue_bytes", "Payload bytes that wait", labels=["model"])
        oldest = GaugeMetricFamily(
            "vramgate_queue_oldest_seconds", "Wait of the longest waiting job", labels=["model"]
        )
        for row in self._queue:
            waiting.add_metric([row.model], row.waiting)
            size.add_metric([row.model], row.waiting_bytes)
            oldest.add_metric([row.model], (row.oldest_ms or 0) / 1000)
        yield from (waiting, size, oldest)


def exposition(pool: PoolCollector) -> bytes:
    """The text of a scrape: the counts of all workers of this gateway, then the pool's gauges."""
    scrape = CollectorRegistry()
    scrape.register(pool)
    if MULTIPROCESS_DIR in os.environ:
        shared = CollectorRegistry()
        MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
        return generate_latest(shared) + generate_latest(scrape)
    return generate_latest(REGISTRY) + generate_latest(scrape)
