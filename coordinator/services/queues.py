"""Queues as operators see them: read, list, set, pause and resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Protocol

from coordinator.core import queue_settings as rules
from coordinator.core.queue_settings import QueueSettings, QueueState
from coordinator.errors import Reason, RequestError, StorageError
from coordinator.ports import Clock, NamespaceFeeds, StoredQueue
from coordinator.services.page_cursor import page_cursor, position_in
from coordinator.services.shared_queues import QueueName, SharedQueues
from coordinator.services.storage_errors import refused
from coordinator.services.waiters import Pair

__all__ = ["NamedQueue", "QueuePage", "Queues", "QueuesIndex", "check_listed"]

_MARK_DIGITS: Final = 12


class QueuesIndex(Protocol):
    """Which (namespace, queue, type) ever had a job."""

    def windows(self) -> Iterable[Pair]:
        """All of them."""

    def ready(self, namespace: str) -> bool:
        """Whether the namespace is listed, and its watch alive."""


class _Namespaces(NamespaceFeeds, Protocol):
    @property
    def listed(self) -> bool:
        """Whether all namespaces are known, and each is listed."""


@dataclass(frozen=True, slots=True)
class NamedQueue:
    """A queue, and what stands for it."""

    queue: str
    stored: StoredQueue


@dataclass(frozen=True, slots=True)
class QueuePage:
    """Queues by name; an empty cursor ends the listing."""

    queues: tuple[NamedQueue, ...]
    cursor: str


class Queues:
    """GetQueue, ListQueues, UpdateQueue, PauseQueue, ResumeQueue.

    Args:
        shared: the records.
        index: which queues there are.
        namespaces: makes a namespace that is changed; one that is only looked at is not made.
        clock: when a pause begins.
    """

    def __init__(
        self, shared: SharedQueues, index: QueuesIndex, namespaces: _Namespaces, clock: Clock
    ) -> None:
        self._shared = shared
        self._index = index
        self._namespaces = namespaces
        self._clock = clock

    async def get(self, namespace: str, queue: str, deadline: float) -> NamedQueue:
        """What stands in the store; the defaults, if nobody has set anything.

        Raises:
            RequestError: ETCD_UNAVAILABLE.
        """
        try:
            return NamedQueue(queue, await self._shared.read((namespace, queue), deadline))
        except StorageError as error:
            raise refused(error, {"queue": queue}) from error

    def list(self, namespace: str, page_size: int, cursor: str) -> QueuePage:
        """The next page of queues that ever had a job or a record, as this coordinator knows them.

        Raises:
            RequestError: VALIDATION_FAILED (a cursor of another namespace), NOT_READY.
        """
        after = position_in(cursor, _mark(namespace))
        with_jobs = {queue for where, queue, _ in self._index.windows() if where == namespace}
        check_listed(namespace, self._namespaces.listed, not with_jobs or self._index.ready(namespace))
        names = sorted(name for name in {*with_jobs, *self._shared.names(namespace)} if name > after)
        page = tuple(NamedQueue(name, self._shared.known((namespace, name))) for name in names[:page_size])
        return QueuePage(
            page, page_cursor(_mark(namespace), names[page_size - 1]) if len(names) > page_size else ""
        )

    async def update(
        self,
        namespace: str,
        queue: str,
        settings: QueueSettings,
        *,
        etag: str,
        digest: bytes,
        deadline: float,
    ) -> NamedQueue:
        """Replace the settings.

        Args:
            namespace, queue: which.
            settings: checked for form and for contradictions.
            etag: of the record as the caller read it; empty: whatever it is now.
            digest: of the request; empty: it has no id, and a repeat of it is not known as one.
            deadline: for all of it.

        Raises:
            RequestError: ETAG_MISMATCH; ETCD_UNAVAILABLE, OUTCOME_UNKNOWN, TOO_MANY_REQUESTS, NOT_READY.
        """

        def updated(stands: StoredQueue) -> QueueState:
            if digest and stands.state.request_digest == digest and stands.state.settings == settings:
                return stands.state  # our own first try
            if etag and etag != str(stands.revision):
                raise RequestError(
                    Reason.ETAG_MISMATCH,
                    "the queue was changed since it was read",
                    metadata={"queue": queue, "etag": str(stands.revision)},
                    retry_after_ms=0,
                )
            return rules.with_settings(stands.state, settings, digest)

        return await self._change((namespace, queue), updated, deadline)

    async def pause(
        self, namespace: str, queue: str, *, reason: str, digest: bytes, deadline: float
    ) -> NamedQueue:
        """Let nothing more be claimed from it; a paused queue stays as it is, with its first reason.

        Raises:
            RequestError: ETCD_UNAVAILABLE, OUTCOME_UNKNOWN, TOO_MANY_REQUESTS, NOT_READY.
        """
        now_ms = self._clock.now_ms()
        return await self._change(
            (namespace, queue), lambda stands: rules.paused(stands.state, reason, now_ms, digest), deadline
        )

    async def resume(self, namespace: str, queue: str, *, digest: bytes, deadline: float) -> NamedQueue:
        """Take a pause back; a queue that is not paused stays as it is.

        Raises:
            RequestError: ETCD_UNAVAILABLE, OUTCOME_UNKNOWN, TOO_MANY_REQUESTS, NOT_READY.
        """
        return await self._change(
            (namespace, queue), lambda stands: rules.resumed(stands.state, digest), deadline
        )

    async def _change(
        self, name: QueueName, make: Callable[[StoredQueue], QueueState], deadline: float
    ) -> NamedQueue:
        try:
            await self._namespaces.ensure(name[0], deadline=deadline)
            return NamedQueue(name[1], await self._shared.change(name, make, deadline))
        except StorageError as error:
            raise refused(error, {"queue": name[1]}) from error


def check_listed(namespace: str, all_listed: bool, ready: bool) -> None:
    """What is answered from memory needs a memory that is complete and alive.

    Raises:
        RequestError: NOT_READY.
    """
    if not (all_listed and ready):
        raise RequestError(
            Reason.NOT_READY,
            f"namespace {namespace} is being listed",
            metadata={"namespace": namespace},
            retry_after_ms=200,
        )


def _mark(namespace: str) -> str:
    return sha256(b"queues " + namespace.encode()).hexdigest()[:_MARK_DIGITS]
