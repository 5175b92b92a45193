"""A change waits for the answer that may say that it is our own, but not for long, and never out of turn."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from coordinator.etcd.change_feed import FeedConfig
from coordinator.etcd.codec import JobCodec
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.namespace_feed import NamespaceFeed
from coordinator.etcd.own_revisions import OwnRevisions
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.txn import TxnCodec
from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue
from leasekeeper.internal.etcd.v1.watch_pb2 import Event

SPACE = KeySpace("/r")
KEYS = SPACE.namespace("default")


class Told:
    """What the index hears."""

    def __init__(self) -> None:
        self.deleted: list[int] = []
        self.passed_to: list[int] = []
        self.enough = asyncio.Event()

    def claim_deleted(self, namespace: str, job_id: str, revision: int) -> None:
        self.deleted.append(revision)

    def passed(self, namespace: str, kind: str, revision: int) -> None:
        self.passed_to.append(revision)
        if revision == 3:
            self.enough.set()


class Clock:
    def monotonic(self) -> float:
        return 0.0


def feed_of(told: Told, own: OwnRevisions) -> NamespaceFeed:
    aside = SetAside()
    codec = TxnCodec(SPACE, JobCodec(), epoch=lambda: 1, set_aside=aside, now_ms=lambda: 0)
    return NamespaceFeed(
        cast("Any", None),
        KEYS,
        cast("Any", told),
        codec=codec,
        own=own,
        set_aside=aside,
        clock=cast("Any", Clock()),
        config=FeedConfig(),
        fraction=lambda: 0.5,
    )


def tell(feed: NamespaceFeed, revision: int) -> None:
    gone = Event(type=Event.DELETE, kv=KeyValue(key=KEYS.claim("j"), mod_revision=revision))
    feed.changes("claim", revision, [cast("Any", gone)])


async def test_a_change_whose_answer_comes_late_is_still_known_as_our_own() -> None:
    told, own = Told(), OwnRevisions(under_way=lambda: True)
    feed = feed_of(told, own)
    for revision in (1, 2, 3):
        tell(feed, revision)
    assert told.passed_to == []
    for revision in (1, 2, 3):
        own.add(revision)
    async with asyncio.timeout(5):
        await told.enough.wait()
    assert told.passed_to == [1, 2, 3]
    assert told.deleted == []


async def test_another_ones_change_is_told_in_its_turn_though_txns_are_always_under_way() -> None:
    told, own = Told(), OwnRevisions(under_way=lambda: True)
    feed = feed_of(told, own)
    tell(feed, 1)
    own.add(2)
    tell(feed, 2)
    tell(feed, 3)
    assert told.passed_to == []
    async with asyncio.timeout(5):
        await told.enough.wait()
    assert told.passed_to == [1, 2, 3]
    assert told.deleted == [1, 3]
