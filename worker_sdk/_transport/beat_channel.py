"""Blocking calls for the beat thread, over connections of its own to each coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from worker_sdk._convert.status import from_rpc_failure
from worker_sdk._convert.work import beat_from, beat_to, open_to, opened_from, settlement_to
from worker_sdk._transport.methods import CLOSE_SESSION, HEARTBEAT, OPEN_SESSION, SETTLE_JOBS, Method
from worker_sdk._transport.options import channel_arguments, credentials, metadata
from worker_sdk._work import BeatAnswer, BeatLine, ClaimedJob, OpenedSession, Released
from worker_sdk.config import ConnectionConfig
from worker_sdk.errors import DeadlineExceeded, LeasekeeperError, OutcomeUnknown, Unavailable

__all__ = ["BeatChannel"]

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

_ELSEWHERE = (Unavailable, OutcomeUnknown, DeadlineExceeded)


class BeatChannel:
    """Opens, beats and closes sessions; used by one thread alone.

    After a failure the next call goes elsewhere.

    Args:
        config: endpoints, credentials, namespace.
        start: index of the endpoint to begin with.
    """

    def __init__(self, config: ConnectionConfig, start: int = 0) -> None:
        self._config = config
        self._addresses = config.addresses()
        self._current = start % len(self._addresses)
        self._metadata = metadata(config)
        self._channels: dict[str, grpc.Channel] = {}

    @property
    def endpoint_count(self) -> int:
        """How many endpoints there are."""
        return len(self._addresses)

    def _channel(self, address: str) -> grpc.Channel:
        channel = self._channels.get(address)
        if channel is None:
            arguments = channel_arguments(self._config)
            secure = credentials(self._config)
            if secure is None:
                channel = grpc.insecure_channel(address, options=arguments)
            else:
                channel = grpc.secure_channel(address, secure, options=arguments)
            self._channels[address] = channel
        return channel

    def _attempt(self, method: Method[Q, A], request: Q, timeout: float) -> A:
        address = self._addresses[self._current]
        call = self._channel(address).unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.answer.FromString,
        )
        try:
            answer: A = call(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._failure(method, error) from None
        return answer

    def _failure(self, method: Method[Q, A], error: grpc.RpcError) -> LeasekeeperError:
        # A failed call's error is its grpc.Call too, which no type says.
        call = cast(grpc.Call, error)
        trailing = [(str(key), value) for key, value in (call.trailing_metadata() or ())]
        found = from_rpc_failure(call.code(), call.details() or "", trailing, changes=method.changes)
        if isinstance(found, _ELSEWHERE):
            self.move_on()
        return found

    def move_on(self) -> None:
        """Send the next call to the next endpoint."""
        self._current = (self._current + 1) % len(self._addresses)

    def open_session(
        self,
        *,
        request_id: str,
        identity: str,
        ttl: float,
        sdk: str,
        labels: Mapping[str, str],
        timeout: float,
    ) -> OpenedSession:
        """Open a session, once; the same *request_id* again gives the same session."""
        request = open_to(
            namespace=self._config.namespace,
            request_id=request_id,
            identity=identity,
            ttl=ttl,
            sdk=sdk,
            labels=labels,
        )
        return opened_from(self._attempt(OPEN_SESSION, request, timeout))

    def beat(
        self, *, session_id: str, number: int, sent: float, claims: Sequence[BeatLine], timeout: float
    ) -> BeatAnswer:
        """Beat once."""
        request = beat_to(
            namespace=self._config.namespace, session_id=session_id, number=number, sent=sent, claims=claims
        )
        return beat_from(self._attempt(HEARTBEAT, request, timeout))

    def release(self, jobs: Sequence[ClaimedJob], *, timeout: float) -> None:
        """Give jobs back uncharged, once; what is not released by this is no error."""
        request = SETTLE_JOBS.request(
            namespace=self._config.namespace,
            settlements=[
                settlement_to(job.job_id, job.fencing_token, Released("worker_stalled")) for job in jobs
            ],
        )
        self._attempt(SETTLE_JOBS, request, timeout)

    def close_session(self, *, session_id: str, request_id: str, timeout: float) -> int:
        """Close a session, once; return how many claims were given back."""
        request = CLOSE_SESSION.request(
            namespace=self._config.namespace, session_id=session_id, request_id=request_id
        )
        return self._attempt(CLOSE_SESSION, request, timeout).released

    def close(self) -> None:
        """Close all connections."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()
