"""The members of an etcd cluster, and the one that calls go to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from coordinator.errors import ConfigError, EtcdUnavailable
from coordinator.etcd.channels import ChannelConfig, Member, Purpose

__all__ = ["MemberRing"]


class MemberRing:
    """The members of one cluster and the one that calls go to now.

    Args:
        endpoints: at least one.
        config: see `ChannelConfig`.

    Raises:
        ConfigError: no endpoint, one twice, or a malformed one.
    """

    def __init__(self, endpoints: Sequence[str], config: ChannelConfig) -> None:
        if not endpoints:
            raise ConfigError("no etcd endpoint is given")
        if len(set(endpoints)) != len(endpoints):
            raise ConfigError("an etcd endpoint is given twice")
        self.members = tuple(Member(endpoint, config) for endpoint in endpoints)
        self._current = 0
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def current(self) -> Member:
        """The member that the next call goes to."""
        return self.members[self._current]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def named(self, endpoint: str) -> Member:
        """The member at *endpoint*. Raises KeyError."""
        for member in self.members:
            if member.endpoint == endpoint:
                return member
        raise KeyError(endpoint)

    def prefer(self, member: Member) -> None:
        """Send the next calls to *member*."""
        self._current = self.members.index(member)

    def after(self, member: Member) -> Member:
        """The member that follows *member*."""
        return self.members[(self.members.index(member) + 1) % len(self.members)]

    def failed(self, member: Member, purpose: Purpose, *, hung: bool) -> None:
        """Note that a call to *member* failed: calls go to the next one, if they went to this one.

        Args:
            member: who failed.
            purpose: on which channel.
            hung: it did not answer at all; then the connection is replaced as well.
        """
        if self.current is member:
            self._current = (self._current + 1) % len(self.members)
        if hung:
            channel = member.replace(purpose)
            if channel is not None:
                task = asyncio.get_running_loop().create_task(self._retire(channel))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)

    async def connected(self, purpose: Purpose, *, deadline: float) -> Member:
        """Return a member that is connected, the current one if possible; nothing has been sent before that.

        Args:
            purpose: on which channel.
            deadline: loop time.

        Raises:
            EtcdUnavailable: no member could be reached by then.
        """
        if self._closed:
            raise EtcdUnavailable("the etcd client is closed")
        member = self.current
        if member.ready(purpose):
            return member
        loop = asyncio.get_running_loop()
        alone = len(self.members) == 1
        while True:
            for _ in self.members:
                remaining = deadline - loop.time()
                if remaining <= 0 or self._closed:
                    names = ", ".join(member.endpoint for member in self.members)
                    raise EtcdUnavailable(f"no etcd member could be reached: {names}")
                limit = remaining if alone else min(remaining, 1.0)
                if await member.connect(purpose, timeout=limit, patient=alone):
                    # Several callers may be here at once; whoever finds a connection moves all.
                    self.prefer(member)
                    return member
                member = self.after(member)
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Close every channel; calls under way end with an error. Repeatable."""
        self._closed = True
        for member in self.members:
            for channel in member.take_channels():
                await channel.close()
        for task in list(self._retiring):
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)

    @staticmethod
    async def _retire(channel: grpc.aio.Channel) -> None:
        # Calls on it may still be answered if the server was only slow; their deadlines bound the wait.
        try:
            await channel.close(grace=10.0)
        except asyncio.CancelledError:
            await channel.close()
            raise
