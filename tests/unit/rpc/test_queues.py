"""QueueService: its form, what reaches the use cases, and what is told of a circuit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.core.circuit import CLOSED, Circuit, CircuitState, Counts
from coordinator.errors import Reason, RequestError
from coordinator.rpc.auth import Scope
from coordinator.rpc.methods import METHODS
from coordinator.rpc.queue_servicer import QueueServicer, QueueUseCases
from coordinator.services.queue_stats import TypeStats
from leasekeeper.v1 import queue_service_pb2 as pb

OPEN = Circuit(
    state=CircuitState.OPEN,
    since_ms=1_700_000_000_000,
    probe_ms=1_700_000_005_500,
    openings=1,
    reason="4 of 4 attempts failed",
)


class Asked:
    """Both use cases: it notes what it is asked."""

    def __init__(self, *stats: TypeStats) -> None:
        self.stats = stats
        self.asked: list[object] = []

    def of_queue(self, namespace: str, queue: str) -> Sequence[TypeStats]:
        self.asked.append((namespace, queue))
        return self.stats

    async def reset(self, pair: tuple[str, str, str], deadline: float) -> Circuit:
        self.asked.append((pair, deadline))
        return CLOSED


def servicer(use: Asked) -> QueueServicer:
    return QueueServicer(QueueUseCases(stats=use, circuits=use))


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("queue", pb.GetQueueStatsRequest()),
        ("namespace", pb.GetQueueStatsRequest(namespace="A", queue="q")),
        ("queue", pb.ResetCircuitRequest(queue="a b", type="t")),
        ("type", pb.ResetCircuitRequest(queue="q")),
        ("request_id", pb.ResetCircuitRequest(queue="q", type="t", request_id="r" * 129)),
    ],
)
async def test_a_bad_field_is_named_and_nothing_is_done(field: str, request_: Any) -> None:
    use = Asked()
    call = servicer(use).reset_circuit
    if isinstance(request_, pb.GetQueueStatsRequest):
        call = servicer(use).get_queue_stats  # type: ignore[assignment]
    with pytest.raises(RequestError) as caught:
        await call(request_, 77.0)
    assert caught.value.reason is Reason.VALIDATION_FAILED
    assert [field] == [violation.field for violation in caught.value.fields]
    assert use.asked == []


async def test_each_type_is_told_with_its_circuit_and_what_is_counted() -> None:
    counts = Counts(attempts=9, successes=2, failures=4, lease_losses=3, lost_sessions=1)
    use = Asked(
        TypeStats(type="bad", pending=7, running=1, circuit=OPEN, counts=Counts()),
        TypeStats(type="good", pending=0, running=2, circuit=CLOSED, counts=counts),
    )
    answer = await servicer(use).get_queue_stats(pb.GetQueueStatsRequest(queue="q"), 77.0)

    assert use.asked == [("default", "q")]
    bad, good = answer.types
    assert (bad.type, bad.pending, bad.running) == ("bad", 7, 1)
    assert bad.circuit.state == pb.CIRCUIT_STATE_OPEN
    assert (bad.circuit.queue, bad.circuit.type, bad.circuit.reason) == ("q", "bad", "4 of 4 attempts failed")
    assert bad.circuit.since.ToMilliseconds() == 1_700_000_000_000
    assert bad.circuit.probe_time.ToMilliseconds() == 1_700_000_005_500
    assert good.circuit.state == pb.CIRCUIT_STATE_CLOSED
    assert (good.circuit.attempts, good.circuit.failures, good.circuit.lease_losses) == (9, 4, 3)
    assert not good.circuit.HasField("since")


async def test_a_reset_names_the_circuit_that_is_closed_then() -> None:
    use = Asked()
    answer = await servicer(use).reset_circuit(
        pb.ResetCircuitRequest(namespace="n", queue="q", type="t", request_id="r1"), 77.0
    )
    assert use.asked == [(("n", "q", "t"), 77.0)]
    assert (answer.circuit.queue, answer.circuit.type) == ("q", "t")
    assert answer.circuit.state == pb.CIRCUIT_STATE_CLOSED


def test_looking_takes_the_scope_of_readers_and_resetting_that_of_operators() -> None:
    assert METHODS["GetQueueStats"].scope is Scope.READ
    assert METHODS["ResetCircuit"].scope is Scope.ADMIN
