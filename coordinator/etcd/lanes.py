"""Keep operations on one lane in order and never two of them under way at once.

A lane is a name that only one operation may hold: a job id, a unique key, a lock name that the operation
adds to. etcd evaluates every compare of a Txn against the state before it, so two operations on one key in
one Txn would both win; and two Txns in flight may be applied in either order. An operation therefore takes
all its lanes when it enters, in the order of entering, and is free to go once it stands first in each.
Because everybody queues in all its lanes at the same instant, two operations can never wait for each other.

Cost: one dict look-up per lane on entering and one on leaving; nothing is ever scanned.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

__all__ = ["LaneTable", "LaneUser"]


class LaneUser(Protocol):
    """What stands in lanes. ``lane_names`` holds no name twice and does not change meanwhile."""

    @property
    def lane_names(self) -> tuple[bytes, ...]: ...

    blocked_by: int
    """In how many of its lanes somebody stands before it; written by the table alone."""


U = TypeVar("U", bound=LaneUser)


class LaneTable(Generic[U]):
    """Who stands in which lane. Not safe for threads: one event loop owns it."""

    __slots__ = ("_lanes",)

    def __init__(self) -> None:
        # One user alone in a lane, by far the usual case, needs no queue object.
        self._lanes: dict[bytes, U | deque[U]] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def enter(self, user: U) -> bool:
        """Put ``user`` at the end of each of its lanes; True if it may go at once."""
        lanes = self._lanes
        blocked = 0
        for name in user.lane_names:
            present = lanes.get(name)
            if present is None:
                lanes[name] = user
            elif isinstance(present, deque):
                present.append(user)
                blocked += 1
            else:
                lanes[name] = deque((present, user))
                blocked += 1
        user.blocked_by = blocked
        return not blocked

    def leave(self, user: U) -> list[U]:
        """Take ``user``, first in all its lanes, out of them; returns those that may go now, in order."""
        lanes = self._lanes
        freed: list[U] = []
        for name in user.lane_names:
            present = lanes[name]
            if not isinstance(present, deque):
                del lanes[name]
                continue
            present.popleft()
            if len(present) == 1:
                lanes[name] = present[0]
            following = present[0]
            following.blocked_by -= 1
            if not following.blocked_by:
                freed.append(following)
        return freed
