"""Numbers that the parts keep for themselves, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from coordinator.etcd.store import EtcdStore
from coordinator.observability.metrics import Reading
from coordinator.observability.webhook import Webhook
from coordinator.services.circuits import Circuits
from coordinator.services.contention import Contention
from coordinator.services.dispatch import Dispatch
from coordinator.services.index import Index
from coordinator.services.late_calls import LateCalls
from coordinator.services.lock_cleanup import LockCleanup
from coordinator.services.lock_lines import LockLines
from coordinator.services.notices import NoticeHub
from coordinator.services.past_due import PastDue
from coordinator.services.shared_queues import SharedQueues
from coordinator.services.work_streams import WorkStreams

__all__ = [
    "lock_readings",
    "notice_readings",
    "queue_readings",
    "service_readings",
    "store_readings",
    "stream_readings",
]

_COMMITTED: Final = ("ops", "conflicts", "resent_ops", "expired", "rebuilt")
_TXNS: Final = ("txns", "refused", "unknown", "epoch_mismatches")


def store_readings(store: EtcdStore) -> Sequence[Reading]:
    """Of the store."""
    gauge = store.gauge

    def stats(names: Sequence[str]) -> Mapping[str, float]:
        return {name: getattr(store.committer.stats, name) for name in names}

    def levels() -> Mapping[str, float]:
        now = gauge.levels
        return {"in_use": now.in_use, "allocated": now.allocated, "quota": now.quota}

    return [
        Reading(
            name="commit_operations",
            help="Operations by what became of them: answered (ops), lost, sent again, expired, built again.",
            read=lambda: stats(_COMMITTED),
            label="outcome",
        ),
        Reading(
            name="commit_transactions",
            help="Transactions to etcd by what became of them: sent (txns), refused, unknown, other epoch.",
            read=lambda: stats(_TXNS),
            label="outcome",
        ),
        Reading(
            name="commits_outstanding",
            help="Operations taken and not yet answered.",
            read=lambda: store.committer.outstanding,
            grows=False,
        ),
        Reading(
            name="records_set_aside",
            help="Sights of records that cannot be decoded.",
            read=lambda: store.set_aside.counts,
            label="record",
        ),
        Reading(
            name="etcd_lease_stalls",
            help="Keepalive streams replaced because a renewal stayed unanswered.",
            read=lambda: store.keeper.stalls,
        ),
        Reading(
            name="etcd_regressions",
            help="Replies of etcd older than what was seen before their request.",
            read=lambda: store.client.pin.regressions,
        ),
        Reading(
            name="etcd_compactions",
            help="Compactions done by this process.",
            read=lambda: store.compactor.compactions,
        ),
        Reading(
            name="etcd_storage_bytes",
            help="Of etcd's fullest member, as of the last poll.",
            read=levels,
            grows=False,
            label="what",
        ),
        Reading(
            name="submissions_accepted",
            help="1 while etcd has room for new jobs.",
            read=lambda: float(gauge.accepts_submissions),
            grows=False,
        ),
        Reading(
            name="epoch_regressed",
            help="1 while etcd's history stands behind what was seen, and nothing is granted or settled.",
            read=lambda: float(store.present.regressed),
            grows=False,
        ),
    ]


def notice_readings(hub: NoticeHub, webhook: Webhook | None) -> Sequence[Reading]:
    """Of the ways that notices go."""
    readings = [
        Reading(name="notice_streams", help="WatchNotices under way.", read=lambda: hub.streams, grows=False),
        Reading(
            name="notice_sink_failures",
            help="Notices that a sink could not take.",
            read=lambda: hub.sink_failures,
        ),
    ]
    if webhook is not None:
        counts = webhook

        def outcomes() -> Mapping[str, float]:
            return {"delivered": counts.delivered, "dropped": counts.dropped}

        readings += [
            Reading(
                name="webhook_notices", help="Notices by what became of them.", read=outcomes, label="outcome"
            ),
            Reading(
                name="webhook_failed_tries",
                help="Requests that the webhook did not take.",
                read=lambda: counts.failed_tries,
            ),
            Reading(
                name="webhook_queued",
                help="Notices that wait for the webhook.",
                read=lambda: counts.queued,
                grows=False,
            ),
        ]
    return readings


def service_readings(
    index: Index, dispatch: Dispatch, late: LateCalls, circuits: Circuits
) -> Sequence[Reading]:
    """Of the services of a coordinator."""

    def not_closed() -> Mapping[str, float]:
        states = Counter(circuit.state.name.lower() for circuit in circuits.shared.not_closed().values())
        return {state: float(states[state]) for state in ("open", "half_open")}

    return [
        Reading(
            name="index_repaired",
            help="Differences between the index and the store that the comparison found and set right.",
            read=lambda: index.repaired,
        ),
        Reading(
            name="claim_conflicts",
            help="Claims that lost: the job had been taken, or changed.",
            read=lambda: dispatch.conflicts + dispatch.by_id.conflicts,
        ),
        Reading(
            name="relock_throttled",
            help="Claims by id that were refused without asking etcd.",
            read=lambda: dispatch.by_id.throttled,
        ),
        Reading(
            name="circuits",
            help="Circuits that are not closed, by their state; every coordinator tells the same.",
            read=not_closed,
            grows=False,
            label="state",
        ),
        Reading(
            name="claims_waiting",
            help="Long polls for jobs under way.",
            read=lambda: dispatch.waiting,
            grows=False,
        ),
        Reading(
            name="late_calls_dropped",
            help="Calls of lost attempts that were refused, and not looked up for want of room or of etcd.",
            read=lambda: late.dropped,
        ),
    ]


def queue_readings(past_due: PastDue, queues: SharedQueues) -> Sequence[Reading]:
    """Of queues."""
    return [
        Reading(
            name="jobs_past_due",
            help="Jobs at hand that wait past their due time; every coordinator tells the same.",
            read=lambda: past_due.waiting,
            grows=False,
        ),
        Reading(
            name="queues_paused",
            help="Queues that are paused; every coordinator tells the same.",
            read=lambda: len(queues.paused),
            grows=False,
        ),
    ]


def lock_readings(lines: LockLines, cleanup: LockCleanup, contention: Contention) -> Sequence[Reading]:
    """Of named locks."""
    return [
        Reading(
            name="locks_waiting", help="Calls that wait for a lock.", read=lambda: lines.waiting, grows=False
        ),
        Reading(
            name="locks_left_removed",
            help="Entries taken out of the lines of locks behind calls that gave up or went away.",
            read=lambda: cleanup.removed,
        ),
        Reading(
            name="locks_throttled",
            help="Tries for a lock that were refused without asking etcd.",
            read=lambda: contention.throttled,
        ),
    ]


def stream_readings(streams: WorkStreams) -> Sequence[Reading]:
    """Of workers' streams."""
    return [
        Reading(
            name="work_streams",
            help="Streams of workers under way.",
            read=lambda: streams.open_streams,
            grows=False,
        )
    ]
