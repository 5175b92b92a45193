"""etcd away and back: calls say so in time, nothing is lost, and everything goes on by itself."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from grpc_health.v1 import health_pb2

from coordinator.embedded.etcd_process import EtcdProcess
from tests.fault.support.calls import Calls, available, refusal
from tests.fault.support.court import Court
from tests.fault.support.health import health
from tests.fault.support.holdings import process_holdings
from tests.fault.support.processes import Coordinator, WorkerProcess
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy

OUTAGE = 5.0


async def test_etcd_down_for_five_seconds_is_unavailable_in_time_and_everything_goes_on(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """SIGKILL of etcd under load, and a restart on its data: O1 to O5, and no handle left behind (O4)."""
    ids = [f"j{number:03}" for number in range(150)]
    service = "leasekeeper.v1.JobService"
    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as coordinator,
        WorkerProcess(
            coordinator.endpoint, namespace, tmp_path, name="w1", sink=own_court.sink.path, ttl=15.0
        ),
        Calls(coordinator.endpoint, namespace, timeout=3.0) as calls,
    ):
        session = await calls.open(ttl=60)
        await calls.submit("held", queue="other")
        [held] = await calls.claim(session, queue="other", wait=2)
        await calls.submit_many([calls.spec(job_id, {"work": 0.02}) for job_id in ids])
        await eventually(lambda: len(own_court.read().effects) > 30, timeout=10, what="work is under way")
        before = process_holdings(coordinator.pid)

        await asyncio.to_thread(own_etcd.kill)
        down = time.monotonic()
        refused = [
            await refusal(calls.submit("while-down", request_id="r1")),
            await refusal(calls.get("held")),
            await refusal(calls.complete(held, b"r")),
        ]
        beat = await calls.beat(session, [held])
        await eventually(
            lambda: _is(coordinator, service, health_pb2.HealthCheckResponse.NOT_SERVING),
            timeout=8, interval=0.1, what="not ready",
        )  # fmt: skip
        alive = await health(coordinator.endpoint, "")
        await eventually(lambda: time.monotonic() - down > OUTAGE, what="the outage", timeout=6)
        await asyncio.to_thread(own_etcd.restart)
        up = time.monotonic()

        state = await available(lambda: calls.complete(held, b"r"), timeout=15)
        again = await available(lambda: calls.submit("while-down", request_id="r1"))
        await own_court.ended([*ids, "while-down"], timeout=30)
        await eventually(
            lambda: _is(coordinator, service, health_pb2.HealthCheckResponse.SERVING),
            timeout=10, interval=0.1, what="ready again",
        )  # fmt: skip
        recovered = time.monotonic() - up
        after = await eventually(
            lambda: process_holdings(coordinator.pid).near(before), timeout=10, what="handles as before"
        )
        log = coordinator.log
        assert await coordinator.terminate(timeout=15) == 0

    assert {answer.code for answer in refused} <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
    assert {answer.reason for answer in refused} <= {"ETCD_UNAVAILABLE", "OUTCOME_UNKNOWN", ""}
    assert "UNAVAILABLE" in {answer.code for answer in refused}
    assert beat.authority == 2, "AUTHORITY_UNKNOWN: no claim is called lost while etcd is away"
    assert not beat.HasField("safe_duration")
    assert alive == health_pb2.HealthCheckResponse.SERVING
    assert state == "SUCCEEDED"
    assert again.job_id == "while-down"
    assert recovered < 20
    assert after
    assert calls.late == []
    for words in ("Traceback", "never retrieved", "was destroyed but it is pending"):
        assert words not in log
    history = await own_court.judge(submitted=[*ids, "while-down", "held"], raw=["held"])
    assert {(job.failures, job.lease_losses) for job in history.jobs.values()} == {(0, 0)}


async def _is(coordinator: Coordinator, service: str, status: int) -> bool:
    return await health(coordinator.endpoint, service) == status


async def test_an_etcd_that_answers_nothing_is_unavailable_in_time(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """A path that swallows everything, open connections and all: no call outlives its deadline (O5)."""
    async with (
        TcpProxy(own_etcd.endpoint) as proxy,
        Coordinator([proxy.endpoint], tmp_path) as coordinator,
        Calls(coordinator.endpoint, namespace, timeout=2.0) as calls,
    ):
        session = await calls.open(ttl=60)
        await calls.submit("j1")
        [claim] = await calls.claim(session, wait=2)
        proxy.set_mode(ProxyMode.DROP)

        refused = await asyncio.gather(
            refusal(calls.submit("j2", request_id="r2")),
            refusal(calls.get("j1")),
            refusal(calls.cancel("j1")),
            refusal(calls.complete(claim)),
            refusal(calls.claim(session, request_id="r3", wait=1.0, timeout=2.0)),
            refusal(calls.open()),
            return_exceptions=True,
        )
        proxy.set_mode(ProxyMode.PASS)
        await available(lambda: calls.submit("j2", request_id="r2"), timeout=15)

        codes = [answer.code for answer in refused if not isinstance(answer, BaseException)]
        assert set(codes) <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
        # A poll that finds nothing to claim needs no etcd, and says so with an empty answer.
        assert len(codes) >= 5
        assert calls.late == []
        job = await calls.get("j1")
        if job.state == 3:
            await available(lambda: calls.complete(claim))
    await own_court.judge()
