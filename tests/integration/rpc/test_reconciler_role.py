"""The reconciler as a process of its own repairs without any coordinator, and hands out nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.app import RECONCILER, running_coordinator
from coordinator.app.composition import compose
from coordinator.app.machine import SystemClock, SystemEntropy
from coordinator.app.parts import Parts
from coordinator.app.repairs_only import ADMIN_SERVICE, compose_reconciler
from coordinator.config import ReconcilerSettings, Settings
from coordinator.core.job import Job, JobState
from coordinator.etcd.client import EtcdConfig
from coordinator.etcd.store import EtcdStore, StoreConfig, StoreListeners
from leasekeeper.v1 import job_service_pb2_grpc, worker_service_pb2_grpc
from tests.integration.rpc.conftest import Api, open_worker
from tests.integration.store.conftest import Told
from tests.support.polling import eventually
from tests.unit.rpc import builders

SECONDS_OF_A_DAY = 86_400.0


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Api]:
    """A coordinator that leaves the sweeps to others."""
    quiet = replace(settings, reconciler=ReconcilerSettings(enabled=False))
    async with running_coordinator(quiet) as address, grpc.aio.insecure_channel(address) as channel:
        yield Api(
            address,
            channel,
            job_service_pb2_grpc.JobServiceStub(channel),
            worker_service_pb2_grpc.WorkerServiceStub(channel),
        )


@asynccontextmanager
async def looking_on(settings: Settings) -> AsyncIterator[EtcdStore]:
    """A store that repairs nothing by itself."""
    told = Told()
    config = StoreConfig(
        etcd=EtcdConfig(endpoints=settings.etcd.endpoint_list),
        coordinator_id="onlooker",
        root=settings.etcd.root,
        dispatches=False,
    )
    listeners = StoreListeners(changes=told, commits=told)
    async with EtcdStore(config, listeners, clock=SystemClock(), entropy=SystemEntropy()) as store:
        yield store


async def job_of(store: EtcdStore, job_id: str = "j1") -> Job:
    found = await store.jobs.read("default", job_id, deadline=SystemClock().monotonic() + 5)
    assert found.stored is not None
    return found.stored.job


async def hold_a_job(api: Api, *, ttl: int) -> None:
    """A worker holds j1, and is not heard of any more."""
    await api.jobs.SubmitJob(builders.submit(), timeout=5)
    worker = await open_worker(api, ttl=Duration(seconds=ttl))
    [claim] = await worker.claim(wait=5)
    assert claim.job_id == "j1"


def rarely_swept(settings: Settings) -> Settings:
    """A sweep when the role is taken, and then none in the life of a test."""
    return replace(settings, reconciler=ReconcilerSettings(sweep_every_s=SECONDS_OF_A_DAY))


async def test_a_lost_job_is_recovered_by_the_watch_while_no_coordinator_runs(settings: Settings) -> None:
    async with looking_on(settings) as store:
        async with running_coordinator(rarely_swept(settings), role=RECONCILER):
            async with serving(settings) as api:
                await hold_a_job(api, ttl=3)
            assert (await job_of(store)).state is JobState.RUNNING

            async def waits() -> bool:
                return (await job_of(store)).state is JobState.PENDING

            await eventually(waits, timeout=30, interval=0.1)
        assert (await job_of(store)).lease_losses == 1


async def test_what_was_lost_while_nothing_ran_is_found_by_the_first_sweep(settings: Settings) -> None:
    """No watch tells of it; the sweep begins when the role is taken, whatever the timer says."""
    async with looking_on(settings) as store:
        async with serving(settings) as api:
            await hold_a_job(api, ttl=2)

        async def free() -> bool:
            return not await store.jobs.list_claims("default", deadline=SystemClock().monotonic() + 5)

        await eventually(free, timeout=30, interval=0.1)
        async with running_coordinator(rarely_swept(settings), role=RECONCILER):

            async def waits() -> bool:
                return (await job_of(store)).state is JobState.PENDING

            await eventually(waits, timeout=30, interval=0.1)


async def test_no_job_is_kept_for_a_reconciler(settings: Settings) -> None:
    async with (
        looking_on(settings) as store,
        running_coordinator(settings, role=RECONCILER),
        serving(settings) as api,
    ):
        await eventually(lambda: len(store.membership.members()) == 3)
        assert len(store.membership.dispatchers()) == 1
        worker = await open_worker(api)
        for number in range(20):
            await api.jobs.SubmitJob(builders.submit(job_id=f"j{number}"), timeout=5)
            [claim] = await worker.claim(max_jobs=1, wait=5)
            assert claim.job_id == f"j{number}"


async def test_sweeps_are_left_out_where_they_are_not_enabled(settings: Settings) -> None:
    off = replace(settings, reconciler=ReconcilerSettings(enabled=False))
    running = {
        (name, enabled): set(made.background)
        for name, maker in (("serve", compose), ("reconciler", compose_reconciler))
        for enabled, given in ((True, settings), (False, off))
        for made in [maker(given, SystemClock(), SystemEntropy(), endpoint="", version="0")]
    }

    sweeps = {"sweep leadership", "sweep", "overdue"}
    assert sweeps <= running["serve", True]
    assert not sweeps & running["serve", False]
    assert {"lost", "due"} <= running["serve", False]
    assert sweeps <= running["reconciler", False] == running["reconciler", True]


async def test_a_pass_in_trouble_makes_it_not_serving_and_alive(settings: Settings) -> None:
    trouble = ""

    def troubled(*args: Any, **named: Any) -> Parts:
        return replace(compose_reconciler(*args, **named), trouble=lambda: trouble)

    role = replace(RECONCILER, compose=troubled)
    async with (
        running_coordinator(settings, role=role) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)

        async def serving(service: str) -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async def not_serving(service: str) -> bool:
            return not await serving(service)

        await eventually(lambda: serving(ADMIN_SERVICE), timeout=15)
        trouble = "pass lost failed 3 times: planned"
        await eventually(lambda: not_serving(ADMIN_SERVICE), timeout=15)
        assert await serving("")
        trouble = ""
        await eventually(lambda: serving(ADMIN_SERVICE), timeout=15)
