"""The cache of reference data. It holds copies: nothing that it says, or fails to say, decides a job or a
lock.

Every call is bounded by a deadline and raises `CacheAway` where the cache cannot be used; the caller then
does without. Revisions are those of the store of record; versions are the entry's own, compared only within
one `VersionSource`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol

__all__ = [
    "Applied",
    "CachedEntry",
    "EntryKey",
    "Fill",
    "FillAnswer",
    "FillWish",
    "Found",
    "ReferenceCache",
    "ReferenceValue",
    "VersionSource",
]


class VersionSource(IntEnum):
    """Where the versions of a dataset come from; the numbers are those of
    ``leasekeeper.v1.VersionSource``."""

    CALLER = 1
    REVISION = 2


class Found(StrEnum):
    """What a get found."""

    FRESH = "fresh"
    STALE = "stale"
    NEGATIVE = "negative"
    MISS = "miss"


class Applied(StrEnum):
    """What became of a write.

    ``STORED``: the entry is what was written. ``SUPERSEDED``: something later stands, and the write has no
    more to say. ``DROPPED``: what the write was based on has gone (evicted, flushed, another epoch); the
    entry is absent, which is no lie.
    """

    STORED = "stored"
    SUPERSEDED = "superseded"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class EntryKey:
    """One entry."""

    namespace: str
    dataset: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceValue:
    """A value, or with ``negative`` the news that the source has none. Spans in milliseconds: FRESH for
    ``fresh_ms``, then STALE for ``stale_ms``."""

    value: bytes = b""
    content_type: str = ""
    source: VersionSource
    version: int
    fresh_ms: int
    stale_ms: int = 0
    negative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FillWish:
    """What a getter would fill with: ``token``, new for each get and never empty, good for ``good_ms``.

    ``known_revision``: everything up to it has been heard of, so that a load that starts now is at least as
    new. ``early_ms``: so long before an entry turns stale it is already refreshed.
    """

    token: str
    good_ms: int
    known_revision: int
    early_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedEntry:
    """What a get found. ``fill``: this getter's wish was granted, for one getter at a time.

    ``fresh_left_ms``: until it turns stale. ``retry_ms``: of a miss without a grant, how long the granted one
    has.
    """

    found: Found
    value: bytes = b""
    content_type: str = ""
    version: int = 0
    fresh_left_ms: int = 0
    fill: bool = False
    retry_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """What was loaded under a granted token."""

    token: str
    value: ReferenceValue


@dataclass(frozen=True, slots=True)
class FillAnswer:
    """What became of a fill; ``version``: the one that stands where it was refused as older, else its own."""

    applied: Applied
    version: int


class ReferenceCache(Protocol):
    """Entries with versions, tombstones and one filler at a time. ``epoch``: entries of another are misses.

    All raise ``CacheAway``.
    """

    async def get(
        self, keys: Sequence[EntryKey], wish: FillWish | None, *, epoch: int, deadline: float
    ) -> list[CachedEntry]:
        """The entries, in order. ``wish`` None: no fill is asked for."""

    async def fill(self, key: EntryKey, fill: Fill, *, epoch: int, deadline: float) -> FillAnswer:
        """Store what was loaded, if nothing came in between. A token that is not there refuses (DROPPED)."""

    async def abandon(self, key: EntryKey, token: str, *, epoch: int, deadline: float) -> None:
        """Give a granted token back."""

    async def plant(self, key: EntryKey, mark: str, *, epoch: int, keep_ms: int, deadline: float) -> str:
        """Before a put is committed: make sure that the entry has a life that later writes leave their traces
        in.

        Returns:
            The mark of the life that stands, ``mark`` or an earlier one; for ``put``.
        """

    async def put(
        self, key: EntryKey, value: ReferenceValue, *, mark: str, revision: int, epoch: int, deadline: float
    ) -> FillAnswer:
        """Apply a put that was committed at ``revision``, any number of times and in any order with others.

        Without the life that ``mark`` names it is applied as an invalidation: whatever was written after the
        put may have gone with that life.
        """

    async def invalidate(
        self, key: EntryKey, *, revision: int, keep_ms: int, epoch: int, deadline: float
    ) -> Applied:
        """Apply an invalidation that was committed at ``revision``; its traces last at least ``keep_ms``."""
