"""One LeaseKeepAlive stream: ask in order, match the answers, notice when the stream is stuck."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from coordinator.etcd.auth import Metadata
from coordinator.etcd.channels import Member, Purpose
from leasekeeper.internal.etcd.v1.lease_pb2 import LeaseKeepAliveRequest, LeaseKeepAliveResponse

__all__ = ["KeepAlive", "RenewalStream"]

_PATH = "/etcdserverpb.Lease/LeaseKeepAlive"
_SECOND_LOOK_SECONDS = 0.05
# Without it a member that lost its quorum leaves the request open until the deadline.
_REQUIRE_LEADER = (("hasleader", "true"),)


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """etcd's answer to one renewal.

    Args:
        ttl: seconds that the lease now has; 0: there is no such lease.
        revision: of the answering member when it took the request; it may lag behind the cluster.
        raft_term: of the answering member. A leader that was deposed may still answer success: compare with
            the term of a linearizable read.
        sent_at: monotonic seconds when the renewal was sent; nothing before it is proven.
        cluster_id: of the answering member; the answer of another cluster means nothing.
    """

    ttl: int
    revision: int
    raft_term: int
    sent_at: float
    cluster_id: int = 0


@dataclass(slots=True)
class _Ask:
    lease_id: int
    waiting: list[asyncio.Future[KeepAlive | None]] = field(default_factory=list)
    sent_at: float = 0.0

    def answer(self, result: KeepAlive | None) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(result)


class RenewalStream:
    """A bidirectional call that etcd serves strictly in order.

    One renewal that etcd cannot answer (a lease that has run out and is not yet revoked) holds up all
    behind it. After *stall* seconds without an answer the stream ends, and `suspect` names the lease at
    its head.

    Args:
        member: where to.
        login: metadata of the login, if any.
        stall: seconds.
        monotonic: seconds, never falling.
        replied: called with each answer's arrival.
    """

    def __init__(
        self,
        member: Member,
        login: Metadata | None,
        *,
        stall: float,
        monotonic: Callable[[], float],
        replied: Callable[[], None],
    ) -> None:
        self.member = member
        self.login = login
        self.ended = False
        self.stalled = False
        self.refused_login = False
        self.suspect = 0
        self.suspect_sent_at = 0.0
        self._stall = stall
        self._monotonic = monotonic
        self._replied = replied
        self._loop = asyncio.get_running_loop()
        self._unsent: dict[int, _Ask] = {}
        self._sent: deque[_Ask] = deque()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._doubted: _Ask | None = None
        method = member.channel(Purpose.KEEPALIVE).stream_stream(
            _PATH,
            request_serializer=LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=LeaseKeepAliveResponse.FromString,
        )
        self._call = method(metadata=(*_REQUIRE_LEADER, *(login or ())))
        self._tasks = (self._loop.create_task(self._write()), self._loop.create_task(self._read()))

    def ask(self, lease_id: int) -> asyncio.Future[KeepAlive | None]:
        """Renew; the future gives None if the stream ends first.

        Asks for one lease that are made before the renewal leaves share it; later ones do not, for an answer
        proves nothing about the time before its own sending.
        """
        future: asyncio.Future[KeepAlive | None] = self._loop.create_future()
        if self.ended:
            future.set_result(None)
            return future
        ask = self._unsent.get(lease_id)
        if ask is None:
            ask = self._unsent[lease_id] = _Ask(lease_id)
        ask.waiting.append(future)
        self._wake.set()
        return future

    def end(self) -> None:
        """Give the stream up; all open asks get None. Repeatable."""
        if self.ended:
            return
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
        for ask in (*self._sent, *self._unsent.values()):
            ask.answer(None)
        self._sent.clear()
        self._unsent.clear()
        self._call.cancel()
        for task in self._tasks:
            task.cancel()

    async def closed(self) -> None:
        """Wait for the stream's tasks, after `end`."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unsent:
                    ask = self._unsent.pop(next(iter(self._unsent)))
                    ask.sent_at = self._monotonic()
                    self._sent.append(ask)
                    if self._timer is None:
                        self._timer = self._loop.call_later(self._stall, self._look)
                    await self._call.write(LeaseKeepAliveRequest(id=ask.lease_id))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            self.end()  # the reader hears why, if there is a why
        finally:
            self.end()

    async def _read(self) -> None:
        try:
            while True:
                reply = await self._call.read()
                if reply is grpc.aio.EOF:
                    return
                assert isinstance(reply, LeaseKeepAliveResponse)
                self._replied()
                self._match(reply)
        except grpc.aio.AioRpcError as error:
            self.refused_login = error.code() is grpc.StatusCode.UNAUTHENTICATED
        finally:
            self.end()

    def _match(self, reply: LeaseKeepAliveResponse) -> None:
        for index, ask in enumerate(self._sent):
            if ask.lease_id == reply.id:
                del self._sent[index]
                header = reply.header
                ask.answer(
                    KeepAlive(reply.ttl, header.revision, header.raft_term, ask.sent_at, header.cluster_id)
                )
                return

    def _look(self) -> None:
        """Watchdog: is the oldest renewal older than it may be?"""
        self._timer = None
        if self.ended or not self._sent:
            return
        head = self._sent[0]
        age = self._monotonic() - head.sent_at
        if age < self._stall:
            self._timer = self._loop.call_later(self._stall - age + 0.001, self._look)
            return
        if self._doubted is not head:
            # If this process was itself held up, the answer may lie here unread: give the reader a turn.
            self._doubted = head
            self._timer = self._loop.call_later(_SECOND_LOOK_SECONDS, self._look)
            return
        self.stalled = True
        self.suspect, self.suspect_sent_at = head.lease_id, head.sent_at
        self.end()
