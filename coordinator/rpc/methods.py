"""Which services are served, and how each of their methods is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from google.protobuf.descriptor import ServiceDescriptor

from coordinator.rpc import limits
from coordinator.rpc.auth import Scope
from coordinator.rpc.call_guard import Method
from leasekeeper.v1 import (
    admin_service_pb2,
    job_service_pb2,
    lock_service_pb2,
    queue_service_pb2,
    worker_service_pb2,
)

__all__ = ["METHODS", "SERVICES"]

SERVICES: Final[Mapping[str, ServiceDescriptor]] = MappingProxyType(
    {
        service.full_name: service
        for service in (
            job_service_pb2.DESCRIPTOR.services_by_name["JobService"],
            worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"],
            lock_service_pb2.DESCRIPTOR.services_by_name["LockService"],
            queue_service_pb2.DESCRIPTOR.services_by_name["QueueService"],
            admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
        )
    }
)
"""By full name. A name of a method is used in one service only."""

_READ, _WRITE, _WORK = Scope.READ, Scope.WRITE, Scope.WORK

METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    {
        "SubmitJob": Method(_WRITE),
        "SubmitJobs": Method(_WRITE, batch_field="jobs", largest=limits.REQUEST_BYTES),
        "GetJob": Method(_READ),
        "ListJobs": Method(_READ),
        "WaitJob": Method(_READ, wait_field="timeout"),
        "WatchJobs": Method(_READ),
        "UpdateJob": Method(_WRITE),
        "CancelJob": Method(_WRITE),
        "RetryJob": Method(_WRITE),
        "RedriveJobs": Method(_WRITE),
        "ListAttempts": Method(_READ),
        "DeleteJob": Method(_WRITE),
        "OpenSession": Method(_WORK),
        "CloseSession": Method(_WORK),
        "Heartbeat": Method(_WORK),
        "ClaimJobs": Method(_WORK, wait_field="wait"),
        "ClaimJob": Method(_WORK, wait_field="wait"),
        "CompleteJob": Method(_WORK),
        "FailJob": Method(_WORK),
        "ReleaseJob": Method(_WORK),
        "SettleJobs": Method(_WORK, batch_field="settlements", largest=limits.REQUEST_BYTES),
        "SaveCheckpoint": Method(_WORK),
        "Work": Method(_WORK, opening="open"),
        "AcquireLock": Method(_WORK, wait_field="wait"),
        "ReleaseLock": Method(_WORK),
        "GetLock": Method(_READ),
        "ListLocks": Method(_READ),
        "CheckToken": Method(_READ),
        "RevokeLock": Method(Scope.ADMIN),
        "ObserveLock": Method(_READ),
        "GetQueueStats": Method(_READ),
        "GetQueue": Method(_READ),
        "ListQueues": Method(_READ),
        "UpdateQueue": Method(Scope.ADMIN),
        "PauseQueue": Method(Scope.ADMIN),
        "ResumeQueue": Method(Scope.ADMIN),
        "ResetCircuit": Method(Scope.ADMIN),
        "ListSessions": Method(_READ),
        "GetSession": Method(_READ),
        "DrainSession": Method(Scope.ADMIN),
        "RunReconcile": Method(Scope.ADMIN),
        "WatchNotices": Method(Scope.ADMIN),
    }
)
"""How each method is served; its behaviour is the servicer's method of the same name in snake case."""
