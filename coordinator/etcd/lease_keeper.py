"""Renew leases on demand over a few keepalive streams; never on its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.errors import EtcdUnavailable, OutcomeUnknown
from coordinator.etcd.channels import Member, Purpose
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.renewal_stream import KeepAlive, RenewalStream

__all__ = ["KeepAlive", "LeaseKeeper", "LeaseKeeperConfig"]

_PAUSES_SECONDS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
_SUSPECTS_LIMIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseKeeperConfig:
    """Times in seconds.

    Args:
        streams: how many streams leases are spread over.
        stall: how long the oldest renewal of a stream may stay unanswered; then the stream is replaced. So
            long one stuck lease can hold up others.
        suspect_for: how long a lease that stalled a stream is kept on a stream apart.
        connect: longest wait for a connection per attempt.
    """

    streams: int = 4
    stall: float = 1.0
    suspect_for: float = 10.0
    connect: float = 1.0


class LeaseKeeper:
    """Renews leases of one client.

    Args:
        client: the etcd client.
        config: see `LeaseKeeperConfig`.
        monotonic: seconds, never falling; `KeepAlive.sent_at` is on it.
    """

    def __init__(
        self,
        client: EtcdClient,
        config: LeaseKeeperConfig | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._config = config or LeaseKeeperConfig()
        self._monotonic = monotonic
        # The last slot is for suspects.
        self._slots: list[RenewalStream | None] = [None] * (self._config.streams + 1)
        self._openings: list[asyncio.Lock] = [asyncio.Lock() for _ in self._slots]
        self._suspects: dict[int, float] = {}
        self._last_reply: dict[Member, float] = {}
        self._ended: list[RenewalStream] = []
        self._closed = False
        self.stalls = 0

    async def close(self) -> None:
        """End all streams; renewals under way raise OutcomeUnknown. Repeatable."""
        self._closed = True
        for index, stream in enumerate(self._slots):
            if stream is not None:
                stream.end()
                self._ended.append(stream)
                self._slots[index] = None
        for stream in self._ended:
            await stream.closed()
        self._ended.clear()

    async def keep_alive(self, lease_id: int, *, timeout: float) -> KeepAlive:
        """Renew a lease once; safe to repeat.

        A member that does not answer is left for the next one, and the renewal is sent again, within
        *timeout*.

        Args:
            lease_id: which.
            timeout: seconds.

        Returns:
            The answer; ``ttl`` 0 means that etcd has no such lease. Success alone proves no ownership.

        Raises:
            OutcomeUnknown: no answer in time. The lease may or may not have been renewed, and may be gone.
            ClusterChanged: another cluster answered; that says nothing about the lease.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        attempt = 0
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await asyncio.sleep(_PAUSES_SECONDS[min(attempt, len(_PAUSES_SECONDS) - 1)])
                    slot = self._slot(lease_id)
                    stream = self._slots[slot]
                    if stream is None or stream.ended:
                        stream = await self._open(slot)
                    answer = await stream.ask(lease_id)
            except (TimeoutError, EtcdUnavailable) as error:
                if isinstance(error, EtcdUnavailable) and not self._closed and loop.time() < deadline:
                    attempt += 1
                    continue
                message = f"no answer to the renewal of lease {lease_id:x} within {timeout:.1f} s"
                raise OutcomeUnknown(message) from error
            if answer is not None:
                self._client.pin.check_cluster(answer.cluster_id)
                return answer
            if self._closed:
                raise OutcomeUnknown("the lease keeper is closed")
            self._judge(slot, stream)
            attempt += 1

    def _slot(self, lease_id: int) -> int:
        if self._suspects:
            until = self._suspects.get(lease_id)
            if until is not None:
                if self._monotonic() < until:
                    return self._config.streams
                del self._suspects[lease_id]
        # Ids are etcd's (time in the high bits, counter in the low ones) or random.
        return (lease_id ^ (lease_id >> 17)) % self._config.streams

    async def _open(self, slot: int) -> RenewalStream:
        async with self._openings[slot]:
            stream = self._slots[slot]
            if stream is not None and not stream.ended:
                return stream
            if self._closed:
                raise EtcdUnavailable("the lease keeper is closed")
            if stream is not None:
                self._judge(slot, stream)
            loop = asyncio.get_running_loop()
            limit = self._config.connect
            member = await self._client.ring.connected(Purpose.KEEPALIVE, deadline=loop.time() + limit)
            login = await self._client.login.metadata(member, timeout=limit)
            if self._closed:
                raise EtcdUnavailable("the lease keeper is closed")
            made = RenewalStream(
                member,
                login,
                stall=self._config.stall,
                monotonic=self._monotonic,
                replied=lambda: self._last_reply.__setitem__(member, self._monotonic()),
            )
            self._slots[slot] = made
            for ended in self._ended:
                await ended.closed()
            self._ended.clear()
            return made

    def _judge(self, slot: int, stream: RenewalStream) -> None:
        """Draw the lesson of an ended stream, once."""
        if self._slots[slot] is not stream:
            return
        self._slots[slot] = None
        self._ended.append(stream)
        if stream.refused_login:
            self._client.login.discard(stream.login)
            return
        if not stream.stalled:
            self._client.ring.failed(stream.member, Purpose.KEEPALIVE, hung=False)
            return
        self.stalls += 1
        if len(self._suspects) >= _SUSPECTS_LIMIT:
            self._suspects.clear()
        self._suspects[stream.suspect] = self._monotonic() + self._config.suspect_for
        # If the member has answered other streams since, the lease is stuck and not the member.
        if self._last_reply.get(stream.member, -float("inf")) < stream.suspect_sent_at:
            self._client.ring.failed(stream.member, Purpose.KEEPALIVE, hung=True)
