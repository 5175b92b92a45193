"""The hub: everybody hears, nobody waits, and what a slow reader misses is counted."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from coordinator.core.notice import Notice, NoticeKind, PublishedNotice
from coordinator.errors import Reason, RequestError
from coordinator.services.notices import NoticeConfig, NoticeHub, StreamedNotice
from tests.support.clock import SteppingClock
from tests.support.fake_ports import SteadyEntropy


def a_hub(*sinks: object, **config: int) -> NoticeHub:
    return NoticeHub(
        SteppingClock(now_ms=5_000),
        SteadyEntropy(),
        coordinator_id="c1",
        sinks=sinks,  # type: ignore[arg-type]
        config=NoticeConfig(**config),
    )


def lost(job_id: str = "j1", namespace: str = "default") -> Notice:
    return Notice(kind=NoticeKind.LOST, reason="its lease ended", namespace=namespace, job_id=job_id)


async def take(stream: object, count: int) -> list[StreamedNotice]:
    async with asyncio.timeout(5):
        return [await anext(stream) for _ in range(count)]  # type: ignore[call-overload]


async def following(hub: NoticeHub, namespace: str = "default", *kinds: NoticeKind) -> tuple[object, object]:
    """A stream that has begun, and the first notice that it will give."""
    stream = hub.watch(namespace, frozenset(kinds))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    return stream, first


def jobs(streamed: list[StreamedNotice]) -> list[str]:
    return [one.published.notice.job_id for one in streamed]


def test_a_notice_goes_out_with_an_id_the_time_and_the_coordinator() -> None:
    heard: list[PublishedNotice] = []
    hub = a_hub(heard.append)

    hub.publish(lost("a"))
    hub.publish(lost("b"))

    assert [one.notice.job_id for one in heard] == ["a", "b"]
    assert len({one.notice_id for one in heard}) == 2
    assert {(one.time_ms, one.coordinator_id) for one in heard} == {(5_000, "c1")}


def test_a_sink_that_fails_harms_nobody_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[PublishedNotice] = []

    def broken(published: PublishedNotice) -> None:
        raise ValueError("no")

    hub = a_hub(broken, heard.append)
    with caplog.at_level(logging.ERROR):
        for _ in range(10):
            hub.publish(lost())

    assert len(heard) == 10
    assert hub.sink_failures == 10
    assert len(caplog.records) == 1


async def test_a_stream_has_the_notices_of_its_namespace_and_those_of_none() -> None:
    hub = a_hub()
    stream, first = await following(hub)

    hub.publish(lost("other", namespace="elsewhere"))
    hub.publish(lost("mine"))
    hub.publish(Notice(kind=NoticeKind.STORAGE, reason="nearly full"))

    assert (await first).published.notice.job_id == "mine"  # type: ignore[misc,attr-defined]
    [storage] = await take(stream, 1)
    assert storage.published.notice.kind is NoticeKind.STORAGE


async def test_a_stream_has_the_kinds_that_it_asked_for() -> None:
    hub = a_hub()
    _, first = await following(hub, "default", NoticeKind.DEAD)

    hub.publish(lost("a"))
    hub.publish(Notice(kind=NoticeKind.DEAD, reason="used up", namespace="default", job_id="d"))

    assert (await first).published.notice.job_id == "d"  # type: ignore[misc,attr-defined]


async def test_recent_notices_come_first_in_their_order_and_none_twice() -> None:
    hub = a_hub()
    hub.publish(lost("a"))
    hub.publish(Notice(kind=NoticeKind.DEAD, reason="used up", namespace="default", job_id="b"))
    hub.publish(lost("c"))
    stream = hub.watch("default", include_recent=True)

    before = await take(stream, 1)
    hub.publish(lost("d"))

    assert jobs(before + await take(stream, 3)) == ["a", "b", "c", "d"]


def test_a_flood_of_one_kind_pushes_no_other_kind_out_of_the_memory() -> None:
    hub = a_hub(recent=10)
    hub.publish(Notice(kind=NoticeKind.EPOCH, reason="history went back"))
    for number in range(100):
        hub.publish(lost(str(number)))

    remembered = hub.recent("default")

    assert remembered[0].notice.kind is NoticeKind.EPOCH
    assert [one.notice.job_id for one in remembered[1:]] == [str(number) for number in range(90, 100)]


async def test_a_slow_reader_loses_the_oldest_and_is_told_how_many() -> None:
    hub = a_hub(buffer=3)
    stream, first = await following(hub)
    hub.publish(lost("0"))
    assert (await first).missed == 0  # type: ignore[misc,attr-defined]

    for number in range(1, 11):
        hub.publish(lost(str(number)))
    late = await take(stream, 3)

    assert jobs(late) == ["8", "9", "10"]
    assert [one.missed for one in late] == [7, 0, 0]


async def test_one_stream_too_many_is_refused_and_a_closed_one_makes_room() -> None:
    hub = a_hub(max_streams=1)
    stream, first = await following(hub)

    with pytest.raises(RequestError) as refused:
        await anext(hub.watch("default"))
    first.cancel()  # type: ignore[attr-defined]
    with contextlib.suppress(asyncio.CancelledError):
        await first  # type: ignore[misc]
    await stream.aclose()  # type: ignore[attr-defined]

    assert refused.value.reason is Reason.TOO_MANY_REQUESTS
    assert hub.streams == 0
    hub.publish(lost("a"))
    assert jobs(await take(hub.watch("default", include_recent=True), 1)) == ["a"]
