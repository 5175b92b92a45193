"""The rescuers themselves: late, stopped, killed, just started, or with a wrong clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.core.job import JobState
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from leasekeeper.v1.worker_service_pb2 import Claim
from tests.fault.support.calls import Calls, available, seconds
from tests.fault.support.court import Court
from tests.fault.support.lapse import lapse
from tests.fault.support.processes import SWEEP_OFTEN, Coordinator
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy

TTL = 3.0


async def take(calls: Calls, session: str, ids: Iterable[str]) -> dict[str, Claim]:
    """Claim these jobs."""
    wanted = list(ids)
    claims = await asyncio.gather(*(calls.claim_one(session, job_id, wait=30) for job_id in wanted))
    return dict(zip(wanted, claims, strict=True))


async def revisions(court: Court, ids: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Where record and claim of each job stand."""
    found = {}
    async with court.etcd() as etcd:
        for job_id in ids:
            keys = (court.keys.state(job_id), court.keys.claim(job_id))
            read = [await etcd.range(key, timeout=5) for key in keys]
            found[job_id] = tuple(one.kvs[0].mod_revision if one.kvs else 0 for one in read)
    return found


async def there(file: Path, timeout: float = 15) -> None:
    """Wait until a process has made the file."""
    await eventually(file.exists, timeout=timeout, what=file.name)


async def test_a_rescue_that_comes_late_changes_nothing(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 149: the lost pass is held between its read and its commit.

    Meanwhile the other coordinator recovers the jobs, and they are completed, cancelled, released, or held by
    somebody new.
    """
    ids = [f"j{number:02}" for number in range(40)]
    go, done = tmp_path / "go", tmp_path / "done"
    points = f"lost.before-commit=pause:{go};lost.after-commit=pause:{done}"
    go.touch()
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, name="late", failpoints=points) as late,
        Coordinator(own_etcd.endpoints, tmp_path, name="quick") as quick,
        Calls(quick.endpoint, namespace) as calls,
        Calls(late.endpoint, namespace) as late_calls,
    ):
        # Whatever it swept at its start is over: from now on it is held at each batch.
        done.touch()
        await calls.submit_many([calls.spec(job_id) for job_id in ids])
        dying, saver = await calls.open(ttl=60), await late_calls.open(ttl=120)
        await take(calls, dying, ids)
        for file in (go, done, tmp_path / "go.reached", tmp_path / "done.reached"):
            file.unlink(missing_ok=True)
        async with own_court.etcd() as etcd:
            await etcd.lease_revoke(int(dying, 16), timeout=5)
        await there(tmp_path / "go.reached")
        claims = await take(calls, saver, ids)
        for job_id in ids[0::4]:
            assert await calls.complete(claims[job_id]) == "SUCCEEDED"
        for job_id in ids[1::4]:
            await calls.cancel(job_id)
            assert await calls.release(claims[job_id]) == "CANCELLED"
        for job_id in ids[2::4]:
            assert await calls.release(claims[job_id]) == "PENDING"
        before = await revisions(own_court, ids)

        go.touch()
        await there(tmp_path / "done.reached")

        assert await revisions(own_court, ids) == before, "a late rescue changed what the new holder did"
        for job_id in ids[3::4]:
            assert await calls.complete(claims[job_id]) == "SUCCEEDED"
    judgement = await own_court.judge(submitted=ids, raw=ids)
    assert judgement.states == {"SUCCEEDED": 20, "CANCELLED": 10, "PENDING": 10}
    assert {job.lease_losses for job in judgement.jobs.values()} == {1}


async def test_a_promotion_that_comes_late_changes_nothing(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 149, the due pass: in the gap the jobs are cancelled, or promoted, claimed and completed."""
    ids = [f"j{number:02}" for number in range(40)]
    go, done = tmp_path / "go", tmp_path / "done"
    points = f"due.before-commit=pause:{go};due.after-commit=pause:{done}"
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, name="late", failpoints=points),
        Coordinator(own_etcd.endpoints, tmp_path, name="quick") as quick,
        Calls(quick.endpoint, namespace) as calls,
    ):
        session = await calls.open(ttl=120)
        await calls.submit_many([calls.spec(job_id, run_at=after(1.0)) for job_id in ids])
        await there(tmp_path / "go.reached")
        for job_id in ids[0::2]:
            await calls.cancel(job_id)
        claims = await take(calls, session, ids[1::2])
        before = await revisions(own_court, ids)

        go.touch()
        await there(tmp_path / "done.reached")

        assert await revisions(own_court, ids) == before
        for claim in claims.values():
            assert await calls.complete(claim) == "SUCCEEDED"
    judgement = await own_court.judge(submitted=ids)
    assert judgement.states == {"SUCCEEDED": 20, "CANCELLED": 20}
    assert judgement.claims == 20


