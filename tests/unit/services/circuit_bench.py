"""Coordinators with circuits over the store in memory, and what their tests do again and again."""

from __future__ import annotations

from typing import Any

from coordinator.core.circuit import CircuitPolicy, CircuitState
from coordinator.core.commands import Command, Complete, Fail, Lose
from coordinator.core.machine import Decision, decide
from coordinator.core.notice import NoticeKind
from coordinator.ports import Stored
from coordinator.services.api import ClaimedJob, ClaimQuery
from coordinator.services.circuits import CircuitConfig
from coordinator.services.commits import operation_of
from tests.support.builders import FAR, a_session, claim_job, open_session
from tests.support.clock import SteppingClock
from tests.support.memory_circuits import MemoryCircuits
from tests.support.memory_etcd import MemoryEtcd
from tests.unit.services.workbench import NS, Coordinator, S, bench_with

T, U = (NS, "q", "t"), (NS, "q", "u")
POLICY = CircuitPolicy(min_outcomes=4, min_lost_sessions=2, first_pause_ms=5_000, probes_to_close=2)
PAUSE = 5.0
GRACE = CircuitConfig().probe_grace_s


async def bench(**config: Any) -> Coordinator:
    etcd = MemoryEtcd(SteppingClock())
    c = await beside(etcd, MemoryCircuits(etcd), "c1", **config)
    await open_session(c.session_store, a_session(ttl_ms=3_600_000))
    return c


async def beside(etcd: MemoryEtcd, store: MemoryCircuits, own_id: str, **config: Any) -> Coordinator:
    """A coordinator over what may be another's store."""
    return await bench_with(
        etcd,
        circuit_store=store,
        own_id=own_id,
        circuit_config=CircuitConfig(**{"policy": POLICY, **config}),
    )


async def pair_of() -> tuple[Coordinator, Coordinator]:
    first = await bench()
    assert first.circuit_store is not None
    return first, await beside(first.etcd, first.circuit_store, "c2")


async def end(c: Coordinator, stored: Stored, command: Command, token: int = 0) -> None:
    """Commit the end of an attempt as a service does."""
    snapshot = await c.jobs.read(NS, stored.job.job_id, deadline=FAR)
    assert snapshot.stored is not None
    decision = decide(snapshot.stored.job, snapshot.claim, command, c.clock.now_ms())
    assert isinstance(decision, Decision), decision
    commit = await c.jobs.commit(operation_of(snapshot.stored, decision, FAR, token=token))
    assert commit.won


async def complete(c: Coordinator, claimed: ClaimedJob) -> None:
    token = claimed.claim.token
    await end(c, claimed.stored, Complete(token=token, digest=b""), token)


async def fail(c: Coordinator, claimed: ClaimedJob) -> None:
    token = claimed.claim.token
    await end(c, claimed.stored, Fail(token=token, digest=b"", no_retry=True), token)


async def opened(c: Coordinator, *waiting: str) -> None:
    """Four jobs fail; ``waiting`` are left, held."""
    await c.submit("f1", "f2", "f3", "f4", *waiting)
    for claimed in await c.claim(n=4, request="fail"):
        await fail(c, claimed)
    await c.circuits.tend_once()
    assert state(c) is CircuitState.OPEN


def state(c: Coordinator) -> CircuitState:
    return c.circuits.shared.circuit(T).state


def facts(c: Coordinator) -> list[tuple[str, str]]:
    return [
        (notice.facts["circuit_before"], notice.facts["circuit"])
        for notice in c.notices.of(NoticeKind.CIRCUIT)
    ]


async def claim_type(c: Coordinator, *types: str, request: str, n: int = 10) -> list[ClaimedJob]:
    query = ClaimQuery(
        session_id=S, request_id=request, queues=tuple(("q", one) for one in types), max_jobs=n, wait_ms=0,
        repeat=False,
    )  # fmt: skip
    return await c.dispatch.claim_jobs(NS, query, FAR)


def void(_: object) -> None:
    """A lambda's value, thrown away."""
    return


async def kill_holder(c: Coordinator, job_id: str, session_id: str) -> None:
    """A session claims the job, dies, and its loss is recovered."""
    await open_session(c.session_store, a_session(session_id))
    snapshot = await c.jobs.read(NS, job_id, deadline=FAR)
    assert snapshot.stored is not None
    won = await claim_job(c.jobs, snapshot.stored, session_id, now_ms=c.clock.now_ms())
    await c.session_store.close(NS, session_id, deadline=FAR)
    assert won.stored is not None
    await end(c, won.stored, Lose(token=won.token))
