"""Notices of what passes did to jobs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from coordinator.core.job import Job, JobState
from coordinator.core.notice import Notice, NoticeKind

__all__ = ["end_of", "notice_of"]

_ENDS: Final = MappingProxyType(
    {JobState.DEAD: NoticeKind.DEAD, JobState.QUARANTINED: NoticeKind.QUARANTINED}
)


def notice_of(
    kind: NoticeKind,
    before: Job,
    after: Job | None,
    reason: str,
    *,
    facts: Mapping[str, str] | None = None,
    token: int = 0,
) -> Notice:
    """A notice with what the records say of the job's last attempt.

    Args:
        kind: of the notice.
        before: the record as it was.
        after: the record as it is, None if it is gone.
        reason: why.
        facts: few and short.
        token: of the attempt, if the record does not say it.
    """
    record = after if after is not None else before
    last = record.attempts[-1] if record.attempts else None
    return Notice(
        kind=kind,
        reason=reason,
        namespace=record.namespace,
        queue=record.terms.queue,
        type=record.terms.type,
        job_id=record.job_id,
        session_id=last.session if last is not None else "",
        attempt=last.number if last is not None else 0,
        token=last.token if last is not None and last.token else token,
        state_before=before.state,
        state_after=after.state if after is not None else None,
        facts=facts or {},
    )


def end_of(before: Job, after: Job) -> Notice | None:
    """The notice of a job that only an operator makes run again; None: ``after`` is no such end."""
    kind = _ENDS.get(after.state)
    return None if kind is None else notice_of(kind, before, after, after.end_reason)
