"""One in-memory store with the ports around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.core.job import Claim, Progress
from coordinator.ports import Commit, Session, Stored
from coordinator.services.late_calls import LateCalls
from coordinator.services.settlement import SettlementService
from coordinator.services.submission import Submission
from tests.support.builders import a_job, a_session, claim_job, open_session, store_job
from tests.support.clock import SteppingClock
from tests.support.fake_ports import (
    FixedMembers,
    FixedPresent,
    OpenGauge,
    RecordedMeters,
    RecordedNotices,
    SteadyEntropy,
    StillFeeds,
)
from tests.support.memory_etcd import MemoryEtcd
from tests.support.memory_job_store import MemoryJobStore, MemorySessionStore


@dataclass
class RememberedJobs:
    """What settlement remembers: set by the test."""

    jobs: dict[tuple[str, str], tuple[Stored, Claim]] = field(default_factory=dict)
    told: dict[tuple[str, str], Progress] = field(default_factory=dict)
    beats: dict[tuple[str, str], int] = field(default_factory=dict)

    def remember(self, commit: Commit) -> None:
        assert commit.stored is not None
        assert commit.claim is not None
        job = commit.stored.job
        self.jobs[job.namespace, job.job_id] = (commit.stored, commit.claim)

    def running(self, namespace: str, job_id: str) -> tuple[Stored, Claim] | None:
        return self.jobs.get((namespace, job_id))

    def forget(self, namespace: str, job_id: str) -> None:
        self.jobs.pop((namespace, job_id), None)

    def progress(self, namespace: str, job_id: str) -> Progress | None:
        return self.told.get((namespace, job_id))

    def last_beat_ms(self, namespace: str, job_id: str) -> int:
        return self.beats.get((namespace, job_id), 0)


class World:
    """Everything that a service is built from, over one memory store."""

    def __init__(self) -> None:
        self.clock = SteppingClock()
        self.etcd = MemoryEtcd(self.clock)
        self.store = MemoryJobStore(self.etcd)
        self.sessions = MemorySessionStore(self.etcd)
        self.feeds = StillFeeds()
        self.gauge = OpenGauge()
        self.present = FixedPresent(self.etcd)
        self.entropy = SteadyEntropy()
        self.members = FixedMembers()
        self.holders = RememberedJobs()
        self.notices, self.meters = RecordedNotices(), RecordedMeters()
        self.late_calls = LateCalls(self.store, self.notices, self.meters, self.clock)
        self.submission = Submission(self.store, self.feeds, self.gauge, self.clock, self.entropy)
        self.settlement = SettlementService(
            self.store,
            self.holders,
            self.present,
            self.clock,
            self.entropy,
            notices=self.notices,
            late=self.late_calls.add,
        )

    @property
    def deadline(self) -> float:
        return self.clock.monotonic() + 30.0

    async def running(self, job_id: str = "j1", *, session: Session | None = None, **terms: Any) -> Commit:
        """A job that a session holds; nobody remembers it."""
        await open_session(self.sessions, session or a_session())
        stored = await store_job(self.store, a_job(job_id, **terms))
        return await claim_job(self.store, stored, session or a_session())

    def stored(self, job_id: str = "j1") -> Stored:
        """Its record as it lies there."""
        stored = self.etcd.stored("default", job_id)
        assert stored is not None, f"no record of {job_id}"
        return stored


@pytest.fixture
def world() -> World:
    return World()
