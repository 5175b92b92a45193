"""What a coordinator says of its own health."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

__all__ = ["SERVING", "health"]

SERVING = int(health_pb2.HealthCheckResponse.SERVING)


async def health(endpoint: str, service: str) -> int:
    """The status that the coordinator gives a service."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=3)
    return int(answer.status)
