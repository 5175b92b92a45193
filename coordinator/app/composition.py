"""The composition root.

Every part of a coordinator, made once and handed to whoever needs it. Nothing runs yet.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.app.relay import ChangesRelay, CommitRelay
from coordinator.app.store_settings import call_limits, store_config
from coordinator.config import Settings
from coordinator.core.rendezvous import preferred
from coordinator.etcd.store import EtcdStore, StoreListeners
from coordinator.observability.metrics import Metrics
from coordinator.ports import Clock, Entropy
from coordinator.reconciler.due import DuePass
from coordinator.reconciler.loop import LoopConfig, PassLoop
from coordinator.reconciler.lost import LostPass
from coordinator.reconciler.take_away import TakeAwayPass
from coordinator.rpc.job_servicer import JobServicer, JobUseCases
from coordinator.rpc.worker_servicer import WorkerServicer, WorkerUseCases
from coordinator.services.abandoned import Abandoned
from coordinator.services.arrivals import Arrivals
from coordinator.services.dispatch import Dispatch, DispatchConfig
from coordinator.services.holders import Holders
from coordinator.services.index import Index, IndexConfig
from coordinator.services.job_changes import JobChanges
from coordinator.services.late_calls import LateCalls
from coordinator.services.notices import NoticeHub
from coordinator.services.queries import Queries
from coordinator.services.redelivery import Redelivery
from coordinator.services.sessions import SessionConfig, Sessions
from coordinator.services.settlement import SettlementService
from coordinator.services.submission import Submission
from coordinator.services.subscription import Subscription, SubscriptionConfig
from coordinator.services.waiters import Waiters

__all__ = ["Parts", "compose"]

_DUE_EVERY_S = 0.25
_SWEEP_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What runs, and what is drained.

    ``servicers``: by full name of the service. ``background``: what runs beside the store until the
    coordinator stops; none of it ends by itself.
    """

    store: EtcdStore
    index: Index
    dispatch: Dispatch
    subscription: Subscription
    notices: NoticeHub
    metrics: Metrics
    servicers: Mapping[str, object]
    background: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]


def compose(settings: Settings, clock: Clock, entropy: Entropy, *, endpoint: str, version: str) -> Parts:
    """Make all parts. Call it inside the event loop that will run them.

    Args:
        settings: checked settings.
        clock: time.
        entropy: randomness and ids.
        endpoint: where clients reach this coordinator.
        version: of the software.

    Raises:
        ConfigError: a file cannot be read, or settings do not fit the store.
    """
    changes, commits = ChangesRelay(), CommitRelay()
    own_id = entropy.identifier()
    metrics = Metrics(version)
    notices = NoticeHub(clock, entropy, coordinator_id=own_id, sinks=(metrics.noticed,))
    store = EtcdStore(
        store_config(settings, coordinator_id=own_id, endpoint=endpoint, version=version),
        StoreListeners(changes=changes, commits=commits),
        clock=clock,
        entropy=entropy,
    )
    limits = call_limits(settings)
    lost = LostPass(store.jobs, store.namespaces, store.present, store.membership, clock)
    due = DuePass(store.jobs, store.namespaces, store.membership, clock)
    due_loop = PassLoop("due", due.step, clock, entropy, LoopConfig(interval_s=_DUE_EVERY_S))
    sweep_loop = PassLoop("lost sweep", lost.sweep, clock, entropy, LoopConfig(interval_s=_SWEEP_EVERY_S))
    holders = Holders(lost.suspect, notices=notices)
    late = LateCalls(store.jobs, notices, metrics, clock)
    waiters = Waiters()
    arrivals = Arrivals(waiters, own_id=own_id, members=store.membership.members, preferred=preferred)
    index = Index(store.jobs, store.sessions, holders, clock, IndexConfig(), arrived=arrivals.arrived)
    changes.bind(index)
    commits.bind((index, due))
    abandoned = Abandoned(store.jobs, clock, arrived=arrivals.arrived)
    take_away = TakeAwayPass(store.jobs, clock, entropy, again=holders.report_again)
    dispatch = Dispatch(
        store.jobs,
        store.sessions,
        store.namespaces,
        store.present,
        index,
        holders,
        waiters,
        arrivals,
        abandoned,
        Redelivery(store.jobs, store.sessions),
        clock,
        entropy,
        DispatchConfig(),
        expired=lambda namespace, job_id: due_loop.wake(),
    )
    sessions = Sessions(
        store.jobs,
        store.sessions,
        store.namespaces,
        store.present,
        holders,
        clock,
        SessionConfig(
            default_ttl_ms=limits.ttl_default_ms,
            longest_interval_ms=round(settings.sessions.heartbeat_max_s * 1000),
        ),
        overdue=take_away.add,
        late=late.add,
    )
    queries = Queries(store.jobs, holders)
    subscription = Subscription(
        store.jobs, queries, clock, SubscriptionConfig(max_wait_s=settings.server.wait_max_s)
    )
    jobs = JobServicer(
        JobUseCases(
            submission=Submission(store.jobs, store.namespaces, store.gauge, clock, entropy),
            changes=JobChanges(store.jobs, holders, clock),
            queries=queries,
            subscription=subscription,
        ),
        clock,
        limits,
    )
    workers = WorkerServicer(
        WorkerUseCases(
            sessions=sessions,
            dispatch=dispatch,
            settlement=SettlementService(
                store.jobs, holders, store.present, clock, entropy, notices=notices, late=late.add
            ),
        ),
        clock,
        limits,
    )
    return Parts(
        store=store,
        index=index,
        dispatch=dispatch,
        subscription=subscription,
        notices=notices,
        metrics=metrics,
        servicers={"leasekeeper.v1.JobService": jobs, "leasekeeper.v1.WorkerService": workers},
        background={
            "index": index.run,
            "abandoned": abandoned.run,
            "late calls": late.run,
            "take away": take_away.run,
            "lost": lost.run,
            "due": due_loop.run,
            "lost sweep": sweep_loop.run,
        },
    )
