"""Metrics for Prometheus: a registry of its own, names by its conventions, and few label values.

A label never holds an id. A name that callers invent (a queue) is counted under itself only while there is
room; the rest is ``other``, so that memory and scrapes stay bounded whatever callers do.

Counters that parts of the coordinator keep for themselves are read at each scrape (``Reading``); the part
that keeps one pays nothing for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from coordinator.core.notice import NoticeKind, PublishedNotice

__all__ = ["OTHER", "FoldedNames", "Metrics", "Reading"]

_logger = logging.getLogger(__name__)

OTHER: Final = "other"
"""Stands for all names beyond the first few."""

_QUEUES: Final = 40
_PASSES: Final = 20
_ACTIONS: Final = 60
_CALLS: Final = ("settlement", "checkpoint", "heartbeat")
_REASONS: Final = ("undelivered", "timed_out", "cancelled")
_OVERLAP_BUCKETS: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3_600.0)
_PASS_BUCKETS: Final = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class FoldedNames:
    """The first few names as they are, all later ones as ``other``.

    Args:
        limit: how many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        """What to count ``name`` under."""
        if name in self._known:
            return name
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(name)
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A number that a part keeps, read at each scrape; ``name`` is without prefix and without ``_total``.

    ``read`` answers the number, or numbers by the value of ``label``. ``grows``: a counter, else a gauge.
    """

    name: str
    help: str
    read: Callable[[], float | Mapping[str, float]]
    grows: bool = True
    label: str = ""


class Metrics:
    """Implements ``ports.Meters``, takes notices in, and answers scrapes. Used in one event loop.

    Args:
        version: of the software.
    """

    def __init__(self, version: str = "0") -> None:
        # They would double the series and say nothing that a scrape does not.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry()
        self._queue = FoldedNames(_QUEUES)
        self._pass = FoldedNames(_PASSES)
        self._action = FoldedNames(_ACTIONS)
        self._notices = Counter(
            "leasekeeper_notices", "Notices raised by this coordinator.", ["kind", "queue"], registry=registry
        )
        self._late = Counter(
            "leasekeeper_stale_calls_refused",
            "Calls refused because their token stands for no claim any more.",
            ["call"],
            registry=registry,
        )
        self._overlap = Histogram(
            "leasekeeper_duplicate_run_overlap_seconds",
            "How long newer attempts had run when a call of a lost one came.",
            ["call"],
            buckets=_OVERLAP_BUCKETS,
            registry=registry,
        )
        self._recovered = Counter(
            "leasekeeper_jobs_recovered",
            "Jobs recovered by this coordinator after their holder's lease had ended.",
            registry=registry,
        )
        self._taken = Counter(
            "leasekeeper_claims_taken_away",
            "Claims that this coordinator took from live sessions.",
            ["reason"],
            registry=registry,
        )
        self._pass_seconds = Histogram(
            "leasekeeper_reconcile_pass_seconds",
            "Duration of passes of the reconciler.",
            ["pass"],
            buckets=_PASS_BUCKETS,
            registry=registry,
        )
        self._pass_failures = Counter(
            "leasekeeper_reconcile_failures",
            "Passes that could not finish, and jobs or keys that one tried in vain.",
            ["pass", "what"],
            registry=registry,
        )
        self._actions = Counter(
            "leasekeeper_reconcile_actions", "Repairs by kind.", ["pass", "action"], registry=registry
        )
        Gauge("leasekeeper_build_info", "Always 1.", ["version"], registry=registry).labels(version).set(1)
        for kind in NoticeKind:
            self._notices.labels(kind.name.lower(), "")
        for call in _CALLS:
            self._late.labels(call)
            self._overlap.labels(call)
        for reason in _REASONS:
            self._taken.labels(reason)

    def noticed(self, published: PublishedNotice) -> None:
        """Count a notice; a sink of the hub."""
        notice = published.notice
        self._notices.labels(notice.kind.name.lower(), self._queue(notice.queue)).inc()
        if notice.kind is NoticeKind.LOST:
            self._recovered.inc()
        elif notice.kind is NoticeKind.TAKEN_AWAY:
            self._taken.labels(_one_of(_REASONS, notice.facts.get("why", ""))).inc()
        elif notice.kind is NoticeKind.DUPLICATE_RUN:
            call = _one_of(_CALLS, notice.facts.get("call", ""))
            self._overlap.labels(call).observe(notice.overlap_ms / 1000)

    def late_call(self, call: str) -> None:
        """See ``ports.Meters``."""
        self._late.labels(_one_of(_CALLS, call)).inc()

    def pass_done(self, name: str, seconds: float, counts: Mapping[str, int], failed: int) -> None:
        """See ``ports.Meters``."""
        name = self._pass(name)
        self._pass_seconds.labels(name).observe(seconds)
        for action, count in counts.items():
            self._actions.labels(name, self._action(action)).inc(count)
        if failed:
            self._pass_failures.labels(name, "item").inc(failed)

    def pass_failed(self, name: str) -> None:
        """See ``ports.Meters``."""
        self._pass_failures.labels(self._pass(name), "pass").inc()

    def expose(self, readings: Sequence[Reading]) -> None:
        """Read these too at each scrape, from now on.

        Raises:
            ValueError: a name is taken.
        """
        self.registry.register(_Readings(readings))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics, and the content type that fits the ``Accept`` header."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type


class _Readings(Collector):
    """Reads numbers that others keep. One that cannot be read is left out, and said once."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._readings = tuple(readings)
        self._failed: set[str] = set()
        self._labels = {reading.name: FoldedNames(_ACTIONS) for reading in readings if reading.label}

    def describe(self) -> Iterable[Metric]:
        """The families, without values, so that registration reads nothing."""
        return [_family(reading) for reading in self._readings]

    def collect(self) -> Iterable[Metric]:
        """The families as they stand now."""
        for reading in self._readings:
            try:
                family = self._read(reading)
            except Exception:
                # One part's fault must not blind the scrape of all others.
                if reading.name not in self._failed:
                    self._failed.add(reading.name)
                    _logger.exception("the metric %s cannot be read", reading.name)
                continue
            yield family

    def _read(self, reading: Reading) -> Metric:
        family = _family(reading)
        found = reading.read()
        if isinstance(found, Mapping):
            added: dict[str, float] = {}
            for value, number in found.items():
                name = self._labels[reading.name](value)
                added[name] = added.get(name, 0) + number
            for name, number in added.items():
                family.add_metric([name], number)
        else:
            family.add_metric([], found)
        return family


def _family(reading: Reading) -> CounterMetricFamily | GaugeMetricFamily:
    name, labels = f"leasekeeper_{reading.name}", [reading.label] if reading.label else []
    if reading.grows:
        return CounterMetricFamily(name, reading.help, labels=labels)
    return GaugeMetricFamily(name, reading.help, labels=labels)


def _one_of(known: Sequence[str], name: str) -> str:
    return name if name in known else OTHER
