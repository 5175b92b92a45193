"""A coordinator dies at each place where it has read and not written, or written and not answered."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.failpoints import EXIT_CODE, POINTS
from tests.fault.support.calls import Calls, available, seconds
from tests.fault.support.court import Court
from tests.fault.support.lapse import lapse
from tests.fault.support.processes import SWEEP_OFTEN, Coordinator

TTL = 2.0
LOCKS = {one for one in POINTS if one.startswith(("lock.", "unlock."))}
"""Those of calls that have no job: ``test_lock_crashes``."""
CORE = ("claim.after-commit", "lost.before-commit", "settle.after-commit")


def soon() -> Timestamp:
    """A second from now."""
    made = Timestamp()
    made.FromMilliseconds(round((time.time() + 1) * 1000))
    return made


async def provoke(point: str, calls: Calls, court: Court) -> None:
    """Do what leads to *point*; how a caller hears of its end is its own affair."""
    part = point.partition(".")[0]
    if part == "submit":
        await calls.submit("j1", unique_key="k", request_id="r1")
        return
    if part == "due":
        await calls.submit("j1", unique_key="k", run_at=soon())
        return
    limit = {"run_timeout": seconds(1)} if part == "overdue" else {}
    await calls.submit("j1", unique_key="k", **limit)
    if part == "change":
        await calls.cancel("j1")
        return
    session = await calls.open(ttl=TTL)
    claim = await calls.claim_one(session, "j1")
    if part == "settle":
        await calls.complete(claim)
    elif part == "lost":
        async with court.etcd() as etcd:
            await etcd.lease_revoke(int(session, 16), timeout=5)
    elif part in ("take-away", "overdue"):
        listed = [claim] if part == "overdue" else []
        while True:  # until the coordinator is gone
            await calls.beat(session, listed)
            await lapse(0.3)


@pytest.mark.parametrize(
    "point",
    [one if one in CORE else pytest.param(one, marks=pytest.mark.slow) for one in sorted(POINTS - LOCKS)],
)
async def test_a_crash_between_two_steps_leaves_nothing_behind(
    point: str, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 155: whatever state it leaves, the job ends once, and its unique key is free again."""
    async with AsyncExitStack() as stack:
        coordinator = Coordinator(own_etcd.endpoints, tmp_path, failpoints=f"{point}=exit", plan=SWEEP_OFTEN)
        await stack.enter_async_context(coordinator)
        calls = await stack.enter_async_context(Calls(coordinator.endpoint, namespace))
        try:
            await provoke(point, calls, own_court)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error  # noqa: PT017
        assert await coordinator.wait(15) == EXIT_CODE

        coordinator.failpoints = ""
        await coordinator.start()
        if point.startswith("submit"):
            again = await available(lambda: calls.submit("j1", unique_key="k", request_id="r1"))
            assert again.job_id == "j1"
        saver = await available(lambda: calls.open(ttl=60))
        begin = time.monotonic()
        while await calls.state("j1") not in ("SUCCEEDED", "CANCELLED"):
            for claim in await calls.claim(saver, wait=1):
                assert await calls.complete(claim) == "SUCCEEDED"
            assert time.monotonic() - begin < 5 * TTL + 10, f"stuck in {await calls.state('j1')}"
        second = await calls.submit("j2", unique_key="k")
        [claim] = await calls.claim(saver, wait=5)
        assert (second.job_id, claim.job_id) == ("j2", "j2")
        assert await calls.complete(claim) == "SUCCEEDED"
    judgement = await own_court.judge(submitted=["j1", "j2"])
    # Only a run that took too long is charged, and only if that was committed.
    assert judgement.jobs["j1"].failures == (point == "overdue.after-commit")
    assert await own_court.leases() <= 6, "leases were left behind"
