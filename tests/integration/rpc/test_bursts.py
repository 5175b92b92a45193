"""A burst of calls is answered call by call, or refused by our own words."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc.aio

from leasekeeper.v1 import job_service_pb2 as jobs_pb
from tests.integration.rpc.conftest import Api

BURST = 6_000


async def test_a_burst_of_calls_is_not_cancelled_by_the_server(api: Api) -> None:
    """gRPC itself sheds what waits for a busy event loop, from 1,000 calls on, as a bare CANCELLED."""

    async def ask(number: int) -> str:
        try:
            await api.jobs.GetJob(jobs_pb.GetJobRequest(job_id=f"none-{number}"), timeout=40)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    answers = Counter(await asyncio.gather(*map(ask, range(BURST))))
    assert answers == {"NOT_FOUND": BURST}
