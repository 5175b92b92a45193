"""Server reflection under both names, v1 and v1alpha, so that grpcurl needs no .proto files.

grpcio-reflection knows v1alpha only. The messages of v1 have the same fields and numbers, so the same
servicer serves both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from coordinator.errors import RequestError
from coordinator.rpc.auth import Scope, TokenTable
from coordinator.rpc.status import CODES

__all__ = ["REFLECTION_SERVICES", "register_reflection"]

REFLECTION_SERVICES: Final = (
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
)


def register_reflection(server: grpc.aio.Server, services: Sequence[str], tokens: TokenTable | None) -> None:
    """Add reflection of ``services`` (and of itself) to ``server``.

    With ``tokens`` it needs the scope "reflection".
    """
    # The v1 descriptor is in no package that we depend on: v1 is served, and only v1alpha can describe
    # itself.
    servicer = ReflectionServicer(service_names=[*services, *REFLECTION_SERVICES])

    async def reflect(requests: Any, context: Any) -> AsyncIterator[Any]:
        if tokens is not None:
            try:
                tokens.check(context.invocation_metadata() or (), Scope.REFLECT, None)
            except RequestError as refusal:
                await context.abort(CODES[refusal.reason], refusal.message)
        async for response in servicer.ServerReflectionInfo(requests, context):
            yield response

    handler = grpc.stream_stream_rpc_method_handler(
        reflect,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in REFLECTION_SERVICES:
        generic = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
        server.add_generic_rpc_handlers((generic,))
