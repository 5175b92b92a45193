"""A lost run that goes on, from etcd to log, metrics, stream and webhook; and the end of streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import urllib.request
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
import pytest
from google.protobuf.json_format import ParseDict

from coordinator.app.coordinator import Coordinator
from coordinator.config import AdminSettings, NoticeSettings, Settings
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.observability.webhook import SIGNATURE_HEADER, signature
from leasekeeper.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    job_service_pb2_grpc,
    types_pb2,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from tests.integration.rpc.conftest import Api, open_worker
from tests.support.polling import eventually
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal

SECRET = "s3cret-s3cret-s3cret"
WATCH = admin_service_pb2.WatchNoticesRequest()


@dataclass
class Receiver:
    """An HTTP endpoint that takes everything."""

    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers["Content-Length"]))
            self.requests.append((headers, body))
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            await writer.drain()
        writer.close()

    def notices(self) -> list[admin_service_pb2.Notice]:
        """All that came, read as the published message."""
        return [
            ParseDict(one, admin_service_pb2.Notice())
            for _, body in self.requests
            for one in json.loads(body)["notices"]
        ]


@dataclass
class Watched:
    """A coordinator with all ways that notices can go."""

    coordinator: Coordinator
    api: Api
    admin: Any
    receiver: Receiver

    async def metrics(self) -> str:
        """A scrape."""
        url = f"http://{self.coordinator.admin_address}/metrics"

        def get() -> str:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())

        return await asyncio.to_thread(get)


@asynccontextmanager
async def watched_coordinator(settings: Settings) -> AsyncIterator[Watched]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    coordinator = Coordinator(
        replace(
            settings,
            admin=AdminSettings(listen="127.0.0.1:0"),
            notices=NoticeSettings(webhook_url=f"http://127.0.0.1:{port}/hook", webhook_secret=SECRET),
        )
    )
    running = asyncio.ensure_future(coordinator.run())
    try:
        async with asyncio.timeout(20):
            await coordinator.started.wait()
        async with grpc.aio.insecure_channel(coordinator.address) as channel:
            api = Api(
                coordinator.address,
                channel,
                job_service_pb2_grpc.JobServiceStub(channel),
                worker_service_pb2_grpc.WorkerServiceStub(channel),
            )
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)
            yield Watched(coordinator, api, admin, receiver)
    finally:
        coordinator.stop()
        await running
        server.close()


@pytest.fixture
async def watched(settings: Settings) -> AsyncIterator[Watched]:
    async with watched_coordinator(settings) as made:
        yield made


async def revoke(settings: Settings, session_id: str) -> None:
    """End a session's lease, as if its worker had been silent for too long."""
    async with EtcdClient(EtcdConfig(endpoints=settings.etcd.endpoint_list)) as client:
        await client.lease_revoke(int(session_id, 16), timeout=5)


async def test_a_lost_run_that_goes_on_is_told_everywhere(settings: Settings, watched: Watched) -> None:
    api = watched.api
    kinds = [admin_service_pb2.NOTICE_KIND_DUPLICATE_RUN]
    asked = admin_service_pb2.WatchNoticesRequest(kinds=kinds, include_recent=True)
    stream = watched.admin.WatchNotices(asked)
    coming = asyncio.ensure_future(stream.read())
    frozen, other = await open_worker(api), await open_worker(api)
    await api.jobs.SubmitJob(b.submit(), timeout=5)
    [old] = await frozen.claim(wait=1)

    await revoke(settings, frozen.session_id)
    [new] = await other.claim(wait=9)
    refused = await refusal(api.workers.CompleteJob(b.complete(fencing_token=old.fencing_token), timeout=5))
    gone = await refusal(frozen.beat(1, old))

    assert (refused.reason, gone.reason) == ("CLAIM_LOST", "SESSION_NOT_FOUND")
    async with asyncio.timeout(10):
        notice = (await coming).notice
    assert (notice.job_id, notice.session_id) == ("j1", frozen.session_id)
    assert (notice.fencing_token, notice.attempt) == (old.fencing_token, 1)
    assert notice.facts["newer_session"] == other.session_id
    assert new.fencing_token > old.fencing_token

    def posted() -> set[str]:
        return {
            one.facts["call"]
            for one in watched.receiver.notices()
            if one.kind == admin_service_pb2.NOTICE_KIND_DUPLICATE_RUN
        }

    await eventually(lambda: posted() == {"settlement", "heartbeat"}, what="both kinds of late call")
    for headers, body in watched.receiver.requests:
        timestamp = int(headers[SIGNATURE_HEADER].partition(",")[0].removeprefix("t="))
        assert headers[SIGNATURE_HEADER] == signature(SECRET, timestamp, body)
    metrics = await watched.metrics()
    assert 'leasekeeper_stale_calls_refused_total{call="settlement"} 1.0' in metrics
    assert 'leasekeeper_duplicate_run_overlap_seconds_count{call="heartbeat"} 1.0' in metrics
    assert 'leasekeeper_webhook_notices_total{outcome="dropped"} 0.0' in metrics


async def test_every_number_that_parts_keep_can_be_read(watched: Watched) -> None:
    await watched.api.jobs.SubmitJob(b.submit(), timeout=5)

    metrics = await watched.metrics()

    assert re.search(r'^leasekeeper_commit_operations_total{outcome="ops"} [1-9]', metrics, re.MULTILINE)
    for name in (
        "commits_outstanding",
        "etcd_lease_stalls_total",
        "etcd_regressions_total",
        "etcd_compactions_total",
        "submissions_accepted",
        "epoch_regressed",
        "index_repaired_total",
        "claim_conflicts_total",
        "claims_waiting",
        "late_calls_dropped_total",
        "notice_streams",
        "webhook_queued",
    ):
        assert f"\nleasekeeper_{name} " in metrics, name


async def test_a_job_that_ends_dead_is_told_with_its_record(watched: Watched) -> None:
    worker = await open_worker(watched.api)
    job_id = f"j-{uuid.uuid4().hex[:8]}"
    await watched.api.jobs.SubmitJob(b.submit(job_id=job_id), timeout=5)
    [claim] = await worker.claim(wait=1)
    failed = worker_service_pb2.FailJobRequest(
        job_id=job_id,
        fencing_token=claim.fencing_token,
        failure=types_pb2.Failure(type="Boom", message="no"),
        no_retry=True,
    )
    await watched.api.workers.FailJob(failed, timeout=5)

    stream = watched.admin.WatchNotices(admin_service_pb2.WatchNoticesRequest(include_recent=True))
    async with asyncio.timeout(5):
        notice = (await stream.read()).notice

    assert (notice.kind, notice.job_id) == (admin_service_pb2.NOTICE_KIND_DEAD, job_id)
    assert notice.facts["failure_type"] == "Boom"


async def test_streams_end_in_order_when_their_coordinator_stops(settings: Settings) -> None:
    async with watched_coordinator(settings) as watched:
        stream = watched.admin.WatchNotices(WATCH)
        reading = asyncio.ensure_future(stream.read())
        await eventually(lambda: _streams(watched), what="the stream")
        watched.coordinator.stop()
        async with asyncio.timeout(10):
            ended = await refusal(reading)

    assert ended.reason == "DRAINING"


async def _streams(watched: Watched) -> bool:
    return "\nleasekeeper_notice_streams 1.0" in await watched.metrics()
