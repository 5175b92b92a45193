"""The order in which waiting jobs are handed out: by virtual deadline.

Every job is due at the earlier of its own ``due_time`` and its ready time plus the target wait of its
priority, so each job ages and none starves. The shape is that of earliest-deadline-first (Liu and Layland,
1973) with deadlines that the service makes up itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["DEFAULT_PRIORITY", "TARGET_WAIT_MS", "Rank", "rank"]

DEFAULT_PRIORITY: Final = 3

TARGET_WAIT_MS: Final[tuple[int, ...]] = (1_000, 10_000, 60_000, 600_000, 3_600_000)
"""Target wait of priorities 1 to 5, milliseconds, where the queue says nothing else."""


class Rank(NamedTuple):
    """Position in a queue.

    ``ms`` is the virtual deadline (Unix milliseconds), ``counter`` breaks ties in order of submission.
    """

    ms: int
    counter: int


def rank(
    *,
    ready_ms: int,
    submit_ms: int,
    due_ms: int,
    priority: int,
    counter: int,
    target_wait_ms: Sequence[int] = (),
) -> Rank:
    """The rank of a job that is or becomes claimable at ``ready_ms``.

    Args:
        ready_ms: when it becomes claimable, Unix milliseconds.
        submit_ms: when it was submitted; the rank is not below it, so that a due time in the past gains
            nothing.
        due_ms: its SLA, 0 for none.
        priority: 1 to 5.
        counter: order of submission.
        target_wait_ms: of the priorities, as the queue sets them; empty: ``TARGET_WAIT_MS``.
    """
    ms = ready_ms + (target_wait_ms or TARGET_WAIT_MS)[priority - 1]
    if due_ms:
        ms = min(ms, due_ms)
    return Rank(max(ms, submit_ms), counter)
