"""QueueService: its form, what reaches the use cases, and what is told of a circuit."""

from __future__ import annotations

import re
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.core.circuit import CLOSED, Circuit, CircuitState, Counts
from coordinator.core.queue_settings import QueueSettings, QueueState
from coordinator.core.retry import RetryPolicy
from coordinator.errors import Reason, RequestError
from coordinator.ports import StoredQueue
from coordinator.rpc.auth import Scope
from coordinator.rpc.methods import METHODS
from coordinator.rpc.queue_servicer import QueueServicer, QueueUseCases
from coordinator.services.digests import request_digest
from coordinator.services.line_rates import Rates
from coordinator.services.queue_stats import PriorityFigures, QueueFigures, TypeStats
from coordinator.services.queues import NamedQueue, QueuePage
from leasekeeper.v1 import queue_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types

OPEN = Circuit(
    state=CircuitState.OPEN,
    since_ms=1_700_000_000_000,
    probe_ms=1_700_000_005_500,
    openings=1,
    reason="4 of 4 attempts failed",
)


SETTINGS = QueueSettings(
    target_wait_ms=(1, 2, 3, 4, 5), retry=RetryPolicy(max_retries=0, multiplier=1.0), total_timeout_ms=1_500
)
STORED = NamedQueue(
    "q",
    StoredQueue(
        QueueState(settings=SETTINGS, paused=True, pause_reason="stocktaking", pause_ms=1_700_000_000_000), 7
    ),
)


class Asked:
    """All use cases: it notes what it is asked."""

    def __init__(self, *stats: TypeStats) -> None:
        self.stats = stats
        self.asked: list[object] = []

    def figures(self, namespace: str, queue: str) -> QueueFigures:
        self.asked.append((namespace, queue))
        return QueueFigures(
            types=self.stats,
            paused=True,
            oldest_ms=2_500,
            priorities=[PriorityFigures(priority=2, pending=4, oldest_ms=2_500)],
            all_at_hand=True,
            rates=Rates(1.5, 0.5),
        )

    async def get(self, namespace: str, queue: str, deadline: float) -> NamedQueue:
        self.asked.append((namespace, queue, deadline))
        return STORED

    def list(self, namespace: str, page_size: int, cursor: str) -> QueuePage:
        self.asked.append((namespace, page_size, cursor))
        return QueuePage((STORED,), "next")

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
        self.asked.append((namespace, queue, settings, etag, digest))
        return STORED

    async def pause(
        self, namespace: str, queue: str, *, reason: str, digest: bytes, deadline: float
    ) -> NamedQueue:
        self.asked.append((namespace, queue, reason, digest))
        return STORED

    async def resume(self, namespace: str, queue: str, *, digest: bytes, deadline: float) -> NamedQueue:
        self.asked.append((namespace, queue, digest))
        return STORED

    async def reset(self, pair: tuple[str, str, str], deadline: float) -> Circuit:
        self.asked.append((pair, deadline))
        return CLOSED


def servicer(use: Asked) -> QueueServicer:
    return QueueServicer(QueueUseCases(stats=use, circuits=use, queues=use))


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("queue", pb.GetQueueStatsRequest()),
        ("namespace", pb.GetQueueStatsRequest(namespace="A", queue="q")),
        ("queue", pb.ResetCircuitRequest(queue="a b", type="t")),
        ("type", pb.ResetCircuitRequest(queue="q")),
        ("request_id", pb.ResetCircuitRequest(queue="q", type="t", request_id="r" * 129)),
        ("queue", pb.GetQueueRequest()),
        ("page_size", pb.ListQueuesRequest(page_size=1_001)),
        ("namespace", pb.ListQueuesRequest(namespace="A")),
        ("queue", pb.PauseQueueRequest(queue="Q")),
        ("request_id", pb.ResumeQueueRequest(queue="q", request_id="a\n")),
        ("settings", pb.UpdateQueueRequest(queue="q")),
    ],
)
async def test_a_bad_field_is_named_and_nothing_is_done(field: str, request_: Any) -> None:
    use = Asked()
    method = type(request_).__name__.removesuffix("Request")
    call = getattr(servicer(use), re.sub("(?<=[a-z])(?=[A-Z])", "_", method).lower())
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


def settings_of(**fields: Any) -> pb.QueueSettings:
    """Numbers are seconds."""
    retry = fields.pop("retry", None)
    waits = [Duration(seconds=seconds) for seconds in fields.pop("waits", ())]
    spans = {name: Duration(seconds=seconds) for name, seconds in fields.items()}
    return pb.QueueSettings(target_waits=waits, retry_policy=retry, **spans)


