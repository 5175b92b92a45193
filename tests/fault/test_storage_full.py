"""A store that is full: submissions stop early, what is under way can end, and what could not ends once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from coordinator.core.job import JobState
from coordinator.embedded.etcd_process import EtcdOptions
from coordinator.errors import StorageFull
from tests.fault.support.calls import Calls, available, refusal, told
from tests.fault.support.court import Court
from tests.fault.support.lapse import lapse
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually
from tests.support.services import EtcdFactory

QUOTA = 16 << 20
HELD = [f"h{number}" for number in range(10)]


async def fill(calls: Calls) -> list[str]:
    """Submit jobs of 64 KiB until they are refused for want of room; the ids that were taken."""
    taken: list[str] = []
    for number in range(400):
        try:
            await calls.submit(f"f{number:03}", b"x" * 65_536, queue="never")
        except grpc.aio.AioRpcError as error:
            answer = told(error)
            assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "STORAGE_FULL"), answer
            assert answer.retry_after is not None
            return taken
        taken.append(f"f{number:03}")
        await asyncio.sleep(0.05)  # the level is looked at every second
    raise AssertionError("STORAGE_FULL was never said")


@pytest.mark.slow
@pytest.mark.etcd36
async def test_a_full_store_lets_work_under_way_finish_once(
    etcd_factory: EtcdFactory, namespace: str, tmp_path: Path
) -> None:
    """Fault case 111: first the coordinator's own mark, then etcd's NOSPACE, then room again.

    On 3.6, for 3.5.1 refuses under NOSPACE even a Txn that only reads (later versions do not).
    """
    etcd = etcd_factory(EtcdOptions(version="3.6", quota_bytes=QUOTA))
    court = Court(etcd.endpoints, namespace, tmp_path / "sink.sqlite")
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(
            Coordinator(etcd.endpoints, tmp_path, settings={"STORAGE__QUOTA_BYTES": str(QUOTA)})
        )
        calls = await stack.enter_async_context(Calls(coordinator.endpoint, namespace))
        client = await stack.enter_async_context(court.etcd())
        await stack.enter_async_context(
            WorkerProcess(
                coordinator.endpoint,
                namespace,
                tmp_path,
                name="w1",
                sink=court.sink.path,
                gates=tmp_path,
                queues={"work": 10},
                ttl=30.0,
            )
        )
        for number, job_id in enumerate(HELD):
            await calls.submit(job_id, {"gate": f"gate{number % 2}"})
        await eventually(lambda: len(court.read().starts) == 10, timeout=15, what="all run")
        waiting = await fill(calls)

        (tmp_path / "gate0").touch()
        await court.ended(HELD[0::2], timeout=15)
        idle = await calls.open(ttl=60)
        [spare] = await calls.claim(idle, queue="never")
        assert await calls.release(spare) == "PENDING"

        await court.keep()
        # Somebody else fills the rest, past etcd's own mark.
        for number in range(400):
            try:
                await client.put(b"/elsewhere/%d" % number, b"x" * 262_144, timeout=5)
            except StorageFull:
                break
        else:
            raise AssertionError("etcd never said NOSPACE")
        held = {job_id: await court.claim_revision(job_id) for job_id in HELD[1::2]}
        (tmp_path / "gate1").touch()
        submitted = await refusal(calls.submit("too-much"))
        claimed = await refusal(calls.claim(idle, queue="never", timeout=8))
        opened = await refusal(calls.open(ttl=10))
        await eventually(lambda: len(court.read().effects) == 10, timeout=15, what="all have worked")
        await lapse(3)
        assert {job_id: await court.claim_revision(job_id) for job_id in held} == held, "a claim was lost"
        assert "NOSPACE" in coordinator.log, "health says nothing of the alarm"

        for number in range(400):
            await client.delete_range(b"/elsewhere/%d" % number, timeout=5)
        await client.compact(await court.keep(), physical=True, timeout=30)
        await client.defragment(etcd.endpoint, timeout=30)
        for alarm in (await client.alarms(timeout=5)).alarms:
            await client.disarm(alarm.alarm, member_id=alarm.member_id, timeout=5)
        jobs = await court.ended(HELD, timeout=40)
        await available(lambda: calls.cancel(waiting[0]))

    assert (submitted.code, submitted.reason) == ("RESOURCE_EXHAUSTED", "STORAGE_FULL"), submitted
    assert claimed.reason in {"STORAGE_FULL", "OUTCOME_UNKNOWN"}, claimed
    assert opened.reason in {"STORAGE_FULL", "OUTCOME_UNKNOWN"}, opened
    for job_id in HELD:
        assert (jobs[job_id].state, jobs[job_id].attempt) == (JobState.SUCCEEDED, 1)
    await court.judge(submitted=[*HELD, *waiting])
    assert len(court.read().starts) == 10
