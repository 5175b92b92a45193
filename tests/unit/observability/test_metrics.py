"""What is counted, and that names of callers make no endless series (fault case 157)."""

from __future__ import annotations

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.core.notice import Notice, NoticeKind, PublishedNotice
from coordinator.observability.metrics import Metrics, Reading


def published(kind: NoticeKind, **fields: object) -> PublishedNotice:
    notice = Notice(kind=kind, reason="r", **fields)  # type: ignore[arg-type]
    return PublishedNotice(notice_id="n", order=1, time_ms=1, coordinator_id="c", notice=notice)


def samples(metrics: Metrics) -> dict[str, float]:
    """Samples by ``name{label=value,…}``."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_notices_are_counted_by_kind_and_queue() -> None:
    metrics = Metrics()

    metrics.noticed(published(NoticeKind.DEAD, queue="mail"))
    metrics.noticed(published(NoticeKind.DEAD, queue="mail"))
    metrics.noticed(published(NoticeKind.STORAGE))

    found = samples(metrics)
    assert found["leasekeeper_notices_total{kind=dead,queue=mail}"] == 2
    assert found["leasekeeper_notices_total{kind=storage,queue=}"] == 1
    assert found["leasekeeper_notices_total{kind=epoch,queue=}"] == 0


def test_what_recovery_did_is_counted() -> None:
    metrics = Metrics()

    metrics.noticed(published(NoticeKind.LOST))
    metrics.noticed(published(NoticeKind.TAKEN_AWAY, facts={"why": "undelivered"}))
    metrics.noticed(published(NoticeKind.DUPLICATE_RUN, overlap_ms=2_000, facts={"call": "settlement"}))
    metrics.late_call("settlement")
    metrics.late_call("settlement")
    metrics.pass_done("lost", 0.2, {"recovered": 3}, failed=1)
    metrics.pass_failed("lost")

    found = samples(metrics)
    assert found["leasekeeper_jobs_recovered_total"] == 1
    assert found["leasekeeper_claims_taken_away_total{reason=undelivered}"] == 1
    assert found["leasekeeper_duplicate_run_overlap_seconds_sum{call=settlement}"] == 2
    assert found["leasekeeper_duplicate_run_overlap_seconds_bucket{call=settlement,le=1.0}"] == 0
    assert found["leasekeeper_stale_calls_refused_total{call=settlement}"] == 2
    assert found["leasekeeper_reconcile_actions_total{action=recovered,pass=lost}"] == 3
    assert found["leasekeeper_reconcile_pass_seconds_count{pass=lost}"] == 1
    assert found["leasekeeper_reconcile_failures_total{pass=lost,what=item}"] == 1
    assert found["leasekeeper_reconcile_failures_total{pass=lost,what=pass}"] == 1


def test_whatever_callers_invent_the_series_stay_few() -> None:
    """Fault case 157."""
    metrics = Metrics()
    many: dict[str, float] = {f"k{number}": 1.0 for number in range(1_000)}
    metrics.expose([Reading(name="records", help="h", read=lambda: many, label="kind")])
    for number in range(20_000):
        kind = NoticeKind(1 + number % len(NoticeKind))
        facts = {"call": f"c{number}", "why": f"w{number}"}
        fields = {"queue": f"q{number % 1_000}", "job_id": f"j{number}", "session_id": f"s{number % 500}"}
        metrics.noticed(published(kind, facts=facts, **fields))
        metrics.late_call(f"c{number}")
        metrics.pass_done(f"p{number}", 0.1, {f"a{number}": 1}, failed=1)

    found = samples(metrics)

    assert len(found) < 2_000
    assert sum(value for name, value in found.items() if name.startswith("leasekeeper_notices")) == 20_000
    assert found["leasekeeper_records_total{kind=other}"] == 940
    assert any("queue=other" in name for name in found)
    assert not any(word in name for name in found for word in ("=j1", "=s1"))


def test_what_parts_keep_is_read_at_each_scrape() -> None:
    metrics = Metrics()
    kept = {"stalls": 1.0}
    metrics.expose(
        [
            Reading(name="lease_stalls", help="h", read=lambda: kept["stalls"]),
            Reading(name="waiting_calls", help="h", read=lambda: 7, grows=False),
        ]
    )

    assert samples(metrics)["leasekeeper_lease_stalls_total"] == 1
    kept["stalls"] = 5
    found = samples(metrics)

    assert (found["leasekeeper_lease_stalls_total"], found["leasekeeper_waiting_calls"]) == (5, 7)


def test_a_number_that_cannot_be_read_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()

    def broken() -> float:
        raise RuntimeError("no")

    metrics.expose([Reading(name="a", help="h", read=broken), Reading(name="b", help="h", read=lambda: 1)])
    with caplog.at_level(logging.ERROR):
        first, second = samples(metrics), samples(metrics)

    assert "leasekeeper_a_total" not in first
    assert first["leasekeeper_b_total"] == second["leasekeeper_b_total"] == 1
    assert len(caplog.records) == 1


def test_a_name_that_is_taken_is_refused() -> None:
    metrics = Metrics()
    reading = Reading(name="a", help="h", read=lambda: 1)
    metrics.expose([reading])

    with pytest.raises(ValueError, match="leasekeeper_a"):
        metrics.expose([reading])


def test_names_follow_the_conventions() -> None:
    metrics = Metrics("1.2")

    text = metrics.render()[0].decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]

    assert names
    assert all(name.startswith("leasekeeper_") and not name.endswith("_created") for name in names)
    kinds = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert all(name.endswith("_total") for name, kind in kinds.items() if kind == "counter")
    assert samples(metrics)["leasekeeper_build_info{version=1.2}"] == 1


def test_openmetrics_is_served_to_whoever_asks_for_it() -> None:
    body, content_type = Metrics().render("application/openmetrics-text; version=1.0.0")

    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
