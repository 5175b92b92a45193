"""Between the published messages of queues and the values of the services; total, for input is validated."""

from __future__ import annotations

from coordinator.core.circuit import Circuit, Counts
from coordinator.core.queue_settings import QueueSettings
from coordinator.core.retry import RetryPolicy
from coordinator.rpc.convert import cut_text, duration, etag, optional_ms, retry_policy, timestamp
from coordinator.rpc.field_checks import duration_ms
from coordinator.services.queue_stats import QueueFigures, TypeStats
from coordinator.services.queues import NamedQueue
from leasekeeper.v1 import queue_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types

__all__ = ["circuit_message", "queue_message", "queue_settings", "stats_response"]


def queue_settings(message: pb.QueueSettings) -> QueueSettings:
    """What is to be set."""
    has = message.HasField
    return QueueSettings(
        target_wait_ms=tuple(map(duration_ms, message.target_waits)),
        retry=retry_policy(message.retry_policy) if has("retry_policy") else None,
        queue_timeout_ms=optional_ms(message.queue_timeout, has("queue_timeout")),
        run_timeout_ms=optional_ms(message.run_timeout, has("run_timeout")),
        total_timeout_ms=optional_ms(message.total_timeout, has("total_timeout")),
        heartbeat_timeout_ms=optional_ms(message.heartbeat_timeout, has("heartbeat_timeout")),
    )


def queue_message(named: NamedQueue) -> pb.Queue:
    """A queue with its settings, its pause and its tag."""
    state = named.stored.state
    return pb.Queue(
        queue=named.queue,
        settings=_settings(state.settings),
        paused=state.paused,
        pause_reason=cut_text(state.pause_reason),
        pause_time=timestamp(state.pause_ms),
        etag=etag(named.stored.revision),
    )


def _settings(settings: QueueSettings) -> pb.QueueSettings:
    message = pb.QueueSettings(target_waits=map(duration, settings.target_wait_ms))
    if settings.retry is not None:
        message.retry_policy.CopyFrom(_retry(settings.retry))
    for name in ("queue_timeout", "run_timeout", "total_timeout", "heartbeat_timeout"):
        ms = getattr(settings, f"{name}_ms")
        if ms:
            getattr(message, name).CopyFrom(duration(ms))
    return message


def _retry(policy: RetryPolicy) -> types.RetryPolicy:
    return types.RetryPolicy(
        max_retries=policy.max_retries,
        initial_delay=duration(policy.initial_ms),
        multiplier=policy.multiplier,
        max_delay=duration(policy.cap_ms),
        jitter=policy.jitter,
        non_retryable_types=policy.non_retryable_types,
        max_lease_losses=policy.max_lease_losses,
    )


def stats_response(queue: str, figures: QueueFigures) -> pb.GetQueueStatsResponse:
    """GetQueueStats's answer."""
    return pb.GetQueueStatsResponse(
        types=[_type_stats(queue, one) for one in figures.types],
        paused=figures.paused,
        pending=figures.pending,
        running=figures.running,
        oldest_age=duration(figures.oldest_ms) if figures.oldest_ms is not None else None,
        priorities=[
            pb.PriorityStats(priority=one.priority, pending=one.pending, oldest_age=duration(one.oldest_ms))
            for one in figures.priorities
        ],
        all_at_hand=figures.all_at_hand,
        add_rate=figures.rates.came,
        dispatch_rate=figures.rates.left,
    )


def _type_stats(queue: str, one: TypeStats) -> pb.TypeStats:
    return pb.TypeStats(
        type=one.type,
        pending=one.pending,
        running=one.running,
        circuit=circuit_message(queue, one.type, one.circuit, one.counts),
    )


def circuit_message(queue: str, type_: str, circuit: Circuit, counts: Counts) -> pb.Circuit:
    """A circuit, and what is counted for it."""
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
