"""What the services need from the outside, as protocols. ``coordinator/etcd`` implements the storage half.

Tokens are on the wire scale (``core.fencing``) everywhere above the etcd layer; ``revision`` is etcd's own
number and is only compared, never computed with. Deadlines are absolute, in seconds of ``Clock.monotonic``.

Storage calls raise ``coordinator.errors.StorageError``s: NotApplied (certain: nothing was written),
OutcomeUnknown (the write may stand), EtcdUnavailable (a read failed).
"""

from __future__ import annotations

from coordinator.ports.circuits import (
    CircuitChanges,
    CircuitStore,
    CircuitSwap,
    StoredCircuit,
)
from coordinator.ports.jobs import (
    CommitObserver,
    JobStore,
    PendingCommit,
    StateSink,
)
from coordinator.ports.locks import (
    LockChanges,
    LockCommit,
    LockDeletion,
    LocksRead,
    LockStore,
)
from coordinator.ports.queues import (
    QueueChanges,
    QueueStore,
    QueueSwap,
    StoredQueue,
)
from coordinator.ports.session_admin import (
    HeldBySession,
    SessionAdminStore,
    StoredSession,
)
from coordinator.ports.sessions import (
    Confirmation,
    KeptAlive,
    Session,
    SessionStore,
)
from coordinator.ports.surroundings import (
    Clock,
    Entropy,
    Membership,
    Meters,
    Notices,
    StorageGauge,
)
from coordinator.ports.values import (
    Checkpoint,
    Commit,
    Due,
    JobPage,
    Operation,
    ReadyPage,
    Snapshot,
    Spec,
    Stored,
)
from coordinator.ports.watching import (
    Changes,
    NamespaceFeeds,
    Present,
)

__all__ = [
    "Changes",
    "Checkpoint",
    "CircuitChanges",
    "CircuitStore",
    "CircuitSwap",
    "Clock",
    "Commit",
    "CommitObserver",
    "Confirmation",
    "Due",
    "Entropy",
    "HeldBySession",
    "JobPage",
    "JobStore",
    "KeptAlive",
    "LockChanges",
    "LockCommit",
    "LockDeletion",
    "LockStore",
    "LocksRead",
    "Membership",
    "Meters",
    "NamespaceFeeds",
    "Notices",
    "Operation",
    "PendingCommit",
    "Present",
    "QueueChanges",
    "QueueStore",
    "QueueSwap",
    "ReadyPage",
    "Session",
    "SessionAdminStore",
    "SessionStore",
    "Snapshot",
    "Spec",
    "StateSink",
    "StorageGauge",
    "Stored",
    "StoredCircuit",
    "StoredQueue",
    "StoredSession",
]
