"""Backoff: how long a failed job waits. Pure; the random number comes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coordinator.core.copying import quick

__all__ = ["MAX_DELAY_MS", "RetryPolicy", "delay_ms"]

MAX_DELAY_MS: Final = 30 * 24 * 3_600_000
"""No delay is longer than 30 days, whatever a policy or a caller says."""

_MAX_STEPS: Final = 100_000
"""Bounds the loop below; a policy that has not met its cap by then stops growing."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When and how often a failed job runs again. Spans are milliseconds.

    ``max_retries`` counts charged failures, ``max_lease_losses`` counts holders that died; the two never mix.
    """

    max_retries: int = 5
    initial_ms: int = 1_000
    multiplier: float = 2.0
    cap_ms: int = 300_000
    jitter: float = 0.2
    non_retryable_types: tuple[str, ...] = ()
    max_lease_losses: int = 3


def delay_ms(policy: RetryPolicy, failures: int, jitter_number: float) -> int:
    """Milliseconds to wait after the ``failures``-th charged failure (1, 2, …).

    Grows by ``multiplier`` from ``initial_ms`` to ``cap_ms``, then moves by up to ± ``jitter``/2 of itself,
    never above the cap and never below 1 ms. Multiplies step by step and stops at the cap, so no exponent can
    overflow.

    Args:
        policy: the job's policy.
        failures: charged failures so far, at least 1.
        jitter_number: uniform in [0, 1).
    """
    cap = max(1, min(policy.cap_ms, MAX_DELAY_MS))
    base = float(max(1, min(policy.initial_ms, cap)))
    if policy.multiplier > 1.0:
        for _ in range(min(max(failures, 1) - 1, _MAX_STEPS)):
            base *= policy.multiplier
            if base >= cap:
                break
    base = min(base, float(cap))
    spread = base * max(0.0, min(policy.jitter, 1.0))
    return max(1, min(cap, round(base + spread * (jitter_number - 0.5))))
