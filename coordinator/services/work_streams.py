"""All streams of workers at this coordinator: who has one, and what all of them hear of.

A request to stop comes by the watch, whoever made it, and goes to the stream of the session that holds the
claim. The watches of claims and of requests do not wait for each other: a request for a claim that is not
known yet is looked at again a little later, and remembered for claims that are about to be sent.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

from coordinator.core.job import Claim
from coordinator.errors import Reason, RequestError
from coordinator.ports import Clock, NamespaceFeeds, Session, SessionStore
from coordinator.services.abandoned import Abandoned
from coordinator.services.api import ClaimedJob
from coordinator.services.claiming import require_session, session_not_found
from coordinator.services.storage_errors import RETRY_MS
from coordinator.services.work_outbox import StopAsked
from coordinator.services.work_stream import Claims, WorkOpening, WorkStream, WorkStreamConfig

__all__ = ["HeldClaims", "WorkStreams"]

_LATER: Final = (0.02, 0.1, 0.4, 1.0)
"""When a request to stop a claim that nobody knows yet is looked at again, seconds after the last look."""

_REMEMBERED: Final = 4_096


class HeldClaims(Protocol):
    """What is known of claims and sessions; ``services.holders.Holders`` is one."""

    def claim(self, namespace: str, job_id: str) -> Claim | None:
        """The claim that seems to stand."""

    def session(self, namespace: str, session_id: str) -> Session | None:
        """An open session, as far as the watch has come."""


class WorkStreams:
    """The streams of this coordinator.

    Args:
        claims: serves the lanes.
        sessions: whether a session is open.
        feeds: watches of namespaces.
        holders: who holds what.
        abandoned: takes claims that were never handed to the transport.
        fresh: whether the watch of a namespace is alive.
    """

    def __init__(
        self,
        claims: Claims,
        sessions: SessionStore,
        feeds: NamespaceFeeds,
        holders: HeldClaims,
        abandoned: Abandoned,
        clock: Clock,
        config: WorkStreamConfig,
        *,
        fresh: Callable[[str], bool],
    ) -> None:
        self._claims = claims
        self._sessions = sessions
        self._feeds = feeds
        self._holders = holders
        self._abandoned = abandoned
        self._clock = clock
        self._config = config
        self._fresh = fresh
        self._streams: dict[tuple[str, str], WorkStream] = {}
        self._open = 0
        self._stale: dict[str, int] = {}
        self._asked: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._draining = False

    @property
    def open_streams(self) -> int:
        """Streams under way."""
        return self._open

    @asynccontextmanager
    async def open(self, namespace: str, opening: WorkOpening) -> AsyncGenerator[WorkStream, None]:
        """A stream, inside the block. It takes the place of an older one of the same session.

        Raises:
            RequestError: DRAINING, TOO_MANY_REQUESTS, NOT_READY, ETCD_UNAVAILABLE, SESSION_NOT_FOUND,
            VALIDATION_FAILED (the first credits).
        """
        self._admit(namespace)
        self._open += 1
        try:
            await self._require_session(namespace, opening.session_id)
            stream = WorkStream(
                namespace,
                opening,
                self._claims,
                self._clock,
                self._config,
                asked=lambda claimed: self._asked_of(namespace, claimed),
                give_back=lambda claimed: self._abandoned.release(claimed.stored, claimed.claim),
            )
            stream.session_known = self._holders.session(namespace, opening.session_id) is not None
            key = (namespace, opening.session_id)
            older = self._streams.get(key)
            if older is not None:
                older.end(_replaced())
            self._streams[key] = stream
            stream.start()
            try:
                if self._draining:
                    stream.end(_draining())
                yield stream
            finally:
                if self._streams.get(key) is stream:
                    del self._streams[key]
                await stream.close()
        finally:
            self._open -= 1

    def stop_asked(self, namespace: str, job_id: str) -> None:
        """The watch saw a request to stop; it must not block."""
        self._asked[namespace, job_id] = self._clock.monotonic()
        self._asked.move_to_end((namespace, job_id))
        if len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)
        if self._streams:
            self._tell(namespace, job_id, 0)

    def drain(self) -> None:
        """End all streams with DRAINING once what is being claimed is on its way, and refuse new ones. Claims
        stay with their sessions."""
        self._draining = True
        for stream in self._streams.values():
            stream.finish(_draining())

    async def run(self) -> None:
        """Look after the streams until cancelled."""
        while True:
            await self._clock.sleep(self._config.look_s)
            self.look_once()

    def look_once(self) -> None:
        """End the streams whose session is over, or whose namespace has no live watch; pass commands on."""
        for namespace in {namespace for namespace, _ in self._streams}:
            looks = 0 if self._fresh(namespace) else self._stale.get(namespace, 0) + 1
            self._stale[namespace] = looks
        for (namespace, session_id), stream in self._streams.items():
            if self._stale[namespace] >= self._config.stale_looks:
                stream.end(_blind())
                continue
            session = self._holders.session(namespace, session_id)
            if session is not None:
                stream.session_known = True
                if session.command != stream.command:
                    stream.command = session.command
                    stream.outbox.put_answer(session.command)
            elif stream.session_known:
                stream.end(session_not_found(session_id))

    def _tell(self, namespace: str, job_id: str, look: int) -> None:
        claim = self._holders.claim(namespace, job_id)
        if claim is not None:
            stream = self._streams.get((namespace, claim.session))
            if stream is not None:
                stream.outbox.put_stop(StopAsked(job_id, claim.token))
        elif look < len(_LATER):
            loop = asyncio.get_running_loop()
            loop.call_later(_LATER[look], self._tell, namespace, job_id, look + 1)

    def _asked_of(self, namespace: str, claimed: Sequence[ClaimedJob]) -> Sequence[StopAsked]:
        """The requests to stop among claims that go out now: they came while the claim was on its way here,
        and may have found no stream, or overtaken it."""
        if not self._asked:
            return ()
        oldest = self._clock.monotonic() - self._config.remembered_s
        while self._asked and next(iter(self._asked.values())) < oldest:
            self._asked.popitem(last=False)
        return [
            StopAsked(one.stored.job.job_id, one.claim.token)
            for one in claimed
            if (namespace, one.stored.job.job_id) in self._asked
        ]

    def _admit(self, namespace: str) -> None:
        if self._draining:
            raise _draining()
        if self._open >= self._config.max_streams:
            raise RequestError(
                Reason.TOO_MANY_REQUESTS,
                f"there are {self._config.max_streams} streams of workers already",
                retry_after_ms=RETRY_MS,
            )
        if self._stale.get(namespace, 0) >= self._config.stale_looks and not self._fresh(namespace):
            raise _blind()

    async def _require_session(self, namespace: str, session_id: str) -> None:
        deadline = self._clock.monotonic() + self._config.call_s
        await self._feeds.ensure(namespace, deadline=deadline)
        if self._holders.session(namespace, session_id) is not None:
            return
        await require_session(self._sessions, namespace, session_id, deadline)


def _draining() -> RequestError:
    return RequestError(Reason.DRAINING, "this coordinator is stopping; open a stream at another")


def _replaced() -> RequestError:
    return RequestError(Reason.TOO_MANY_REQUESTS, "the session has opened a newer stream here")


def _blind() -> RequestError:
    return RequestError(Reason.ETCD_UNAVAILABLE, "this coordinator does not hear of new jobs; use another")
