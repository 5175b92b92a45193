"""QueueService: validate, convert, call the use case, convert back. No rule of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coordinator.core.circuit import Circuit, Counts
from coordinator.core.queue_settings import QueueSettings
from coordinator.rpc import limits
from coordinator.rpc.convert import cut_text, namespace_of
from coordinator.rpc.field_checks import Violations, check_name
from coordinator.rpc.queue_convert import circuit_message, queue_message, queue_settings, stats_response
from coordinator.rpc.queue_validation import (
    check_list_queues,
    check_named_queue,
    check_pause,
    check_resume,
    check_update_queue,
)
from coordinator.rpc.validation import check_request_id
from coordinator.services.digests import request_digest
from coordinator.services.queue_stats import QueueFigures
from coordinator.services.queues import NamedQueue, QueuePage
from leasekeeper.v1 import queue_service_pb2 as pb

__all__ = ["CircuitsPort", "QueueServicer", "QueueUseCases", "QueuesPort", "StatsPort"]

_NOTHING_COUNTED = Counts()


class StatsPort(Protocol):
    """What GetQueueStats needs."""

    def figures(self, namespace: str, queue: str) -> QueueFigures:
        """What is known of the queue."""


class CircuitsPort(Protocol):
    """What ResetCircuit needs."""

    async def reset(self, pair: tuple[str, str, str], deadline: float) -> Circuit:
        """Close it."""


class QueuesPort(Protocol):
    """What all other methods need."""

    async def get(self, namespace: str, queue: str, deadline: float) -> NamedQueue:
        """What stands."""

    def list(self, namespace: str, page_size: int, cursor: str) -> QueuePage:
        """A page of queues."""

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
        """Replace the settings."""

    async def pause(
        self, namespace: str, queue: str, *, reason: str, digest: bytes, deadline: float
    ) -> NamedQueue:
        """Let nothing more be claimed."""

    async def resume(self, namespace: str, queue: str, *, digest: bytes, deadline: float) -> NamedQueue:
        """Take a pause back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueUseCases:
    """The use cases behind QueueService."""

    stats: StatsPort
    circuits: CircuitsPort
    queues: QueuesPort


class QueueServicer:
    """The methods of ``leasekeeper.v1.QueueService``; request and absolute deadline in, response out."""

    def __init__(self, use_cases: QueueUseCases) -> None:
        self._stats = use_cases.stats
        self._circuits = use_cases.circuits
        self._queues = use_cases.queues

    async def get_queue_stats(
        self, request: pb.GetQueueStatsRequest, deadline: float
    ) -> pb.GetQueueStatsResponse:
        """GetQueueStats."""
        check_named_queue(request)
        figures = self._stats.figures(namespace_of(request.namespace), request.queue)
        return stats_response(request.queue, figures)

    async def get_queue(self, request: pb.GetQueueRequest, deadline: float) -> pb.GetQueueResponse:
        """GetQueue."""
        check_named_queue(request)
        found = await self._queues.get(namespace_of(request.namespace), request.queue, deadline)
        return pb.GetQueueResponse(queue=queue_message(found))

    async def list_queues(self, request: pb.ListQueuesRequest, deadline: float) -> pb.ListQueuesResponse:
        """ListQueues."""
        check_list_queues(request)
        page = self._queues.list(
            namespace_of(request.namespace),
            request.page_size or limits.DEFAULT_PAGE_SIZE,
            request.page_token,
        )
        return pb.ListQueuesResponse(queues=map(queue_message, page.queues), next_page_token=page.cursor)

    async def update_queue(self, request: pb.UpdateQueueRequest, deadline: float) -> pb.UpdateQueueResponse:
        """UpdateQueue."""
        check_update_queue(request)
        updated = await self._queues.update(
            namespace_of(request.namespace),
            request.queue,
            queue_settings(request.settings),
            etag=request.etag,
            digest=_digest(request.request_id),
            deadline=deadline,
        )
        return pb.UpdateQueueResponse(queue=queue_message(updated))

    async def pause_queue(self, request: pb.PauseQueueRequest, deadline: float) -> pb.PauseQueueResponse:
        """PauseQueue."""
        check_pause(request)
        paused = await self._queues.pause(
            namespace_of(request.namespace),
            request.queue,
            reason=cut_text(request.reason),
            digest=_digest(request.request_id),
            deadline=deadline,
        )
        return pb.PauseQueueResponse(queue=queue_message(paused))

    async def resume_queue(self, request: pb.ResumeQueueRequest, deadline: float) -> pb.ResumeQueueResponse:
        """ResumeQueue."""
        check_resume(request)
        resumed = await self._queues.resume(
            namespace_of(request.namespace),
            request.queue,
            digest=_digest(request.request_id),
            deadline=deadline,
        )
        return pb.ResumeQueueResponse(queue=queue_message(resumed))

    async def reset_circuit(
        self, request: pb.ResetCircuitRequest, deadline: float
    ) -> pb.ResetCircuitResponse:
        """ResetCircuit."""
        found = Violations()
        check_name(found, "namespace", request.namespace, required=False)
        check_name(found, "queue", request.queue)
        check_name(found, "type", request.type)
        check_request_id(found, request.request_id)
        found.check()
        pair = (namespace_of(request.namespace), request.queue, request.type)
        circuit = await self._circuits.reset(pair, deadline)
        return pb.ResetCircuitResponse(
            circuit=circuit_message(request.queue, request.type, circuit, _NOTHING_COUNTED)
        )


def _digest(request_id: str) -> bytes:
    """Empty for none, so that two calls without an id are not taken for repeats."""
    return request_digest(request_id) if request_id else b""
