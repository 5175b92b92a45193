"""An `EtcdStore` on the session's etcd, below a root of its own, with everything that it tells written
down.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coordinator.core import commands as c
from coordinator.core.effects import effects, net
from coordinator.core.job import Claim, Job, Terms
from coordinator.core.machine import Decision, decide
from coordinator.core.rank import Rank
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdConfig
from coordinator.etcd.commit_config import CommitterConfig
from coordinator.etcd.present import PresentConfig
from coordinator.etcd.retention import RetentionConfig
from coordinator.etcd.store import EtcdStore, StoreConfig, StoreListeners
from coordinator.ports import Commit, Operation, Session, Spec, Stored


class MachineClock:
    """The machine's time."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


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


@dataclass
class Harness:
    """A running store and short hands for what tests do with it."""

    store: EtcdStore
    told: Told
    clock: MachineClock
    namespace: str
    session: Session | None = None

    def deadline(self, seconds: float = 5.0) -> float:
        return self.clock.monotonic() + seconds

    def terms(self, **changes: object) -> Terms:
        values: dict[str, object] = {
            "queue": "q",
            "type": "t",
            "submit_ms": self.clock.now_ms(),
            "digest": b"d" * 32,
            "counter": 1,
            **changes,
        }
        return Terms(**values)  # type: ignore[arg-type]

    def operation(
        self,
        before: Stored | None,
        command: c.Command,
        *,
        claim: Claim | None = None,
        token: int = 0,
        spec: Spec | None = None,
        seconds: float = 5.0,
        held: Claim | None = None,
        **more: bool,
    ) -> Operation:
        """The operation that the core decides on."""
        decision = decide(before.job if before else None, held, command, self.clock.now_ms())
        assert isinstance(decision, Decision), decision
        job = before.job if before else None
        return Operation(
            guard=decision.guard,
            before=before,
            after=decision.job,
            writes=net(effects(job, decision.job, big_result=bool(decision.big_result))),
            deadline=self.deadline(seconds),
            token=token,
            claim=claim,
            spec=spec,
            big_result=decision.big_result,
            cancelled_by="test",
            **more,
        )

    def submit(self, job_id: str, payload: bytes = b"payload", **terms: object) -> Awaitable[Commit]:
        command = c.Submit(
            namespace=self.namespace, job_id=job_id, terms=self.terms(payload_size=len(payload), **terms)
        )
        return self.store.jobs.commit(self.operation(None, command, spec=Spec(payload=payload)))

    def submit_later(self, job_id: str, run_at_ms: int) -> Awaitable[Commit]:
        command = c.Submit(namespace=self.namespace, job_id=job_id, terms=self.terms(), run_at_ms=run_at_ms)
        return self.store.jobs.commit(self.operation(None, command, spec=Spec(payload=b"")))

    async def submitted(self, job_id: str, **terms: object) -> Stored:
        commit = await self.submit(job_id, **terms)
        assert commit.won
        assert commit.stored is not None
        return commit.stored

    async def open_session(self, *, ttl_ms: int = 5_000, digest: bytes = b"s") -> Session:
        self.session = await self.store.sessions.open(
            self.new_session(ttl_ms, digest), deadline=self.deadline()
        )
        return self.session

    def new_session(self, ttl_ms: int = 5_000, digest: bytes = b"s", session_id: str = "") -> Session:
        return Session(
            namespace=self.namespace,
            session_id=session_id or f"{uuid.uuid4().int >> 65:016x}",
            identity="worker",
            sdk="test",
            labels={"a": "b"},
            opened_ms=self.clock.now_ms(),
            ttl_ms=ttl_ms,
            request_digest=digest,
        )

    def claim_for(self, job: Job, *, nonce: bytes = b"n" * 16, session_id: str = "") -> Claim:
        if not session_id:
            assert self.session is not None
            session_id = self.session.session_id
        return Claim(
            session=session_id,
            attempt=job.attempt + 1,
            nonce=nonce,
            start_ms=self.clock.now_ms(),
            queue=job.terms.queue,
            type=job.terms.type,
        )

    def claim(self, stored: Stored, *, nonce: bytes = b"n" * 16, session_id: str = "") -> Awaitable[Commit]:
        claim = self.claim_for(stored.job, nonce=nonce, session_id=session_id)
        operation = self.operation(
            stored, c.ClaimIt(claim=claim), claim=claim, want_spec=True, want_checkpoint=True
        )
        return self.store.jobs.commit(operation)

    async def claimed(self, job_id: str, **terms: object) -> tuple[Stored, int]:
        stored = await self.submitted(job_id, **terms)
        if self.session is None:
            await self.open_session()
        commit = await self.claim(stored)
        assert commit.won, commit
        assert commit.stored is not None
        return commit.stored, commit.token

    def complete(
        self, stored: Stored, token: int, *, result: bytes = b"", seconds: float = 5.0
    ) -> Awaitable[Commit]:
        """Settle as the holder of ``token``, whatever the store says of it."""
        held = Claim(session="0" * 16, attempt=stored.job.attempt, nonce=b"", start_ms=0, token=token)
        command = c.Complete(token=token, digest=b"c", result=result)
        return self.store.jobs.commit(
            self.operation(stored, command, held=held, token=token, seconds=seconds)
        )

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
    ) -> AsyncIterator[Harness]:
        clock = MachineClock()
        told = Told()
        config = StoreConfig(
            etcd=EtcdConfig(endpoints=(endpoint or etcd_server.endpoint,)),
            coordinator_id=coordinator_id or uuid.uuid4().hex[:8],
            root=root or store_root,
            retention=retention or RetentionConfig(),
            committer=CommitterConfig(txn_timeout=txn_timeout),
            present=PresentConfig(state_dir=state_dir, every=0.05),
        )
        listeners = StoreListeners(changes=told, commits=told)
        async with EtcdStore(config, listeners, clock=clock, entropy=MachineEntropy()) as store:
            yield Harness(store, told, clock, namespace)

    return make


@pytest.fixture
async def harness(make_harness: HarnessFactory) -> AsyncIterator[Harness]:
    async with make_harness() as made:
        yield made
