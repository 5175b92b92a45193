"""Sends notices to somebody's HTTP endpoint: JSON, signed, in order, retried, never in anybody's way.

What is waiting is bounded: the oldest are dropped for the newest, and the next delivery says how many.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from coordinator.core.notice import NoticeKind, PublishedNotice
from coordinator.observability.http_post import PostError

__all__ = ["DELIVERY_HEADER", "SIGNATURE_HEADER", "Webhook", "WebhookConfig", "signature"]

_logger = logging.getLogger(__name__)

SIGNATURE_HEADER: Final = "Leasekeeper-Signature"
DELIVERY_HEADER: Final = "Leasekeeper-Delivery"

_REPEATED: Final = frozenset({408, 425, 429})
"""Statuses below 500 that say "later", not "never"."""


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """Value of the signature header: HMAC-SHA256 over ``<timestamp>.<body>``.

    Args:
        secret: shared with the receiver.
        timestamp: Unix seconds of this try.
        body: the request's, byte for byte.
    """
    digest = hmac.new(secret.encode(), b"%d.%b" % (timestamp, body), hashlib.sha256).hexdigest()
    return f"t={timestamp},v1={digest}"


class Time(Protocol):
    """The parts of a clock that are used here."""

    def now_ms(self) -> int:
        """Unix milliseconds."""

    async def sleep(self, seconds: float) -> None:
        """Sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """Spans are seconds.

    ``kinds``: what is sent; empty: all. ``max_queued``: notices that wait. ``batch``: notices in one request.
    ``tries``: of one request, ``pause_s`` after the first, doubled up to ``max_pause_s``, each moved by up to
    half of itself; then it is given up.
    """

    secret: str
    kinds: frozenset[NoticeKind] = frozenset()
    max_queued: int = 1_000
    batch: int = 50
    tries: int = 8
    pause_s: float = 1.0
    max_pause_s: float = 60.0


class Webhook:
    """Takes notices in; ``run`` sends them.

    Args:
        post: sends a body with headers and answers the status, or raises PostError.
        encode: a notice as JSON values.
        time: of signatures and pauses.
        fraction: uniform in [0, 1), for jitter.
        identifier: fresh ids, for deliveries.
        config: see ``WebhookConfig``.
    """

    def __init__(
        self,
        post: Callable[[bytes, Mapping[str, str]], Awaitable[int]],
        encode: Callable[[PublishedNotice], Mapping[str, Any]],
        time: Time,
        *,
        fraction: Callable[[], float],
        identifier: Callable[[], str],
        config: WebhookConfig,
    ) -> None:
        self._post = post
        self._encode = encode
        self._time = time
        self._fraction = fraction
        self._identifier = identifier
        self._config = config
        self._queue: deque[PublishedNotice] = deque()
        self._wake = asyncio.Event()
        self._untold = 0
        self._failing = False
        self._given_up = 0
        self.delivered = 0
        self.dropped = 0
        self.failed_tries = 0

    @property
    def queued(self) -> int:
        """Notices that wait."""
        return len(self._queue)

    def noticed(self, published: PublishedNotice) -> None:
        """Queue a notice; a sink of the hub."""
        if self._config.kinds and published.notice.kind not in self._config.kinds:
            return
        if len(self._queue) >= self._config.max_queued:
            self._queue.popleft()
            self._drop(1)
        self._queue.append(published)
        self._wake.set()

    async def run(self) -> None:
        """Send what comes, until cancelled. What waits then is lost: notices are hints."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._config.batch))]
                try:
                    await self._deliver(batch)
                except Exception:
                    # A fault of ours with one batch must not end all deliveries.
                    _logger.exception("notices could not be sent to the webhook")
                    self._drop(len(batch))

    async def _deliver(self, batch: list[PublishedNotice]) -> None:
        dropped = self._untold
        message = {"notices": [self._encode(one) for one in batch], "dropped": dropped}
        body = json.dumps(message, separators=(",", ":")).encode()
        delivery = self._identifier()
        trouble = ""
        for number in range(self._config.tries):
            if number:
                await self._time.sleep(self._pause(number - 1))
            trouble, again = await self._try(body, delivery)
            if not trouble:
                self._untold -= dropped
                self.delivered += len(batch)
                self._works()
                return
            self.failed_tries += 1
            self._fails(trouble)
            if not again:
                break
        self._drop(len(batch))
        if not self._given_up:
            _logger.error("notices are given up, as the webhook does not take them: %s", trouble)
        self._given_up += len(batch)

    async def _try(self, body: bytes, delivery: str) -> tuple[str, bool]:
        """What went wrong, empty if nothing; and whether another try may help."""
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "leasekeeper",
            DELIVERY_HEADER: delivery,
            SIGNATURE_HEADER: signature(self._config.secret, self._time.now_ms() // 1000, body),
        }
        try:
            status = await self._post(body, headers)
        except PostError as error:
            return str(error), True
        if 200 <= status < 300:
            return "", False
        return f"status {status}", status >= 500 or status in _REPEATED

    def _pause(self, number: int) -> float:
        config = self._config
        return min(config.max_pause_s, config.pause_s * 2.0 ** min(number, 16)) * (0.5 + self._fraction())

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._untold += count

    def _fails(self, trouble: str) -> None:
        if not self._failing:
            self._failing = True
            _logger.warning("the webhook does not take notices, they are sent again: %s", trouble)

    def _works(self) -> None:
        if self._failing:
            _logger.info("the webhook takes notices again; %d were given up", self._given_up)
            self._failing, self._given_up = False, 0
