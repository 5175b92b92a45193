"""A log line for each notice; a flood of one kind is a few lines and then one with their number."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from coordinator.core.notice import NoticeKind, PublishedNotice

__all__ = ["NoticeLog", "NoticeLogConfig"]

_LOG = logging.getLogger("leasekeeper.notices")

_LEVELS: Final = {
    NoticeKind.EPOCH: logging.ERROR,
    NoticeKind.TAKEN_AWAY: logging.INFO,
    NoticeKind.REPAIRED: logging.INFO,
}
"""All others are warnings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeLogConfig:
    """``lines`` of each kind in ``window_s`` seconds; what else comes is counted, and told afterwards."""

    lines: int = 20
    window_s: float = 10.0


@dataclass(slots=True)
class _Window:
    began: float
    lines: int = 0
    folded: int = 0


class NoticeLog:
    """Takes notices in; ``run`` tells the numbers of what was folded.

    Args:
        monotonic: seconds.
        sleep: sleeps that many seconds.
        config: bounds.
    """

    def __init__(
        self,
        monotonic: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        config: NoticeLogConfig | None = None,
    ) -> None:
        self._monotonic = monotonic
        self._sleep = sleep
        self._config = config or NoticeLogConfig()
        self._windows: dict[NoticeKind, _Window] = {}

    def noticed(self, published: PublishedNotice) -> None:
        """Log a notice, or count it; a sink of the hub."""
        kind = published.notice.kind
        now = self._monotonic()
        window = self._windows.get(kind)
        if window is None or now - window.began >= self._config.window_s:
            self._summary(kind)
            window = self._windows[kind] = _Window(now)
        if window.lines >= self._config.lines:
            window.folded += 1
            return
        window.lines += 1
        _LOG.log(_LEVELS.get(kind, logging.WARNING), "notice: %s", kind.name, extra=_fields(published))

    async def run(self) -> None:
        """Tell what was folded, soon after each window has ended; at the end tell the rest."""
        try:
            while True:
                await self._sleep(self._config.window_s / 2)
                now = self._monotonic()
                for kind, window in list(self._windows.items()):
                    if now - window.began >= self._config.window_s:
                        self._summary(kind)
        finally:
            for kind in list(self._windows):
                self._summary(kind)

    def _summary(self, kind: NoticeKind) -> None:
        """End the kind's window."""
        window = self._windows.pop(kind, None)
        if window is not None and window.folded:
            seconds = round(self._monotonic() - window.began, 1)
            _LOG.log(
                _LEVELS.get(kind, logging.WARNING),
                "notices: %d more of %s",
                window.folded,
                kind.name,
                extra={"kind": kind.name, "folded": window.folded, "seconds": seconds},
            )


def _fields(published: PublishedNotice) -> dict[str, Any]:
    """What is known, by name; what is not is left out."""
    notice = published.notice
    before, after = notice.state_before, notice.state_after
    fields = {
        "kind": notice.kind.name,
        "reason": notice.reason,
        "namespace": notice.namespace,
        "queue": notice.queue,
        "type": notice.type,
        "job": notice.job_id,
        "session": notice.session_id,
        "attempt": notice.attempt,
        "token": notice.token,
        "state_before": before.name if before is not None else "",
        "state_after": after.name if after is not None else "",
        "overlap_s": notice.overlap_ms / 1000,
        "facts": dict(notice.facts),
        "notice_id": published.notice_id,
    }
    return {name: value for name, value in fields.items() if value}
