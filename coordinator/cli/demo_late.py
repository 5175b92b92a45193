"""A completion sent past the SDK: what a client without the SDK's care would do after a long pause."""

from __future__ import annotations

from typing import cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from leasekeeper.v1.worker_service_pb2 import CompleteJobRequest
from leasekeeper.v1.worker_service_pb2_grpc import WorkerServiceStub

__all__ = ["complete_late", "reason_of"]

_DETAILS = "grpc-status-details-bin"


def complete_late(endpoint: str, namespace: str, job_id: str, token: int, *, timeout: float = 10.0) -> str:
    """Complete a job with a token; returns "OK", or the reason for which it was refused.

    Args:
        endpoint: ``host:port`` of a coordinator.
        namespace: of the job.
        job_id: which job.
        token: the fencing token that the caller once had.
        timeout: seconds.
    """
    request = CompleteJobRequest(namespace=namespace, job_id=job_id, fencing_token=token)
    with grpc.insecure_channel(endpoint) as channel:
        try:
            WorkerServiceStub(channel).CompleteJob(request, timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            return reason_of(error)
    return "OK"


def reason_of(error: grpc.RpcError) -> str:
    """``ErrorInfo.reason`` of a failed call; the name of its code where there is none."""
    # What a stub raises is the call itself; the types do not say so.
    call = cast("grpc.Call", error)
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS and isinstance(value, bytes):
            try:
                details = status_pb2.Status.FromString(value).details
            except DecodeError:
                break
            for detail in details:
                info = error_details_pb2.ErrorInfo()
                if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                    return str(info.reason)
    return str(call.code().name)
