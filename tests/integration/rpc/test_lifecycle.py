"""Start, readiness, stop and second stop of a coordinator; etcd away and back; lost replies."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.app import Coordinator, running_coordinator
from coordinator.config import AuthSettings, EtcdSettings, ServerSettings, Settings
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import ConfigError
from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import job_service_pb2_grpc, worker_service_pb2_grpc
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.integration.rpc.conftest import Api, OpenedWorker, open_worker
from tests.support.polling import eventually
from tests.support.services import EtcdFactory
from tests.support.tcp_proxy import ProxyMode, TcpProxy
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
JOBS = "leasekeeper.v1.JobService"


def api_at(address: str, channel: grpc.aio.Channel) -> Api:
    return Api(
        address,
        channel,
        job_service_pb2_grpc.JobServiceStub(channel),
        worker_service_pb2_grpc.WorkerServiceStub(channel),
    )


async def health(channel: grpc.aio.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return int((await health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)).status)


async def serving(channel: grpc.aio.Channel) -> None:
    """Wait until the coordinator at the other end serves."""
    await asyncio.wait_for(channel.channel_ready(), 20)

    async def ready() -> bool:
        return await health(channel, JOBS) == SERVING

    await eventually(ready, timeout=15, interval=0.1)


async def test_stop_answers_long_polls_ends_streams_and_finishes_settlements(settings: Settings) -> None:
    async with TcpProxy(settings.etcd.endpoints, delay=0.1) as proxy:
        etcd = dataclasses.replace(settings.etcd, endpoints=proxy.endpoint)
        coordinator = Coordinator(dataclasses.replace(settings, etcd=etcd))
        running = asyncio.create_task(coordinator.run())
        await coordinator.started.wait()
        async with grpc.aio.insecure_channel(coordinator.address) as channel:
            api = api_at(coordinator.address, channel)
            worker = await open_worker(api)
            await api.jobs.SubmitJobs(b.submit_batch(b.job_spec(), b.job_spec(job_id="j2")), timeout=5)
            [claim] = await worker.claim(max_jobs=1, wait=1)
            await eventually(lambda: coordinator.health.ready)
            request = health_pb2.HealthCheckRequest(service=JOBS)
            watched = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=20)
            stream = api.jobs.WatchJobs(j.WatchJobsRequest())
            statuses = [(await watched.read()).status]
            await stream.read()
            [other] = await worker.claim(max_jobs=1, wait=1)
            polling = asyncio.ensure_future(worker.claim(wait=9))
            waiting = asyncio.ensure_future(
                api.jobs.WaitJob(j.WaitJobRequest(job_id=other.job_id), timeout=20)
            )
            await eventually(lambda: coordinator.calls == 2)
            proxy.set_mode(ProxyMode.DELAY)
            done = b.complete(job_id=claim.job_id, fencing_token=claim.fencing_token)
            settling = asyncio.ensure_future(api.workers.CompleteJob(done, timeout=9))
            await eventually(lambda: coordinator.calls == 3)
            started = time.monotonic()
            coordinator.stop()

            assert [] == await polling
            assert (False, t.JOB_STATE_RUNNING) == ((await waiting).finished, (await waiting).job.state)
            assert t.JOB_STATE_SUCCEEDED == (await settling).state
            assert "DRAINING" == (await refusal(_drained(stream))).reason
            statuses.append((await watched.read()).status)
            await running

    assert [SERVING, NOT_SERVING] == statuses
    assert time.monotonic() - started < settings.server.grace_s


async def _drained(stream: grpc.aio.UnaryStreamCall) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_etcd_away_is_unavailable_within_the_deadline_and_all_goes_on_when_it_is_back(
    etcd_factory: EtcdFactory,
) -> None:
    etcd = etcd_factory()
    settings = Settings(
        server=ServerSettings(listen="127.0.0.1:0"),
        etcd=EtcdSettings(endpoints=etcd.endpoint, allow_unsafe=True),
    )
    async with running_coordinator(settings) as address, grpc.aio.insecure_channel(address) as channel:
        api = api_at(address, channel)
        await api.jobs.SubmitJob(b.submit(), timeout=5)
        await asyncio.to_thread(etcd.kill)
        started = time.monotonic()
        get = await refusal(api.jobs.GetJob(j.GetJobRequest(job_id="j1"), timeout=2))
        submit = await refusal(api.jobs.SubmitJob(b.submit(job_id="j2"), timeout=2))

        async def unready() -> bool:
            return await health(channel, JOBS) == NOT_SERVING

        assert time.monotonic() - started < 4.5
        assert {grpc.StatusCode.UNAVAILABLE} == {get.code, submit.code}
        assert get.retry_ms
        await eventually(unready, timeout=10, interval=0.1)
        assert SERVING == await health(channel, "")

        await asyncio.to_thread(etcd.restart)

        await serving(channel)
        assert (await api.jobs.SubmitJob(b.submit(job_id="j3"), timeout=5)).created
        worker = await open_worker(api)
        claims = await worker.claim(wait=2)
        assert {"j1", "j3"} <= {claim.job_id for claim in claims}


async def test_it_listens_and_says_not_ready_until_etcd_is_there(etcd_factory: EtcdFactory) -> None:
    etcd = etcd_factory()
    await asyncio.to_thread(etcd.stop)
    settings = Settings(
        server=ServerSettings(listen="127.0.0.1:0"),
        etcd=EtcdSettings(endpoints=etcd.endpoint, allow_unsafe=True),
    )
    coordinator = Coordinator(settings)
    running = asyncio.create_task(coordinator.run())
    await eventually(lambda: coordinator.address)
    async with grpc.aio.insecure_channel(coordinator.address) as channel:
        api = api_at(coordinator.address, channel)
        error = await refusal(api.jobs.SubmitJob(b.submit(), timeout=2))
        assert (SERVING, NOT_SERVING) == (await health(channel, ""), await health(channel, JOBS))
        assert "NOT_READY" == error.reason

        await asyncio.to_thread(etcd.restart)
        await asyncio.wait_for(coordinator.started.wait(), 15)
        assert (await api.jobs.SubmitJob(b.submit(), timeout=5)).created
    coordinator.stop()
    await running


async def test_stop_before_etcd_was_found(etcd_factory: EtcdFactory) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        settings = Settings(
            server=ServerSettings(listen="127.0.0.1:0"),
            etcd=EtcdSettings(endpoints=f"127.0.0.1:{taken.getsockname()[1]}"),
        )
        coordinator = Coordinator(settings)
        running = asyncio.create_task(coordinator.run())
        await eventually(lambda: coordinator.address)
        coordinator.stop()
        await asyncio.wait_for(running, 9)


async def test_an_etcd_with_known_defects_needs_a_word(etcd_server: EtcdProcess, settings: Settings) -> None:
    unsafe = dataclasses.replace(settings, etcd=dataclasses.replace(settings.etcd, allow_unsafe=False))
    if etcd_server.version() >= (3, 6, 5):
        async with running_coordinator(unsafe):
            return
    with pytest.raises(ConfigError, match="--allow-unsafe-etcd"):
        async with running_coordinator(unsafe):
            pass


async def test_an_address_that_is_taken_is_told(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        blocked = dataclasses.replace(settings, server=ServerSettings(listen=listen))
        with pytest.raises(ConfigError, match=listen):
            async with running_coordinator(blocked):
                pass


# Fault case 042: the reply is lost, the same call again says so.
@pytest.mark.parametrize("how", ["CompleteJob", "ReleaseJob"])
async def test_a_settlement_whose_reply_was_lost_is_answered_again(
    api: Api, worker: OpenedWorker, how: str
) -> None:
    await api.jobs.SubmitJob(b.submit(), timeout=5)
    [claim] = await worker.claim(wait=1)
    requests = {
        "CompleteJob": b.complete(fencing_token=claim.fencing_token),
        "ReleaseJob": w.ReleaseJobRequest(job_id="j1", fencing_token=claim.fencing_token),
    }
    async with TcpProxy(api.address) as proxy, grpc.aio.insecure_channel(proxy.endpoint) as channel:
        await channel.channel_ready()
        proxy.set_mode(ProxyMode.HALF_DROP)
        with pytest.raises(grpc.aio.AioRpcError):
            await getattr(worker_service_pb2_grpc.WorkerServiceStub(channel), how)(requests[how], timeout=0.5)
    again = await getattr(api.workers, how)(requests[how], timeout=5)
    job = (await api.jobs.GetJob(j.GetJobRequest(job_id="j1"), timeout=5)).job

    expected = {"CompleteJob": t.JOB_STATE_SUCCEEDED, "ReleaseJob": t.JOB_STATE_PENDING}[how]
    assert (expected, expected, 1) == (again.state, job.state, job.attempt)


async def test_any_coordinator_serves_any_call_for_any_session(settings: Settings) -> None:
    async with (
        running_coordinator(settings) as one,
        running_coordinator(settings) as two,
        grpc.aio.insecure_channel(one) as first,
        grpc.aio.insecure_channel(two) as second,
    ):
        a, b_ = api_at(one, first), api_at(two, second)
        worker = await open_worker(a)
        elsewhere = OpenedWorker(b_, worker.session_id)
        specs = [b.job_spec(job_id=f"j{n}") for n in range(10)]
        await a.jobs.SubmitJobs(b.submit_batch(*specs), timeout=5)
        claims = []
        for _ in range(20):
            claims += await elsewhere.claim(wait=1)
            if len(claims) == 10:
                break
        beat = await worker.beat(1, *claims)
        for claim in claims:
            done = b.complete(job_id=claim.job_id, fencing_token=claim.fencing_token)
            assert t.JOB_STATE_SUCCEEDED == (await a.workers.CompleteJob(done, timeout=5)).state

        assert 10 == len({claim.job_id for claim in claims})
        assert {w.VERDICT_HELD} == {verdict.verdict for verdict in beat.verdicts}


@contextmanager
def served_process(
    etcd: EtcdProcess, folder: Path, root: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """``leasekeeper serve`` as a process, and its address; killed at the end if it still runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    log = folder / "serve.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "coordinator", "serve", "--listen", address, "--etcd", etcd.endpoint]
        command += ["--allow-unsafe-etcd", "--set", f"etcd.root={root}", "--log-format", "json"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LEASEKEEPER_")}
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            yield process, address
        finally:
            process.kill()
            process.wait()


async def test_sigterm_ends_the_process_with_0_within_the_grace(
    etcd_server: EtcdProcess, tmp_path: Path
) -> None:
    root = f"/test-{uuid.uuid4().hex[:12]}"
    with served_process(etcd_server, tmp_path, root) as (process, address):
        async with grpc.aio.insecure_channel(address) as channel:
            api = api_at(address, channel)

            await serving(channel)
            await api.jobs.SubmitJob(b.submit(), timeout=5)
            worker = await open_worker(api)
            await worker.claim(wait=1)
            polling = asyncio.ensure_future(worker.claim(wait=9))
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert [] == await polling
        assert 0 == await asyncio.to_thread(process.wait, 10)
    assert b"Traceback" not in (tmp_path / "serve.log").read_bytes()


async def test_a_second_signal_does_not_wait(etcd_factory: EtcdFactory, tmp_path: Path) -> None:
    etcd = etcd_factory()
    with served_process(etcd, tmp_path, "/leasekeeper") as (process, address):
        async with grpc.aio.insecure_channel(address) as channel:
            await serving(channel)
            api = api_at(address, channel)
            await api.jobs.SubmitJob(b.submit(), timeout=5)
            etcd.pause()
            stuck = asyncio.ensure_future(api.jobs.SubmitJob(b.submit(job_id="j2"), timeout=30))
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert process.poll() is None
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait, 10)
            etcd.resume()

            assert time.monotonic() - started < 2
            with pytest.raises(grpc.aio.AioRpcError):
                await stuck


