"""Callers that wait for one job by its id: a line for each job, first come first served.

One look at the store tells all of a line what stands there, so only the first in line looks. Whoever is first
is told when the job begins to wait; when it leaves, the next is first and is told so.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from coordinator.errors import RequestError

__all__ = ["JobLines", "Line", "Place"]

_AT_ONCE = float("-inf")


class Place:
    """One caller's place; ``moved`` is set when there is something new for it."""

    __slots__ = ("moved",)

    def __init__(self) -> None:
        self.moved = asyncio.Event()


class Line:
    """Who waits for one job, and what was seen of it. Times are monotonic seconds.

    Attributes:
        look_at: when the first in line is to look next; the first look is due at once.
        looked_at: when somebody looked last.
        news: the job has begun to wait since the last look began.
        seen: what the last look found in the way.
        token: that of the claim that it found, 0 if there was none.
        over: why nobody will get it any more.
    """

    __slots__ = ("look_at", "looked_at", "news", "over", "places", "seen", "token")

    def __init__(self) -> None:
        self.places: OrderedDict[Place, None] = OrderedDict()
        self.look_at = _AT_ONCE
        self.looked_at = _AT_ONCE
        self.news = False
        self.seen: RequestError | None = None
        self.token = 0
        self.over: RequestError | None = None

    def is_first(self, place: Place) -> bool:
        """Whether it is ``place``'s turn to look."""
        return next(iter(self.places), None) is place

    def saw(self, what: RequestError, token: int, next_look: float) -> None:
        """Somebody looked, or knows without."""
        self.seen, self.token, self.look_at = what, token, next_look

    def look_again(self) -> None:
        """The next look is due at once."""
        self.look_at = _AT_ONCE
        self.tell_first()

    def end(self, why: RequestError) -> None:
        """There is nothing to wait for: tell all."""
        self.over = why
        for place in self.places:
            place.moved.set()

    def tell_first(self) -> None:
        """There is something new for whoever is first."""
        first = next(iter(self.places), None)
        if first is not None:
            first.moved.set()


class JobLines:
    """The lines by (namespace, job id)."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], Line] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __len__(self) -> int:
        return sum(len(line.places) for line in self._lines.values())

    def has(self, namespace: str, job_id: str) -> bool:
        """Whether anybody waits for this job."""
        return (namespace, job_id) in self._lines

    def join(self, namespace: str, job_id: str) -> tuple[Line, Place]:
        """Stand at the end of the job's line. Whoever joins must `leave`."""
        line = self._lines.get((namespace, job_id))
        if line is None or line.over is not None:
            line = self._lines[namespace, job_id] = Line()
        place = Place()
        line.places[place] = None
        return line, place

    def leave(self, namespace: str, job_id: str, line: Line, place: Place) -> None:
        """Stand there no more."""
        first = line.is_first(place)
        del line.places[place]
        if first:
            line.tell_first()
        if not line.places and self._lines.get((namespace, job_id)) is line:
            del self._lines[namespace, job_id]

    def arrived(self, namespace: str, job_id: str) -> None:
        """The job begins to wait: one is told."""
        line = self._lines.get((namespace, job_id))
        if line is not None:
            line.news = True
            line.look_again()

    def wake_all(self) -> None:
        """Tell everybody to look around."""
        for line in self._lines.values():
            for place in line.places:
                place.moved.set()
