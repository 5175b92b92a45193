"""QueueService: validate, convert, call the use case, convert back. No rule of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.core.circuit import Circuit, Counts
from coordinator.rpc.convert import cut_text, namespace_of, timestamp
from coordinator.rpc.field_checks import Violations, check_name
from coordinator.rpc.validation import check_request_id
from coordinator.services.queue_stats import TypeStats
from leasekeeper.v1 import queue_service_pb2 as pb

__all__ = ["CircuitsPort", "QueueServicer", "QueueUseCases", "StatsPort"]

_NOTHING_COUNTED = Counts()


class StatsPort(Protocol):
    """What GetQueueStats needs."""

    def of_queue(self, namespace: str, queue: str) -> Sequence[TypeStats]:
        """What is known of each type."""


class CircuitsPort(Protocol):
    """What ResetCircuit needs."""

    async def reset(self, pair: tuple[str, str, str], deadline: float) -> Circuit:
        """Close it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueUseCases:
    """The use cases behind QueueService."""

    stats: StatsPort
    circuits: CircuitsPort


class QueueServicer:
    """The methods of ``leasekeeper.v1.QueueService``; request and absolute deadline in, response out."""

    def __init__(self, use_cases: QueueUseCases) -> None:
        self._stats = use_cases.stats
        self._circuits = use_cases.circuits

    async def get_queue_stats(
        self, request: pb.GetQueueStatsRequest, deadline: float
    ) -> pb.GetQueueStatsResponse:
        """GetQueueStats."""
        found = Violations()
        check_name(found, "namespace", request.namespace, required=False)
        check_name(found, "queue", request.queue)
        found.check()
        types = self._stats.of_queue(namespace_of(request.namespace), request.queue)
        return pb.GetQueueStatsResponse(types=[_stats(request.queue, one) for one in types])

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
            circuit=_circuit(request.queue, request.type, circuit, _NOTHING_COUNTED)
        )


def _stats(queue: str, one: TypeStats) -> pb.TypeStats:
    return pb.TypeStats(
        type=one.type,
        pending=one.pending,
        running=one.running,
        circuit=_circuit(queue, one.type, one.circuit, one.counts),
    )


def _circuit(queue: str, type_: str, circuit: Circuit, counts: Counts) -> pb.Circuit:
    return pb.Circuit(
        queue=queue,
        type=type_,
        state=pb.CircuitState.ValueType(circuit.state.value),
        since=timestamp(circuit.since_ms),
        probe_time=timestamp(circuit.probe_ms),
        reason=cut_text(circuit.reason),
        attempts=counts.attempts,
        failures=counts.failures,
        lease_losses=counts.lease_losses,
    )
