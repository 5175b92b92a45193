"""How unary calls reach etcd: deadlines, failover of reads, writes that are sent exactly once, fresh logins.

A read that fails moves on to the next member at once. A write is never repeated here: only its author
knows how to recognise a first try that was applied. It raises OutcomeUnknown, and the next call goes to
another member. Before anything is sent, a connected member is looked for, so that most failures to connect
cost no write its certainty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

import grpc

from coordinator.errors import DeadlinePassed, EtcdUnavailable, OutcomeUnknown, StorageError, StorageFull
from coordinator.etcd.auth import Login, Metadata
from coordinator.etcd.channels import Member, Purpose
from coordinator.etcd.cluster import ClusterPin
from coordinator.etcd.outcome import classify, is_stale_login
from coordinator.etcd.ring import MemberRing
from leasekeeper.internal.etcd.v1.kv_pb2 import ResponseHeader

__all__ = ["Calls"]

_LOGIN_ATTEMPTS = 3
_LOGIN_PAUSE_SECONDS = 0.05
_READ_ROUNDS = 40
_READ_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8)
_HUNG_SECONDS = 0.25


class _Reply(Protocol):
    @property
    def header(self) -> ResponseHeader: ...


R = TypeVar("R", bound=_Reply)


class Calls:
    """Sends encoded requests and judges the replies' headers.

    Args:
        ring: where to.
        login: whose token the calls carry.
        pin: what the replies are compared with.
        read_attempt_seconds: how long one member may take for a read while others have not been asked.
    """

    def __init__(
        self, ring: MemberRing, login: Login, pin: ClusterPin, *, read_attempt_seconds: float
    ) -> None:
        self._ring = ring
        self._login = login
        self._pin = pin
        self._read_attempt_seconds = read_attempt_seconds

    async def write(
        self,
        path: str,
        request: bytes,
        parse: Callable[[bytes], R],
        timeout: float,
        *,
        only: Member | None = None,
    ) -> R:
        """Send *request* once, within *timeout* seconds; to one member *only*, or to a connected one.

        Raises:
            EtcdUnavailable: no member could be reached; nothing was sent.
            NotApplied: nothing was written.
            OutcomeUnknown: it may have been written.
            ClusterChanged: it went to another cluster.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        member = only or await self._ring.connected(Purpose.KV, deadline=deadline)
        known, history = self._pin.high_water, self._pin.history
        sent = loop.time()
        try:
            reply = await self._send(member, path, request, parse, deadline, mutation=True)
        except (OutcomeUnknown, EtcdUnavailable) as error:  # the latter from the login before it
            if not isinstance(error, StorageFull):
                self._blame(member, error, loop.time() - sent)
            raise
        if only is None:  # a reply about one member (defragmentation) carries no header
            self._pin.observe(reply.header, known, history)
        return reply

    async def read(
        self,
        path: str,
        request: bytes,
        parse: Callable[[bytes], R],
        timeout: float,
        *,
        linearizable: bool = True,
        only: Member | None = None,
    ) -> R:
        """Ask member after member until one answers, within *timeout* seconds; or one member *only*.

        Args:
            linearizable: whether the reply's revision may be judged.

        Raises:
            EtcdUnavailable: none answered.
            StorageError: as etcd refused.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        width = 1 if only else len(self._ring.members)
        failure: StorageError | None = None
        for attempt in range(_READ_ROUNDS * width):
            if attempt and attempt % width == 0:
                pause = _READ_PAUSES_SECONDS[min(attempt // width, len(_READ_PAUSES_SECONDS)) - 1]
                await asyncio.sleep(max(0.0, min(pause, deadline - loop.time())))
            sent = loop.time()
            remaining = deadline - sent
            if attempt and remaining <= 0:
                break
            member = only
            try:
                if member is None:
                    member = await self._ring.connected(Purpose.KV, deadline=deadline)
                known, history = self._pin.high_water, self._pin.history
                sent = loop.time()
                left = width - attempt % width
                limit = remaining if left == 1 else min(self._read_attempt_seconds, remaining / left)
                reply = await self._send(member, path, request, parse, sent + limit, mutation=False)
            except EtcdUnavailable as error:
                failure = error
                if self._ring.closed:
                    break
                if only is None and member is not None:
                    self._blame(member, error, loop.time() - sent)
                continue
            if linearizable:
                self._pin.observe(reply.header, known, history)
            else:
                self._pin.check_cluster(reply.header.cluster_id)
            return reply
        raise failure or EtcdUnavailable("the deadline had passed before the read was sent")

    async def _send(
        self,
        member: Member,
        path: str,
        request: bytes,
        parse: Callable[[bytes], R],
        deadline: float,
        *,
        mutation: bool,
    ) -> R:
        loop = asyncio.get_running_loop()
        method = member.unary(path, parse)
        metadata: Metadata | None = None
        for attempt in range(1, _LOGIN_ATTEMPTS + 1):
            if self._login.enabled:
                metadata = await self._login.metadata(member, timeout=deadline - loop.time())
            remaining = deadline - loop.time()
            if remaining <= 0:
                message = "the deadline passed before anything was sent"
                raise (DeadlinePassed if mutation else EtcdUnavailable)(message)
            try:
                reply = await method(request, timeout=remaining, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if self._login.enabled and attempt < _LOGIN_ATTEMPTS and is_stale_login(error):
                    # A member that lags may not know the newest token yet, hence the pause from the second
                    # on.
                    self._login.discard(metadata)
                    await asyncio.sleep(_LOGIN_PAUSE_SECONDS * (attempt - 1))
                    continue
                raise classify(error, mutation=mutation) from error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # gRPC reports a channel that was closed under a call as if the caller had been cancelled.
                message = f"{member.endpoint}: the connection was closed during the call"
                raise (OutcomeUnknown if mutation else EtcdUnavailable)(message) from error
            except grpc.aio.UsageError as error:
                raise EtcdUnavailable(f"{member.endpoint}: the channel is closed") from error
            return reply  # type: ignore[return-value]  # `unary` is keyed by the parser, so this is its type
        raise AssertionError("unreachable")

    def _blame(self, member: Member, error: StorageError, took: float) -> None:
        cause = error.__cause__
        timed_out = (
            isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        )
        # A deadline of a few milliseconds says nothing about the connection.
        self._ring.failed(member, Purpose.KV, hung=timed_out and took >= _HUNG_SECONDS)
