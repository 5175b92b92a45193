"""An `EtcdStore` on the session's etcd, below a root of its own, with everything that it tells written
down.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coordinator.app.machine import SystemClock
from coordinator.core.job import Claim
from coordinator.core.rank import Rank
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdConfig
from coordinator.etcd.commit_config import CommitterConfig
from coordinator.etcd.present import PresentConfig
from coordinator.etcd.retention import RetentionConfig
from coordinator.etcd.store import EtcdStore, StoreConfig, StoreListeners
from coordinator.ports import Commit, LockChanges, Operation, Session, Stored
from tests.conformance.actor import Actor


class MachineEntropy:
    """Seeded, so that a failure repeats."""

    def __init__(self) -> None:
        self._random = random.Random(7)
        self._counter = itertools.count(1)

    def fraction(self) -> float:
        return self._random.random()

    def identifier(self) -> str:
        return uuid.uuid4().hex

    def counter(self) -> int:
        return next(self._counter)


@dataclass
class Told:
    """What a store told its listeners, in order."""

    relists: list[tuple[str, int]] = field(default_factory=list)
    events: list[tuple[object, ...]] = field(default_factory=list)
    applied_commits: list[tuple[Operation, Commit]] = field(default_factory=list)
    fresh: dict[str, bool] = field(default_factory=dict)
    passed_to: dict[str, int] = field(default_factory=dict)

    async def relist(self, namespace: str, revision: int) -> None:
        self.relists.append((namespace, revision))

    def ready_put(self, namespace: str, stored: Stored, *, created: bool) -> None:
        self.events.append(("ready_put", stored.job.job_id, stored.revision, created))

    def ready_deleted(
        self, namespace: str, queue: str, type_: str, rank: Rank, job_id: str, revision: int
    ) -> None:
        self.events.append(("ready_deleted", job_id, revision))

    def claim_put(self, namespace: str, job_id: str, claim: Claim, revision: int) -> None:
        self.events.append(("claim_put", job_id, claim.token, revision))

    def claim_deleted(self, namespace: str, job_id: str, revision: int) -> None:
        self.events.append(("claim_deleted", job_id, revision))

    def session_put(self, session: Session, revision: int) -> None:
        self.events.append(("session_put", session.session_id, revision))

    def session_deleted(self, namespace: str, session_id: str, revision: int) -> None:
        self.events.append(("session_deleted", session_id, revision))

    def cancel_put(self, namespace: str, job_id: str, revision: int) -> None:
        self.events.append(("cancel_put", job_id, revision))

    def passed(self, namespace: str, kind: str, revision: int) -> None:
        self.passed_to[kind] = revision

    def freshness(self, namespace: str, fresh: bool) -> None:
        self.fresh[namespace] = fresh

    def applied(self, operation: Operation, commit: Commit) -> None:
        self.applied_commits.append((operation, commit))


class Harness(Actor):
    """A running store, what it told, and an actor on it."""

    def __init__(self, store: EtcdStore, told: Told, clock: SystemClock, namespace: str) -> None:
        super().__init__(jobs=store.jobs, sessions=store.sessions, clock=clock, namespace=namespace)
        self.store = store
        self.told = told

    async def keys(self) -> dict[bytes, object]:
        """Every key below the root, as etcd has it."""
        span = self.store.space.everything()
        reply = await self.store.client.range(span.start, span.end, timeout=5)
        return {kv.key: kv for kv in reply.kvs}


HarnessFactory = Callable[..., "contextlib.AbstractAsyncContextManager[Harness]"]


@pytest.fixture
def store_root() -> str:
    return f"/test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def make_harness(etcd_server: EtcdProcess, namespace: str, store_root: str) -> HarnessFactory:
    """Start a store: ``async with make_harness() as harness``; several share root and namespace."""

    @contextlib.asynccontextmanager
    async def make(
        endpoint: str = "",
        *,
        root: str = "",
        retention: RetentionConfig | None = None,
        state_dir: Path | None = None,
        txn_timeout: float = 5.0,
        coordinator_id: str = "",
        dispatches: bool = True,
        locks: LockChanges | None = None,
    ) -> AsyncIterator[Harness]:
        clock = SystemClock()
        told = Told()
        config = StoreConfig(
            etcd=EtcdConfig(endpoints=tuple((endpoint or etcd_server.endpoint).split(","))),
            coordinator_id=coordinator_id or uuid.uuid4().hex[:8],
            root=root or store_root,
            dispatches=dispatches,
            retention=retention or RetentionConfig(),
            committer=CommitterConfig(txn_timeout=txn_timeout),
            present=PresentConfig(state_dir=state_dir, every=0.05),
        )
        listeners = StoreListeners(changes=told, commits=told, locks=locks)
        async with EtcdStore(config, listeners, clock=clock, entropy=MachineEntropy()) as store:
            yield Harness(store, told, clock, namespace)

    return make


@pytest.fixture
async def harness(make_harness: HarnessFactory) -> AsyncIterator[Harness]:
    async with make_harness() as made:
        yield made
