"""An etcd that takes seconds: callers hear in time, the queue before it is bounded, and nothing is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from tests.fault.support.calls import Calls, available
from tests.fault.support.court import Court
from tests.fault.support.holdings import back_to, process_holdings
from tests.fault.support.processes import Coordinator
from tests.support.tcp_proxy import ProxyMode, TcpProxy


@pytest.mark.parametrize(
    ("delay", "seconds", "rate"),
    [
        pytest.param(0.8, 8, 30, marks=pytest.mark.slow),
        pytest.param(3.0, 30, 50, marks=[pytest.mark.full, pytest.mark.timeout(300)]),
    ],
)
async def test_calls_to_a_slow_store_end_in_time_and_leave_no_queue(
    delay: float,
    seconds: int,
    rate: int,
    own_etcd: EtcdProcess,
    own_court: Court,
    namespace: str,
    tmp_path: Path,
) -> None:
    """Fault case 113: submissions and claims with deadlines of a second; what was committed unheard is found.

    At most so many calls are under way; the next is refused at once.
    """
    most = rate
    ids: list[str] = []
    async with (
        TcpProxy(own_etcd.endpoint, delay=delay) as path,
        Coordinator([path.endpoint], tmp_path, settings={"SERVER__MAX_CALLS": str(most)}) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
    ):
        await calls.submit("first")
        session = await calls.open(ttl=600)
        [first] = await calls.claim(session)
        assert await calls.complete(first) == "SUCCEEDED"
        before = process_holdings(coordinator.pid)
        path.set_mode(ProxyMode.DELAY)
        sent: list[asyncio.Task[object]] = []
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            job_id = f"j{len(ids):04}"
            ids.append(job_id)
            sent.append(asyncio.create_task(calls.submit(job_id, request_id=job_id, timeout=1.0)))
            claiming = calls.claim(session, request_id=f"claim-{job_id}", timeout=1.0)
            sent.append(asyncio.create_task(claiming))
            await asyncio.sleep(1 / rate)
        answers = await asyncio.gather(*sent, return_exceptions=True)
        path.set_mode(ProxyMode.PASS)

        codes = {answer.code().name for answer in answers if isinstance(answer, grpc.aio.AioRpcError)}
        strange = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all(isinstance(one, grpc.aio.AioRpcError) for one in strange), strange[:3]
        assert codes <= {"DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED"}, codes
        assert "RESOURCE_EXHAUSTED" in codes, "the bound was never reached: prove nothing"
        assert calls.late == []
        for job_id in ids:
            again = await available(lambda job_id=job_id: calls.submit(job_id, request_id=job_id), timeout=20)
            assert again.job_id == job_id
        done = 0
        for job_id in ids:
            own = await calls.claim(session, request_id=f"claim-{job_id}", repeat=True)
            for claim in own:
                done += await calls.complete(claim) == "SUCCEEDED"
        while done < len(ids):
            for claim in await calls.claim(session, most=100, wait=5):
                done += await calls.complete(claim) == "SUCCEEDED"
        # Some connections to etcd are made only under load, and stay.
        await back_to(coordinator.pid, before, files=12)
    judgement = await own_court.judge(submitted=[*ids, "first"])
    assert judgement.states == {"SUCCEEDED": len(ids) + 1}
    assert {job.attempt for job in judgement.jobs.values()} == {1}