async def test_a_claim_that_is_settled_as_it_is_taken_away_stays_settled(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 149 for claims that beats leave out: the holder completes between read and commit."""
    go, done = tmp_path / "go", tmp_path / "done"
    points = f"take-away.before-commit=pause:{go};take-away.after-commit=pause:{done}"
    ids = [f"j{number}" for number in range(6)]
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, failpoints=points) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
    ):
        await calls.submit_many([calls.spec(job_id) for job_id in ids])
        session = await calls.open(ttl=2)
        claims = await take(calls, session, ids)
        async with calls.beating(session):
            await there(tmp_path / "go.reached")
            for job_id in ids[0::2]:
                assert await calls.complete(claims[job_id]) == "SUCCEEDED"
            before = await revisions(own_court, ids[0::2])
            go.touch()
            await there(tmp_path / "done.reached")
            assert await revisions(own_court, ids[0::2]) == before
    judgement = await own_court.judge(submitted=ids)
    assert judgement.outcomes == {"SUCCEEDED": 3, "UNDELIVERED": 3}


def after(wait: float) -> Timestamp:
    """A wall time."""
    made = Timestamp()
    made.FromMilliseconds(round((time.time() + wait) * 1000))
    return made


async def test_a_job_taken_from_a_live_session_waits_for_its_holder_to_hear(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """P8: from the moment it was taken away until it can run again, at least one TTL passes.

    Also where the coordinator's wall clock jumps an hour ahead as it is taken away (fault case 153).
    """
    ttl = 2.0
    clock = tmp_path / "clock"
    clock.write_text("0")
    last_running = first_pending = time.monotonic()
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, plan={"clock": clock}) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
        own_court.etcd() as etcd,
    ):
        await calls.submit("j1")
        session = await calls.open(ttl=ttl)
        await calls.claim_one(session, "j1")

        async def pending() -> bool:
            nonlocal last_running, first_pending
            asked = time.monotonic()
            state = (await own_court.jobs(etcd))["j1"].state
            if state is JobState.RUNNING:
                last_running = asked
            else:
                clock.write_text("3600000")
            first_pending = time.monotonic()
            return state is JobState.PENDING

        async with calls.beating(session, every=0.3):
            await eventually(pending, timeout=20, what="the job waits again")
    waited = first_pending - last_running
    assert waited >= ttl, f"waited {waited:.2f} s"
    await own_court.judge(submitted=["j1"])


async def running_jobs(
    calls: Calls, stack: AsyncExitStack, count: int, *, ttl: float, **fields: object
) -> dict[str, Claim]:
    """So many claimed jobs in sessions of 50, whose beats list them until the stack ends."""
    ids = [f"r{number:04}" for number in range(count)]
    await calls.submit_many([calls.spec(job_id, **fields) for job_id in ids])
    claims: dict[str, Claim] = {}
    for start in range(0, count, 50):
        session = await calls.open(ttl=ttl)
        taken = await take(calls, session, ids[start : start + 50])
        await stack.enter_async_context(calls.beating(session, taken.values(), every=min(1.0, ttl / 4)))
        claims |= taken
    return claims


@pytest.mark.parametrize(
    ("jobs", "restarts", "delay"),
    [
        (50, 2, 0.0),
        pytest.param(50, 2, 0.02, marks=pytest.mark.slow),
        pytest.param(200, 10, 0.0, marks=[pytest.mark.full, pytest.mark.timeout(300)]),
        pytest.param(200, 3, 0.1, marks=[pytest.mark.full, pytest.mark.timeout(600)]),
    ],
)
async def test_a_coordinator_that_starts_recovers_no_live_job(
    jobs: int,
    restarts: int,
    delay: float,
    own_etcd: EtcdProcess,
    own_court: Court,
    namespace: str,
    tmp_path: Path,
) -> None:
    """Fault case 150: killed and started again with jobs running, also where etcd answers slowly."""
    swept = tmp_path / "swept"
    swept.touch()
    async with AsyncExitStack() as stack:
        path = await stack.enter_async_context(TcpProxy(own_etcd.endpoint, delay=delay))
        points = f"lost.after-commit=pause:{swept}"
        coordinator = Coordinator([path.endpoint], tmp_path, failpoints=points, plan=SWEEP_OFTEN)
        await stack.enter_async_context(coordinator)
        calls = await stack.enter_async_context(Calls(coordinator.endpoint, namespace, timeout=20))
        claims = await running_jobs(calls, stack, jobs, ttl=60)
        path.set_mode(ProxyMode.DELAY if delay else ProxyMode.PASS)
        etcd = await stack.enter_async_context(own_court.etcd())

        async def swept_or_none_runs() -> bool:
            states = {job.state for job in (await own_court.jobs(etcd)).values()}
            return (tmp_path / "swept.reached").exists() or JobState.RUNNING not in states

        for _ in range(restarts):
            await coordinator.kill()
            (tmp_path / "swept.reached").unlink(missing_ok=True)
            await coordinator.start()
            await eventually(swept_or_none_runs, timeout=60, interval=0.1, what="a sweep")
        path.set_mode(ProxyMode.PASS)
        for claim in claims.values():
            # Its channel may still wait before it connects anew.
            assert await available(lambda claim=claim: calls.complete(claim)) == "SUCCEEDED"
    judgement = await own_court.judge(submitted=claims)
    assert {(job.attempt, job.lease_losses) for job in judgement.jobs.values()} == {(1, 0)}
    assert judgement.claims == jobs


@pytest.mark.parametrize(
    "ttls",
    [
        pytest.param(6, marks=pytest.mark.slow),
        pytest.param(20, marks=[pytest.mark.full, pytest.mark.timeout(300)]),
    ],
)
async def test_a_job_whose_holder_beats_is_never_too_old(
    ttls: int, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 151: default settings but for the pace of the sweeps; it runs for many TTLs."""
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, plan=SWEEP_OFTEN) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
    ):
        await calls.submit("j1")
        session = await calls.open(ttl=TTL)
        claim = await calls.claim_one(session, "j1")
        async with calls.beating(session, [claim]):
            await asyncio.sleep(ttls * TTL)
            assert await calls.complete(claim) == "SUCCEEDED"
    job = (await own_court.judge(submitted=["j1"])).jobs["j1"]
    assert (job.attempt, job.lease_losses, job.uncharged) == (1, 0, 0)


