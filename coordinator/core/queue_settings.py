"""What is set for a queue, whether it is paused, and which settings contradict each other. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from coordinator.core.rank import TARGET_WAIT_MS
from coordinator.core.retry import RetryPolicy

__all__ = [
    "UNSET",
    "Contradiction",
    "QueueSettings",
    "QueueState",
    "contradictions",
    "paused",
    "resumed",
    "with_settings",
]

_PRIORITIES: Final = len(TARGET_WAIT_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """What jobs of a queue take at their submission where they leave it out. Spans are milliseconds, 0 is
    none.

    ``target_wait_ms``: of priorities 1 to 5; empty: ``rank.TARGET_WAIT_MS``. ``retry``: for a job without any
    policy of its own; None: the default policy.
    """

    target_wait_ms: tuple[int, ...] = ()
    retry: RetryPolicy | None = None
    queue_timeout_ms: int = 0
    run_timeout_ms: int = 0
    total_timeout_ms: int = 0
    heartbeat_timeout_ms: int = 0


_DEFAULTS: Final = QueueSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """All that is stored of a queue.

    ``pause_ms``: since when it is paused, Unix milliseconds. ``request_digest``: of the call that wrote it;
    empty if that call had no request id.
    """

    settings: QueueSettings = _DEFAULTS
    paused: bool = False
    pause_reason: str = ""
    pause_ms: int = 0
    request_digest: bytes = b""


UNSET: Final = QueueState()
"""A queue that nobody has touched."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two settings that cannot both hold. ``field`` is the one to blame first; ``text`` names both values."""

    field: str
    text: str


def with_settings(state: QueueState, settings: QueueSettings, digest: bytes) -> QueueState:
    """``state`` with its settings replaced; a pause stays."""
    return replace(state, settings=settings, request_digest=digest)


def paused(state: QueueState, reason: str, now_ms: int, digest: bytes) -> QueueState:
    """``state``, paused since ``now_ms``; one that is paused already is the same object."""
    if state.paused:
        return state
    return replace(state, paused=True, pause_reason=reason, pause_ms=now_ms, request_digest=digest)


def resumed(state: QueueState, digest: bytes) -> QueueState:
    """``state`` without its pause; one that is not paused is the same object."""
    if not state.paused:
        return state
    return replace(state, paused=False, pause_reason="", pause_ms=0, request_digest=digest)


def contradictions(settings: QueueSettings) -> tuple[Contradiction, ...]:
    """Every pair of settings that contradict each other, with both values.

    Ranges of single settings are checked before, where the request is read.
    """
    return (*_waits(settings.target_wait_ms), *_timeouts(settings), *_delays(settings.retry))


def _waits(waits: tuple[int, ...]) -> Iterator[Contradiction]:
    if waits and len(waits) != _PRIORITIES:
        yield Contradiction(
            "target_waits", f"has {len(waits)} items; there are {_PRIORITIES} priorities, each needs its own"
        )
        return
    for place in range(1, len(waits)):
        if waits[place] < waits[place - 1]:
            yield Contradiction(
                f"target_waits[{place}]",
                f"priority {place + 1} would wait {_shown(waits[place])} and priority {place}, which comes "
                f"before it, {_shown(waits[place - 1])}",
            )


def _timeouts(settings: QueueSettings) -> Iterator[Contradiction]:
    spans = {
        "queue_timeout": settings.queue_timeout_ms,
        "run_timeout": settings.run_timeout_ms,
        "total_timeout": settings.total_timeout_ms,
        "heartbeat_timeout": settings.heartbeat_timeout_ms,
    }
    for smaller, larger in (
        ("queue_timeout", "total_timeout"),
        ("run_timeout", "total_timeout"),
        ("heartbeat_timeout", "run_timeout"),
        ("heartbeat_timeout", "total_timeout"),
    ):
        if spans[larger] and spans[smaller] > spans[larger]:
            yield Contradiction(
                smaller, f"is {_shown(spans[smaller])}, longer than {larger}, {_shown(spans[larger])}"
            )


def _delays(retry: RetryPolicy | None) -> Iterator[Contradiction]:
    if retry is not None and retry.initial_ms > retry.cap_ms:
        yield Contradiction(
            "retry_policy.initial_delay",
            f"is {_shown(retry.initial_ms)}, longer than max_delay, {_shown(retry.cap_ms)}",
        )


def _shown(ms: int) -> str:
    return f"{ms / 1000:.15g} s"
