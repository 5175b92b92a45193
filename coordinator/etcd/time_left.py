"""Turn the absolute deadlines of the ports into timeouts."""

from __future__ import annotations

from coordinator.errors import DeadlinePassed, EtcdUnavailable
from coordinator.ports import Clock

__all__ = ["read_timeout", "write_timeout"]


def read_timeout(clock: Clock, deadline: float) -> float:
    """Seconds left for a read.

    Raises:
        EtcdUnavailable: none.
    """
    left = deadline - clock.monotonic()
    if left <= 0:
        raise EtcdUnavailable("the deadline passed before the store was asked")
    return left


def write_timeout(clock: Clock, deadline: float) -> float:
    """Seconds left for a write.

    Raises:
        DeadlinePassed: none.
    """
    left = deadline - clock.monotonic()
    if left <= 0:
        raise DeadlinePassed("the deadline passed before anything was sent")
    return left
