"""How often somebody may try again for what somebody else holds: a leaky bucket for each caller, a limit for
each resource.

A caller that fails is told a delay that doubles with each failure, and its level leaks while it stays away:
the leaky bucket as a meter (J. Turner, "New directions in communications", IEEE Communications Magazine
24(10), 1986; ITU-T I.371), with a delay for each level in place of one rate. What one caller does cannot
bound what all of them do together, so failing tries of one resource are limited as well: at most so many in
any window of time.

Pure: milliseconds of any clock that does not go back come in, and the next value goes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coordinator.core.copying import changed, quick

__all__ = ["EMPTY", "UNTRIED", "Bucket", "BucketPolicy", "Tries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPolicy:
    """Delays and limits. Spans are milliseconds.

    Attributes:
        first_ms: the delay that a first failure is told.
        cap_ms: the longest delay.
        tries: failing tries of one resource in any ``window_ms``, over all callers.
        window_ms: see ``tries``.
        reserved: places among ``tries`` that are kept for who waits in line, while somebody does.
    """

    first_ms: int = 50
    cap_ms: int = 5_000
    tries: int = 4
    window_ms: int = 1_000
    reserved: int = 2

    def delay_ms(self, level: int) -> int:
        """What a failure at ``level`` is told: ``first_ms`` × 2^level, at most ``cap_ms``."""
        return min(self.cap_ms, self.first_ms << min(level, self.highest))

    @property
    def highest(self) -> int:
        """The first level whose delay is ``cap_ms``; no bucket rises above it."""
        return max(0, (-(-self.cap_ms // self.first_ms) - 1).bit_length())


@quick
@dataclass(frozen=True, slots=True)
class Bucket:
    """One caller at one resource. It may come again from ``open_ms`` on, and its level leaks from then on."""

    level: int = 0
    open_ms: int = 0

    def wait_ms(self, now_ms: int) -> int:
        """How long it has to stay away still; 0: it may come."""
        return max(0, self.open_ms - now_ms)

    def leaked(self, policy: BucketPolicy, now_ms: int) -> Bucket:
        """As of ``now_ms``: one level less for each delay of that level that it stayed away.

        A caller that comes as soon as it may has lost none, so that one who obeys climbs to the cap as well.
        """
        level, since = self.level, self.open_ms
        while level > 0 and now_ms - since >= policy.delay_ms(level):
            since += policy.delay_ms(level)
            level -= 1
        return self if level == self.level else Bucket(level, since)

    def failed(self, policy: BucketPolicy, now_ms: int, *, at_least_ms: int = 0) -> Bucket:
        """After one more failure; ``wait_ms`` of it is what the caller is told.

        Args:
            policy: delays.
            now_ms: when it failed.
            at_least_ms: a longer delay for a reason of its own; it does not change the level.
        """
        level = self.leaked(policy, now_ms).level
        delay = max(policy.delay_ms(level), at_least_ms)
        return Bucket(min(level + 1, policy.highest), now_ms + delay)

    def forgotten(self, policy: BucketPolicy, now_ms: int) -> bool:
        """Whether nothing is left of it that would make a difference."""
        return self.wait_ms(now_ms) == 0 and self.leaked(policy, now_ms).level == 0


@quick
@dataclass(frozen=True, slots=True)
class Tries:
    """The tries for one resource that count: those under way, and when those that failed of late ended.

    A try has its place from its begin, because it may fail; one that succeeds gives the place back. One that
    failed keeps it until ``window_ms`` after its end: whenever its requests reached the store in between, no
    window sees more than ``tries`` of them.
    """

    under_way: int = 0
    failed: tuple[int, ...] = ()

    def _recent(self, policy: BucketPolicy, now_ms: int) -> tuple[int, ...]:
        return tuple(ended for ended in self.failed if now_ms - ended <= policy.window_ms)

    def wait_ms(self, policy: BucketPolicy, now_ms: int, *, in_line: bool, line: bool) -> int:
        """When there may be a place for one more try: 0 now, else milliseconds from now.

        Args:
            policy: limits.
            now_ms: now.
            in_line: it is for one who waits in line.
            line: somebody waits in line for this resource.
        """
        places = policy.tries - (policy.reserved if line and not in_line else 0)
        recent = self._recent(policy, now_ms)
        over = self.under_way + len(recent) - places
        if over < 0:
            return 0
        if over < len(recent):
            # The times are in order, so this one has to go for a place to be free.
            return recent[over] + policy.window_ms + 1 - now_ms
        return policy.window_ms

    def begun(self) -> Tries:
        """One more is under way."""
        return changed(self, under_way=self.under_way + 1)

    def ended(self, policy: BucketPolicy, now_ms: int, *, failed: bool) -> Tries:
        """One that was under way has ended."""
        recent = self._recent(policy, now_ms)
        return Tries(max(0, self.under_way - 1), (*recent, now_ms) if failed else recent)

    def forgotten(self, policy: BucketPolicy, now_ms: int) -> bool:
        """Whether nothing is left of it that would make a difference."""
        return self.under_way == 0 and not self._recent(policy, now_ms)


EMPTY: Final = Bucket()
UNTRIED: Final = Tries()
