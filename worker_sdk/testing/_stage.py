"""What every call of the fake stands on: the world under one lock, who waits for changes, and the network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from worker_sdk.testing._world import World

__all__ = ["Call", "Stage", "Unreachable"]


class Unreachable(Exception):
    """The network is cut, or the fake has stopped: the caller learns nothing."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call under way.

    ``deadline``: monotonic seconds; ``alive``: whether somebody still waits for it.
    """

    deadline: float
    alive: Callable[[], bool]


class Stage:
    """The world, and how calls wait for it to change.

    Attributes:
        changed: the lock around ``world``, and the bell that rings with each change.
        cut_off: calls do not come through.
        paused: queues that hand out nothing, as (namespace, queue), and why.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.changed = threading.Condition()
        self.cut_off = False
        self.stopped = False
        self.paused: dict[tuple[str, str], str] = {}

    def check(self) -> None:
        """Return if calls come through.

        Raises:
            Unreachable: they do not.
        """
        if self.cut_off or self.stopped:
            raise Unreachable

    def wait(self, call: Call, until: float) -> bool:
        """Wait for a change, with the lock held; False: *until* (monotonic) has come, or the caller has gone.

        Real seconds, whatever the world's clock says: nothing else would end a wait in an idle world.

        Raises:
            Unreachable: the network was cut meanwhile.
        """
        left = min(until, call.deadline) - time.monotonic()
        if left <= 0 or not call.alive():
            return False
        self.changed.wait(left)
        self.check()
        return call.alive()
