"""Who may try now for what somebody else holds, over all callers of this coordinator (``core.bucket``).

What it remembers is bounded. A caller that is forgotten is treated better than it deserves; a resource is
never forgotten while a try for it counts, so the limit of a resource always holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from coordinator.core.bucket import EMPTY, UNTRIED, Bucket, BucketPolicy, Tries
from coordinator.ports import Clock

__all__ = ["Contention", "ContentionConfig", "Resource", "Throttled", "Try"]

K = TypeVar("K")
V = TypeVar("V")

_SWEEP_MS = 1_000
"""A full table is swept at most this often: a sweep looks at every entry."""


class Resource(NamedTuple):
    """What is tried for. ``kind`` keeps apart what may bear the same name."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionConfig:
    """What is remembered at most: pairs of caller and resource, and resources with tries that count."""

    policy: BucketPolicy = field(default_factory=BucketPolicy)
    callers: int = 50_000
    resources: int = 50_000


@dataclass(frozen=True, slots=True)
class Throttled:
    """Not now. ``own``: this caller came too early; else too many tries of all callers have failed."""

    delay_ms: int
    own: bool


@dataclass(slots=True)
class Try:
    """A try that may be made; whoever began it calls ``Contention.end`` exactly once."""

    resource: Resource
    under_way: bool = True


class Contention:
    """Buckets of callers and tries of resources.

    Args:
        clock: time.
        config: limits.
        has_line: whether somebody waits in line for a resource.
    """

    def __init__(
        self, clock: Clock, config: ContentionConfig, *, has_line: Callable[[Resource], bool]
    ) -> None:
        self._clock = clock
        self._config = config
        self._has_line = has_line
        self._buckets: OrderedDict[tuple[str, Resource], Bucket] = OrderedDict()
        self._tries: dict[Resource, Tries] = {}
        self._swept_ms = {"callers": -_SWEEP_MS, "resources": -_SWEEP_MS}
        self.throttled = 0

    def __len__(self) -> int:
        return len(self._buckets) + len(self._tries)

    # -- trying

    def begin(self, caller: str, resource: Resource) -> Try | Throttled:
        """A caller wants to try at once. Too early, it is refused and that is all; without a place among the
        resource's tries, it has failed to get it."""
        now_ms, policy = self._now_ms(), self._config.policy
        early = self._buckets.get((caller, resource), EMPTY).wait_ms(now_ms)
        if early:
            self.throttled += 1
            return Throttled(early, own=True)
        pause = self._place(resource, in_line=False)
        if pause:
            self.throttled += 1
            bucket = self._bucket(caller, resource).failed(policy, now_ms, at_least_ms=pause)
            self._keep(caller, resource, bucket)
            return Throttled(bucket.wait_ms(now_ms), own=False)
        return Try(resource)

    def begin_in_line(self, resource: Resource) -> Try | Throttled:
        """One who waits in line looks for all who do; no bucket is asked."""
        pause = self._place(resource, in_line=True)
        return Throttled(pause, own=False) if pause else Try(resource)

    def end(self, one: Try, *, won: bool) -> None:
        """It is over. Won, its place is free at once; not won, or nobody knows, it counts for a while."""
        assert one.under_way, "a try ends once"
        one.under_way = False
        now_ms, policy = self._now_ms(), self._config.policy
        tries = self._tries[one.resource].ended(policy, now_ms, failed=not won)
        if tries.forgotten(policy, now_ms):
            del self._tries[one.resource]
        else:
            self._tries[one.resource] = tries

    # -- callers

    def charged(self, caller: str, resource: Resource) -> int:
        """Somebody else has it: one more failure; answers what the caller is to be told, milliseconds."""
        now_ms = self._now_ms()
        bucket = self._bucket(caller, resource).failed(self._config.policy, now_ms)
        self._keep(caller, resource, bucket)
        return bucket.wait_ms(now_ms)

    def next_delay_ms(self, caller: str, resource: Resource) -> int:
        """What a failure now would be told; nothing is charged."""
        bucket = self._bucket(caller, resource)
        now_ms, policy = self._now_ms(), self._config.policy
        return max(bucket.wait_ms(now_ms), policy.delay_ms(bucket.leaked(policy, now_ms).level))

    def settled(self, caller: str, resource: Resource) -> None:
        """The caller held it and let go of it cleanly: its bucket is empty."""
        if self._buckets:
            self._buckets.pop((caller, resource), None)

    # -- what is remembered

    def _bucket(self, caller: str, resource: Resource) -> Bucket:
        return self._buckets.get((caller, resource), EMPTY)

    def _keep(self, caller: str, resource: Resource, bucket: Bucket) -> None:
        self._buckets[caller, resource] = bucket
        self._buckets.move_to_end((caller, resource))
        if len(self._buckets) > self._config.callers:
            self._sweep("callers", self._buckets, lambda one, now: one.forgotten(self._config.policy, now))
            while len(self._buckets) > self._config.callers:
                self._buckets.popitem(last=False)

    def _place(self, resource: Resource, *, in_line: bool) -> int:
        """Take a place among the resource's tries; else answers when there may be one, milliseconds."""
        now_ms, policy = self._now_ms(), self._config.policy
        known = self._tries.get(resource)
        if known is None and len(self._tries) >= self._config.resources:
            self._sweep("resources", self._tries, lambda one, now: one.forgotten(policy, now))
            if len(self._tries) >= self._config.resources:
                return policy.window_ms
        tries = known or UNTRIED
        pause = tries.wait_ms(policy, now_ms, in_line=in_line, line=self._has_line(resource))
        if not pause:
            self._tries[resource] = tries.begun()
        return pause

    def _sweep(self, name: str, table: MutableMapping[K, V], forgotten: Callable[[V, int], bool]) -> None:
        now_ms = self._now_ms()
        if now_ms - self._swept_ms[name] < _SWEEP_MS:
            return
        self._swept_ms[name] = now_ms
        for key in [key for key, one in table.items() if forgotten(one, now_ms)]:
            del table[key]

    def _now_ms(self) -> int:
        # A microsecond more: who comes at the millisecond that it was told is not early by a rounding error.
        return int(self._clock.monotonic() * 1000 + 0.001)
