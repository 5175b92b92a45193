"""Deliveries: signed, in order, repeated with the same id, and bounded in every direction."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.core.notice import Notice, NoticeKind, PublishedNotice
from coordinator.observability.http_post import PostError
from coordinator.observability.webhook import (
    DELIVERY_HEADER,
    SIGNATURE_HEADER,
    Webhook,
    WebhookConfig,
)
from tests.support.clock import SteppingClock
from tests.support.fake_ports import SteadyEntropy

SECRET = "s3cret-s3cret-s3cret"


@dataclass
class Receiver:
    """Answers in turn what a test wants (a status, or PostError), 200 once that is used up."""

    answers: list[int | PostError] = field(default_factory=list)
    requests: list[tuple[bytes, Mapping[str, str]]] = field(default_factory=list)
    always: int | PostError | None = None

    async def __call__(self, body: bytes, headers: Mapping[str, str]) -> int:
        self.requests.append((body, headers))
        answer = self.always if self.always is not None else self.answers.pop(0) if self.answers else 200
        if isinstance(answer, PostError):
            raise answer
        return answer

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body, _ in self.requests]


def published(number: int, kind: NoticeKind = NoticeKind.LOST) -> PublishedNotice:
    notice = Notice(kind=kind, reason="r", job_id=f"j{number}")
    return PublishedNotice(notice_id=f"n{number}", order=number, time_ms=1, coordinator_id="c", notice=notice)


def a_webhook(receiver: Receiver, clock: SteppingClock, **config: Any) -> Webhook:
    entropy = SteadyEntropy()
    return Webhook(
        receiver,
        lambda published: {"noticeId": published.notice_id},
        clock,
        fraction=entropy.fraction,
        identifier=entropy.identifier,
        config=WebhookConfig(**{"secret": SECRET, **config}),
    )


@asynccontextmanager
async def running(webhook: Webhook) -> AsyncIterator[None]:
    task = asyncio.ensure_future(webhook.run())
    try:
        yield
        for _ in range(50):
            await asyncio.sleep(0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def ids(message: dict[str, Any]) -> list[str]:
    return [one["noticeId"] for one in message["notices"]]


async def test_notices_go_out_in_their_order_several_in_a_request() -> None:
    receiver, clock = Receiver(), SteppingClock()
    webhook = a_webhook(receiver, clock, batch=3)
    async with running(webhook):
        for number in range(5):
            webhook.noticed(published(number))

    assert [ids(message) for message in receiver.messages()] == [["n0", "n1", "n2"], ["n3", "n4"]]
    assert (webhook.delivered, webhook.queued, webhook.dropped) == (5, 0, 0)


async def test_each_request_carries_a_signature_over_time_and_body() -> None:
    receiver, clock = Receiver(), SteppingClock(now_ms=1_700_000_000_500)
    webhook = a_webhook(receiver, clock)
    async with running(webhook):
        webhook.noticed(published(1))

    [(body, headers)] = receiver.requests
    expected = hmac.new(SECRET.encode(), b"1700000000." + body, hashlib.sha256).hexdigest()
    assert headers[SIGNATURE_HEADER] == f"t=1700000000,v1={expected}"
    assert headers["Content-Type"] == "application/json"


async def test_what_is_not_asked_for_is_not_sent() -> None:
    receiver, clock = Receiver(), SteppingClock()
    webhook = a_webhook(receiver, clock, kinds=frozenset({NoticeKind.DEAD}))
    async with running(webhook):
        webhook.noticed(published(1, NoticeKind.LOST))
        webhook.noticed(published(2, NoticeKind.DEAD))

    assert [ids(message) for message in receiver.messages()] == [["n2"]]


@pytest.mark.parametrize("failure", [PostError("refused"), 500, 503, 429, 408])
async def test_a_failed_delivery_is_repeated_with_the_same_id_and_growing_pauses(
    failure: int | PostError,
) -> None:
    receiver, clock = Receiver([failure, failure]), SteppingClock()
    webhook = a_webhook(receiver, clock)
    async with running(webhook):
        webhook.noticed(published(1))
        await clock.advance(0.9)
        assert len(receiver.requests) == 1
        await clock.advance(0.2)
        assert len(receiver.requests) == 2
        await clock.advance(1.8)
        assert len(receiver.requests) == 2
        await clock.advance(0.2)

    assert len(receiver.requests) == 3
    assert len({body for body, _ in receiver.requests}) == 1
    assert len({headers[DELIVERY_HEADER] for _, headers in receiver.requests}) == 1
    assert len({headers[SIGNATURE_HEADER] for _, headers in receiver.requests}) > 1, "each try has its time"
    assert (webhook.delivered, webhook.failed_tries, webhook.dropped) == (1, 2, 0)


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 404, 410])
async def test_a_refusal_for_good_or_a_redirect_is_not_repeated(status: int) -> None:
    receiver, clock = Receiver([status]), SteppingClock()
    webhook = a_webhook(receiver, clock)
    async with running(webhook):
        webhook.noticed(published(1))
        await clock.advance(0)
        webhook.noticed(published(2))
        await clock.advance(0)

    refused, taken = receiver.messages()
    assert (ids(refused), ids(taken)) == (["n1"], ["n2"])
    assert (refused["dropped"], taken["dropped"]) == (0, 1)
    assert (webhook.delivered, webhook.dropped) == (1, 1)


async def test_tries_end_and_the_pauses_have_a_cap() -> None:
    receiver, clock = Receiver(always=503), SteppingClock()
    webhook = a_webhook(receiver, clock, tries=5, max_pause_s=2.0)
    async with running(webhook):
        webhook.noticed(published(1))
        await clock.advance(1 + 2 + 2 + 2 + 0.1)

    assert len(receiver.requests) == 5
    assert (webhook.dropped, webhook.queued) == (1, 0)


async def test_while_nobody_takes_them_the_oldest_are_dropped_and_their_number_is_told() -> None:
    receiver, clock = Receiver(always=503), SteppingClock()
    webhook = a_webhook(receiver, clock, max_queued=3, batch=10, tries=2)
    async with running(webhook):
        webhook.noticed(published(0))
        await clock.advance(0)
        for number in range(1, 11):
            webhook.noticed(published(number))
        assert (webhook.queued, webhook.dropped) == (3, 7)
        receiver.always = None
        await clock.advance(5)

    assert ids(receiver.messages()[-1]) == ["n8", "n9", "n10"]
    assert sum(message["dropped"] for message in receiver.messages()[1:]) == 7


async def test_an_outage_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    receiver, clock = Receiver(always=503), SteppingClock()
    webhook = a_webhook(receiver, clock, tries=3, batch=1)
    with caplog.at_level(logging.INFO):
        async with running(webhook):
            for number in range(20):
                webhook.noticed(published(number))
            await clock.advance(100)
            receiver.always = None
            webhook.noticed(published(99))

    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "INFO"]


async def test_one_fault_of_our_own_ends_no_deliveries(caplog: pytest.LogCaptureFixture) -> None:
    receiver, clock = Receiver(), SteppingClock()
    webhook = a_webhook(receiver, clock, batch=1)
    webhook._encode = lambda one: {"noticeId": 1 / int(one.notice_id[1:])}  # type: ignore[dict-item]
    async with running(webhook):
        webhook.noticed(published(0))
        webhook.noticed(published(1))

    assert (webhook.delivered, webhook.dropped) == (1, 1)
    assert "ZeroDivisionError" in caplog.text


async def test_what_was_dropped_is_told_once() -> None:
    receiver, clock = Receiver([404]), SteppingClock()
    webhook = a_webhook(receiver, clock)
    async with running(webhook):
        for number in range(4):
            webhook.noticed(published(number))
            await clock.advance(0)

    assert [message["dropped"] for message in receiver.messages()] == [0, 1, 0, 0]
