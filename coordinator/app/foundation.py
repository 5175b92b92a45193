"""What every process of the service stands on: the store, where notices go, and who hears of what."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from coordinator.app.readings import notice_readings, store_readings
from coordinator.app.relay import ChangesRelay, CircuitsRelay, CommitRelay, LocksRelay, QueuesRelay
from coordinator.app.store_settings import circuit_config, store_config
from coordinator.config import NoticeSettings, Settings
from coordinator.core.fencing import Position
from coordinator.core.notice import Notice, NoticeKind
from coordinator.errors import ConfigError
from coordinator.etcd.store import EtcdStore, StoreListeners
from coordinator.observability.http_post import HttpPost
from coordinator.observability.metrics import Metrics
from coordinator.observability.notice_log import NoticeLog
from coordinator.observability.webhook import Webhook, WebhookConfig
from coordinator.ports import Clock, Entropy
from coordinator.rpc.notice_convert import notice_json
from coordinator.services.circuits import Circuits
from coordinator.services.notices import NoticeHub
from coordinator.services.shared_queues import SharedQueues

__all__ = ["Foundation", "lay_foundation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """Made first. ``changes``, ``commits`` and, where jobs are handed out, ``locks`` are bound once there is
    somebody to tell.

    ``circuits``: also where nothing is handed out, for losses are recovered there; ``commits`` is to tell
    its ``outcomes``. ``queues``: watched where jobs are handed out. ``background``: what sends notices on,
    and tends circuits; see ``Parts.background``.
    """

    settings: Settings
    clock: Clock
    entropy: Entropy
    own_id: str
    store: EtcdStore
    notices: NoticeHub
    metrics: Metrics
    changes: ChangesRelay
    commits: CommitRelay
    locks: LocksRelay
    circuits: Circuits
    queues: SharedQueues
    background: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]


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
    changes, commits, locks, circuit_changes = ChangesRelay(), CommitRelay(), LocksRelay(), CircuitsRelay()
    queue_changes = QueuesRelay()
    own_id = entropy.identifier()
    metrics = Metrics(version)
    log = NoticeLog(clock.monotonic, clock.sleep)
    webhook = _webhook(settings.notices, clock, entropy)
    sinks = [log.noticed, metrics.noticed, *([webhook.noticed] if webhook is not None else [])]
    notices = NoticeHub(clock, entropy, coordinator_id=own_id, sinks=sinks)
    config = store_config(settings, coordinator_id=own_id, endpoint=endpoint, version=version)
    store = EtcdStore(
        replace(config, dispatches=dispatches),
        StoreListeners(
            changes=changes,
            commits=commits,
            regression=lambda seen, got: notices.publish(_regression(seen, got)),
            recovery=lambda present: notices.publish(_recovery(present)),
            notices=notices,
            locks=locks if dispatches else None,
            circuits=circuit_changes,
            queues=queue_changes if dispatches else None,
        ),
        clock=clock,
        entropy=entropy,
    )
    circuits = Circuits(
        store.circuits,
        store.jobs,
        notices,
        clock,
        entropy,
        circuit_config(settings.circuits),
        own_id=own_id,
    )
    circuit_changes.bind(circuits.shared)
    queues = SharedQueues(store.queues, clock)
    queue_changes.bind(queues)
    metrics.expose([*store_readings(store), *notice_readings(notices, webhook)])
    background = {"notice log": log.run, "circuits": circuits.run}
    if webhook is not None:
        background["webhook"] = webhook.run
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
        locks=locks,
        circuits=circuits,
        queues=queues,
        background=background,
    )


def _webhook(settings: NoticeSettings, clock: Clock, entropy: Entropy) -> Webhook | None:
    if not settings.webhook_url:
        return None
    try:
        post = HttpPost(settings.webhook_url, settings.webhook_timeout_s)
    except ValueError as error:
        raise ConfigError(f"notices.webhook_url {error}") from error
    return Webhook(
        post,
        notice_json,
        clock,
        fraction=entropy.fraction,
        identifier=entropy.identifier,
        config=WebhookConfig(
            secret=settings.webhook_secret, kinds=settings.kinds, max_queued=settings.webhook_queue
        ),
    )


def _regression(seen: Position, got: Position) -> Notice:
    return Notice(
        kind=NoticeKind.EPOCH,
        reason="etcd's history went back: nothing is granted or settled until the epoch is raised",
        facts={
            "seen_epoch": str(seen.epoch),
            "seen_revision": str(seen.revision),
            "epoch": str(got.epoch),
            "revision": str(got.revision),
        },
    )


def _recovery(present: Position) -> Notice:
    return Notice(
        kind=NoticeKind.EPOCH,
        reason="jobs and locks are granted and settled again",
        facts={"epoch": str(present.epoch), "revision": str(present.revision)},
    )