@pytest.mark.parametrize(
    ("settings", "field", "values"),
    [
        (settings_of(waits=(1, 2, 3, 4)), "target_waits", ("5", "4")),
        (settings_of(waits=(1, 2, 3, 2, 5)), "target_waits[3]", ("2 s", "3 s")),
        (settings_of(waits=(0, 2, 3, 4, 5)), "target_waits[0]", ("more than 0",)),
        (settings_of(queue_timeout=61, total_timeout=60), "queue_timeout", ("61 s", "60 s")),
        (settings_of(run_timeout=61, total_timeout=60), "run_timeout", ("61 s", "60 s")),
        (settings_of(heartbeat_timeout=61, run_timeout=60), "heartbeat_timeout", ("61 s", "60 s")),
        (settings_of(heartbeat_timeout=61, total_timeout=60), "heartbeat_timeout", ("61 s", "60 s")),
        (settings_of(run_timeout=0), "run_timeout", ("more than 0", "is 0 s")),
        (
            settings_of(retry=types.RetryPolicy(initial_delay=Duration(seconds=301))),
            "retry_policy.initial_delay",
            ("301 s", "300 s"),
        ),
        (settings_of(retry=types.RetryPolicy(jitter=1.5)), "retry_policy.jitter", ("1.5",)),
    ],
)
async def test_a_setting_that_cannot_hold_is_named_with_the_values(
    settings: pb.QueueSettings, field: str, values: tuple[str, ...]
) -> None:
    use = Asked()
    with pytest.raises(RequestError) as caught:
        await servicer(use).update_queue(pb.UpdateQueueRequest(queue="q", settings=settings), 77.0)
    assert caught.value.reason is Reason.VALIDATION_FAILED
    [violation] = caught.value.fields
    assert violation.field == f"settings.{field}"
    for value in values:
        assert value in violation.description
    assert use.asked == []


async def test_settings_come_back_as_they_were_sent() -> None:
    use = Asked()
    answer = await servicer(use).get_queue(pb.GetQueueRequest(queue="q"), 77.0)
    assert (answer.queue.queue, answer.queue.etag, answer.queue.paused) == ("q", "7", True)
    assert answer.queue.pause_reason == "stocktaking"
    assert answer.queue.pause_time.ToMilliseconds() == 1_700_000_000_000
    assert not answer.queue.settings.HasField("run_timeout")
    await servicer(use).update_queue(
        pb.UpdateQueueRequest(queue="q", settings=answer.queue.settings, etag=answer.queue.etag), 77.0
    )
    assert use.asked[-1] == ("default", "q", SETTINGS, "7", b"")


async def test_pauses_and_lists_reach_the_use_cases() -> None:
    use = Asked()
    asked = servicer(use)
    await asked.pause_queue(pb.PauseQueueRequest(queue="q", reason="x" * 600, request_id="r"), 77.0)
    await asked.resume_queue(pb.ResumeQueueRequest(queue="q", request_id="r"), 77.0)
    answer = await asked.list_queues(pb.ListQueuesRequest(page_token="t"), 77.0)
    digest = request_digest("r")
    assert use.asked == [
        ("default", "q", "x" * 512, digest),
        ("default", "q", digest),
        ("default", 100, "t"),
    ]
    assert [queue.queue for queue in answer.queues] == ["q"]
    assert answer.next_page_token == "next"


async def test_a_queue_is_told_as_a_whole_too() -> None:
    use = Asked(TypeStats(type="t", pending=7, running=1, circuit=OPEN, counts=Counts()))
    answer = await servicer(use).get_queue_stats(pb.GetQueueStatsRequest(queue="q"), 77.0)
    assert (answer.paused, answer.pending, answer.running, answer.all_at_hand) == (True, 7, 1, True)
    assert answer.oldest_age.ToMilliseconds() == 2_500
    [second] = answer.priorities
    assert (second.priority, second.pending, second.oldest_age.ToMilliseconds()) == (2, 4, 2_500)
    assert (answer.add_rate, answer.dispatch_rate) == (1.5, 0.5)


def test_looking_takes_the_scope_of_readers_and_resetting_that_of_operators() -> None:
    assert METHODS["GetQueueStats"].scope is Scope.READ
    assert METHODS["ResetCircuit"].scope is Scope.ADMIN
