"""The composition root.

Every part of a coordinator, made once and handed to whoever needs it. Nothing runs yet.
"""

from __future__ import annotations

from typing import Final

from coordinator.app.foundation import lay_foundation
from coordinator.app.locks import compose_locks, compose_parking
from coordinator.app.parts import Parts, Role
from coordinator.app.queues import compose_queues
from coordinator.app.readings import service_readings, stream_readings
from coordinator.app.recovery import compose_recovery
from coordinator.app.relay import StopsRelay
from coordinator.app.store_settings import call_limits
from coordinator.config import Settings
from coordinator.core.rendezvous import preferred
from coordinator.ports import Clock, Entropy
from coordinator.reconciler.by_hand import ByHand
from coordinator.reconciler.take_away import TakeAwayPass
from coordinator.rpc.admin_servicer import AdminServicer, AdminUseCases
from coordinator.rpc.job_servicer import JobServicer, JobUseCases
from coordinator.rpc.methods import SERVICES
from coordinator.rpc.work_servicer import WorkServicer
from coordinator.rpc.worker_servicer import WorkerServicer, WorkerUseCases
from coordinator.services.abandoned import Abandoned
from coordinator.services.arrivals import Arrivals
from coordinator.services.claim_by_id import ClaimById, ClaimByIdConfig
from coordinator.services.claiming import Delivery
from coordinator.services.contention import Contention, ContentionConfig
from coordinator.services.dispatch import Dispatch, DispatchConfig
from coordinator.services.index import Index, IndexConfig
from coordinator.services.job_changes import JobChanges
from coordinator.services.job_lines import JobLines
from coordinator.services.late_calls import LateCalls
from coordinator.services.pause_gate import PauseGate
from coordinator.services.queries import Queries
from coordinator.services.redelivery import Redelivery
from coordinator.services.redrive import Redrive
from coordinator.services.retrying import Retrying
from coordinator.services.session_admin import SessionAdmin
from coordinator.services.sessions import SessionConfig, Sessions
from coordinator.services.settlement import SettlementService
from coordinator.services.submission import Submission
from coordinator.services.subscription import Subscription, SubscriptionConfig
from coordinator.services.waiters import Waiters
from coordinator.services.work_stream import WorkStreamConfig
from coordinator.services.work_streams import WorkStreams

__all__ = ["COORDINATOR", "compose"]


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
    base = lay_foundation(settings, clock, entropy, endpoint=endpoint, version=version, dispatches=True)
    store, notices, metrics = base.store, base.notices, base.metrics
    recovery = compose_recovery(base, sweeps=settings.reconciler.enabled)
    holders = recovery.holders
    limits = call_limits(settings)
    locks = compose_locks(base, holders, limits)
    late = LateCalls(store.jobs, notices, metrics, clock)
    waiters, lines = Waiters(), JobLines()
    base.circuits.freed = waiters.wake_one
    gate = PauseGate(base.circuits, base.queues.paused)
    arrivals = Arrivals(
        waiters, lines, own_id=base.own_id, members=store.membership.dispatchers, preferred=preferred
    )
    stops = StopsRelay()
    index = Index(
        store.jobs,
        store.sessions,
        holders,
        clock,
        IndexConfig(),
        arrived=arrivals.arrived,
        cancelled=stops.asked,
    )
    base.changes.bind(index)
    parking = compose_parking(base, locks, index, arrived=arrivals.arrived, of_one=lines.arrived)
    abandoned = Abandoned(store.jobs, clock, arrived=arrivals.arrived)
    redelivery = Redelivery(store.jobs, store.sessions)
    delivery = Delivery(store.jobs, redelivery, abandoned, clock, timeout=DispatchConfig().commit_timeout)
    by_id = ClaimById(
        store.jobs,
        store.namespaces,
        store.present,
        index,
        holders,
        lines,
        Contention(clock, ContentionConfig(), has_line=lambda one: lines.has(one.namespace, one.name)),
        delivery,
        redelivery,
        abandoned,
        clock,
        ClaimByIdConfig(),
        expired=lambda namespace, job_id: recovery.due_loop.wake(),
        circuits=gate,
        locks=parking,
    )
    base.commits.bind((index, parking.locks, recovery.due, by_id, base.circuits.outcomes))
    take_away = TakeAwayPass(store.jobs, clock, entropy, again=holders.report_again, notices=notices)
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
        redelivery,
        delivery,
        by_id,
        clock,
        entropy,
        DispatchConfig(),
        expired=lambda namespace, job_id: recovery.due_loop.wake(),
        circuits=gate,
        locks=parking,
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
        locks=locks.delivery,
    )
    queries = Queries(store.jobs, holders)
    retrying = Retrying(store.jobs, holders, store.gauge, clock)
    subscription = Subscription(
        store.jobs, queries, clock, SubscriptionConfig(max_wait_s=settings.server.wait_max_s)
    )
    jobs = JobServicer(
        JobUseCases(
            submission=Submission(
                store.jobs, store.namespaces, store.gauge, clock, entropy, settings=base.queues.settings
            ),
            changes=JobChanges(store.jobs, holders, clock),
            retrying=retrying,
            redrive=Redrive(store.jobs, retrying, store.gauge, clock),
            queries=queries,
            subscription=subscription,
        ),
        clock,
        limits,
    )
    settlement = SettlementService(
        store.jobs,
        holders,
        store.present,
        clock,
        entropy,
        notices=notices,
        late=late.add,
        feeds=store.namespaces,
        settings=base.queues.settings,
    )
    streams = WorkStreams(
        dispatch,
        store.sessions,
        store.namespaces,
        holders,
        abandoned,
        clock,
        WorkStreamConfig(max_streams=settings.server.max_work_streams),
        fresh=index.ready,
    )
    stops.bind(streams.stop_asked)
    workers = WorkerServicer(
        WorkerUseCases(sessions=sessions, dispatch=dispatch, settlement=settlement),
        clock,
        limits,
        WorkServicer(streams, sessions, settlement, clock, entropy, coordinator_id=base.own_id),
    )
    queues = compose_queues(base, index, holders, waiters, arrivals)
    admin = AdminServicer(
        AdminUseCases(
            reconcile=ByHand(recovery.passes, clock),
            notices=notices,
            sessions=SessionAdmin(store.session_admin, holders, store.namespaces, clock, ready=index.ready),
        )
    )
    metrics.expose(service_readings(index, dispatch, late, base.circuits))
    metrics.expose(stream_readings(streams))
    return Parts(
        store=store,
        notices=notices,
        metrics=metrics,
        servicers={
            "leasekeeper.v1.JobService": jobs,
            "leasekeeper.v1.WorkerService": workers,
            "leasekeeper.v1.LockService": locks.servicer,
            "leasekeeper.v1.QueueService": queues.servicer,
            "leasekeeper.v1.AdminService": admin,
        },
        background={
            "index": index.run,
            "abandoned": abandoned.run,
            "parking": parking.run,
            "late calls": late.run,
            "take away": take_away.run,
            "work streams": streams.run,
            **base.background,
            **recovery.background,
            **locks.background,
            **queues.background,
        },
        listed=lambda: all(index.ready(name) for name in store.namespaces.namespaces()),
        drains=(streams.drain, dispatch.drain, subscription.drain, *locks.drains),
        closes=(subscription.close,),
    )


COORDINATOR: Final = Role(name="coordinator", services=tuple(SERVICES), compose=compose)