@pytest.mark.parametrize(
    "jobs", [pytest.param(20, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.full)]
)
async def test_a_clock_that_jumps_an_hour_and_back_ends_no_running_job(
    jobs: int, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 153: the coordinator's wall clock, with running jobs that have timeouts, and scheduled ones.

    A scheduled job may begin as early as the clock says; it begins once.
    """
    clock = tmp_path / "clock"
    clock.write_text("0")
    scheduled = [f"s{number:03}" for number in range(jobs)]
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(
            Coordinator(own_etcd.endpoints, tmp_path, plan={**SWEEP_OFTEN, "clock": clock})
        )
        calls = await stack.enter_async_context(Calls(coordinator.endpoint, namespace))
        limits = {
            "run_timeout": seconds(600),
            "total_timeout": seconds(1200),
            "heartbeat_timeout": seconds(60),
        }
        claims = await running_jobs(calls, stack, jobs, ttl=20, **limits)
        await calls.submit_many([calls.spec(job_id, run_at=after(1800)) for job_id in scheduled])
        clock.write_text("3600000")
        async with own_court.etcd() as etcd:

            async def all_due() -> bool:
                states = await own_court.jobs(etcd)
                return all(states[job_id].state is JobState.PENDING for job_id in scheduled)

            await eventually(all_due, timeout=20, interval=0.1, what="the scheduled jobs are due")
        taken = await take(calls, await calls.open(ttl=60), scheduled[::2])
        await lapse(5)
        clock.write_text("0")
        await lapse(5)
        for claim in [*taken.values(), *claims.values()]:
            assert await calls.complete(claim) == "SUCCEEDED"
    judgement = await own_court.judge(submitted=[*scheduled, *claims])
    assert {(judgement.jobs[job_id].attempt, judgement.jobs[job_id].lease_losses) for job_id in claims} == {
        (1, 0)
    }
    assert {judgement.jobs[job_id].attempt for job_id in scheduled} <= {0, 1}


@pytest.mark.slow
async def test_a_sweeper_that_is_stopped_or_killed_is_replaced(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 154: claims are deleted by hand, so only a sweep finds them.

    Each coordinator in turn is frozen, so one of the two rounds hits the sweeper; when it wakes it changes
    nothing, and is killed then.
    """
    async with AsyncExitStack() as stack:
        pair = [
            Coordinator(own_etcd.endpoints, tmp_path, name=name, plan=SWEEP_OFTEN) for name in ("c1", "c2")
        ]
        for coordinator in pair:
            await stack.enter_async_context(coordinator)
        everyone: list[str] = []
        for away, other in ((pair[0], pair[1]), (pair[1], pair[0])):
            calls = await stack.enter_async_context(Calls(other.endpoint, namespace))
            ids = [f"{away.child.pid}-{number}" for number in range(10)]
            everyone += ids
            await calls.submit_many([calls.spec(job_id) for job_id in ids])
            session = await calls.open(ttl=120)
            await take(calls, session, ids)
            away.pause()
            async with own_court.etcd() as etcd:
                for job_id in ids:
                    await etcd.delete_range(own_court.keys.claim(job_id), timeout=5)
            again = await take(calls, await calls.open(ttl=120), ids)
            before = await revisions(own_court, ids)
            away.resume()
            await lapse(2)
            assert await revisions(own_court, ids) == before
            for claim in again.values():
                assert await calls.complete(claim) == "SUCCEEDED"
            await away.kill()
            await away.start()
    judgement = await own_court.judge(submitted=everyone, by_hand=everyone)
    assert {job.lease_losses for job in judgement.jobs.values()} == {1}


@pytest.mark.parametrize(
    "gone", ["session", "claim", "claim then session", "session then claim", "both", "lease"]
)
async def test_a_running_job_without_its_keys_is_recovered_whichever_are_gone(
    gone: str, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 145: «RUNNING and no claim» alone suffices; nobody asks for the worker's own record."""
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, plan=SWEEP_OFTEN) as coordinator,
        Calls(coordinator.endpoint, namespace, timeout=20) as calls,
    ):
        await calls.submit("j1")
        session = await calls.open(ttl=TTL)
        first = await calls.claim_one(session, "j1")
        async with own_court.etcd() as etcd:
            keys = {"claim": own_court.keys.claim("j1"), "session": own_court.keys.session(session)}
            if gone == "lease":
                await etcd.lease_revoke(int(session, 16), timeout=5)
            elif gone == "both":
                await delete_together(etcd, keys.values())
            else:
                for name in gone.split(" then "):
                    await etcd.delete_range(keys[name], timeout=5)
        [again] = (await take(calls, await calls.open(ttl=60), ["j1"])).values()
        assert again.fencing_token > first.fencing_token
        assert await calls.complete(again) == "SUCCEEDED"
    judgement = await own_court.judge(submitted=["j1"], by_hand=["j1"])
    assert (judgement.jobs["j1"].lease_losses, judgement.jobs["j1"].attempt) == (1, 2)


async def delete_together(etcd: EtcdClient, keys: Iterable[bytes]) -> None:
    """Delete keys in one revision."""
    await etcd.txn_bytes(wire.txn((), tuple(wire.delete(key) for key in keys), ()), timeout=5)
