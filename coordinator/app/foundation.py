"""What every process of the service stands on: the store, where notices go, and who hears of what."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.app.relay import ChangesRelay, CommitRelay
from coordinator.app.store_settings import store_config
from coordinator.config import Settings
from coordinator.etcd.store import EtcdStore, StoreListeners
from coordinator.observability.metrics import Metrics
from coordinator.ports import Clock, Entropy
from coordinator.services.notices import NoticeHub

__all__ = ["Foundation", "lay_foundation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """Made first. ``changes`` and ``commits`` are bound once there is somebody to tell."""

    settings: Settings
    clock: Clock
    entropy: Entropy
    own_id: str
    store: EtcdStore
    notices: NoticeHub
    metrics: Metrics
    changes: ChangesRelay
    commits: CommitRelay


def lay_foundation(
    settings: Settings, clock: Clock, entropy: Entropy, *, endpoint: str, version: str, dispatches: bool
) -> Foundation:
    """Make it. Call it inside the event loop that will run it.

    Args:
        settings: checked settings.
        clock: time.
        entropy: randomness and ids.
        endpoint: where clients reach this process.
        version: of the software.
        dispatches: jobs are handed out here; False: it only repairs.

    Raises:
        ConfigError: a file cannot be read, or settings do not fit the store.
    """
    changes, commits = ChangesRelay(), CommitRelay()
    own_id = entropy.identifier()
    metrics = Metrics(version)
    notices = NoticeHub(clock, entropy, coordinator_id=own_id, sinks=(metrics.noticed,))
    config = store_config(settings, coordinator_id=own_id, endpoint=endpoint, version=version)
    store = EtcdStore(
        replace(config, dispatches=dispatches),
        StoreListeners(changes=changes, commits=commits),
        clock=clock,
        entropy=entropy,
    )
    return Foundation(
        settings=settings,
        clock=clock,
        entropy=entropy,
        own_id=own_id,
        store=store,
        notices=notices,
        metrics=metrics,
        changes=changes,
        commits=commits,
    )