async def test_sighup_reads_the_tokens_again_and_a_bad_file_changes_nothing(
    etcd_server: EtcdProcess, settings: Settings, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.toml"

    def write(token: str) -> None:
        digest = hashlib.sha256(token.encode()).hexdigest()
        path.write_text(
            f'[[token]]\nname = "t"\nsha256 = "{digest}"\nnamespaces = ["*"]\nscopes = ["jobs:read"]\n'
        )

    write("one")
    coordinator = Coordinator(dataclasses.replace(settings, auth=AuthSettings(tokens_file=path)))
    running = asyncio.create_task(coordinator.run())
    await coordinator.started.wait()
    async with grpc.aio.insecure_channel(coordinator.address) as channel:
        jobs = job_service_pb2_grpc.JobServiceStub(channel)

        async def reason(token: str) -> str:
            metadata = (("authorization", f"Bearer {token}"),)
            request = j.GetJobRequest(job_id="nobody")
            return (await refusal(jobs.GetJob(request, timeout=5, metadata=metadata))).reason

        told = [await reason("one"), await reason("two")]
        write("two")
        coordinator.reload()
        told += [await reason("one"), await reason("two")]
        path.write_text("[[")
        coordinator.reload()
        told.append(await reason("two"))
    coordinator.stop()
    await running

    known, unknown = "JOB_NOT_FOUND", "UNAUTHENTICATED"
    assert [known, unknown, unknown, known, known] == told


async def test_a_command_that_cannot_run_says_why_and_ends_with_2(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "coordinator", "serve", *arguments],
            capture_output=True,
            text=True,
            timeout=30,
        )

    wrong = await asyncio.to_thread(run, "--set", "sessions.ttl_min_s=60")

    assert (2, "") == (wrong.returncode, wrong.stdout)
    assert "sessions.ttl_min_s (60) must be at most sessions.ttl_default_s (10)" in wrong.stderr
