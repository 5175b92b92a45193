"""The composition of ``leasekeeper reconciler``: store, feeds and passes; nothing is handed out.

Its health says more than a coordinator's: it is NOT_SERVING also while a pass fails or does not end.
"""

from __future__ import annotations

from typing import Final

from coordinator.app.foundation import lay_foundation
from coordinator.app.parts import Parts, Role
from coordinator.app.recovery import compose_recovery
from coordinator.config import Settings
from coordinator.ports import Clock, Entropy
from coordinator.reconciler.by_hand import ByHand
from coordinator.rpc.admin_servicer import AdminServicer, AdminUseCases
from coordinator.services.claim_watch import ClaimWatch
from coordinator.services.session_admin import SessionAdmin

__all__ = ["RECONCILER", "compose_reconciler"]

ADMIN_SERVICE: Final = "leasekeeper.v1.AdminService"


def compose_reconciler(
    settings: Settings, clock: Clock, entropy: Entropy, *, endpoint: str, version: str
) -> Parts:
    """Make all parts; see ``parts.Compose``. It sweeps whatever ``reconciler.enabled`` says.

    Raises:
        ConfigError: a file cannot be read, or settings do not fit the store.
    """
    base = lay_foundation(settings, clock, entropy, endpoint=endpoint, version=version, dispatches=False)
    store = base.store
    recovery = compose_recovery(base, sweeps=True)
    watch = ClaimWatch(store.jobs, store.sessions, recovery.holders, clock)
    base.changes.bind(watch)
    base.commits.bind((watch, recovery.due, base.circuits.outcomes))
    admin = AdminServicer(
        AdminUseCases(
            reconcile=ByHand(recovery.passes, clock),
            notices=base.notices,
            sessions=SessionAdmin(
                store.session_admin, recovery.holders, store.namespaces, clock, ready=watch.ready
            ),
        )
    )
    return Parts(
        store=store,
        notices=base.notices,
        metrics=base.metrics,
        servicers={ADMIN_SERVICE: admin},
        background={**base.background, **recovery.background},
        listed=lambda: store.namespaces.listed and all(map(watch.ready, store.namespaces.namespaces())),
        trouble=recovery.trouble,
    )


RECONCILER: Final = Role(name="reconciler", services=(ADMIN_SERVICE,), compose=compose_reconciler)
