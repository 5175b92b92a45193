"""Jobs in the store, as the use cases see them."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Sequence
from typing import Any, Protocol

from coordinator.core.job import Claim, JobState
from coordinator.core.rank import Rank
from coordinator.ports.values import (
    Checkpoint,
    Commit,
    Due,
    JobPage,
    Operation,
    ReadyPage,
    Snapshot,
    Stored,
)

__all__ = [
    "CommitObserver",
    "JobStore",
    "PendingCommit",
    "StateSink",
]


class PendingCommit(Protocol):
    """A commit under way; awaited at most once. An ``asyncio.Future`` is one."""

    def __await__(self) -> Generator[Any, Any, Commit]:
        """The outcome."""

    def cancel(self) -> object:
        """Nobody will wait for it: drop it if it was not sent, else let it go on unheard."""


class CommitObserver(Protocol):
    """Learns of own commits, synchronously, once per Txn and before any caller resumes."""

    def applied(self, operation: Operation, commit: Commit) -> None:
        """``operation`` won; each of its ``also`` is told as a submission of its own, after it."""


class JobStore(Protocol):
    """Jobs in the store. Commits of many callers are folded into few Txns."""

    def commit(self, operation: Operation) -> PendingCommit:
        """Queue one operation; the awaitable ends by the operation's deadline.

        Raises (from the awaitable): NotApplied, OutcomeUnknown.
        """

    async def read(
        self,
        namespace: str,
        job_id: str,
        *,
        deadline: float,
        spec: bool = False,
        checkpoint: bool = False,
        result: bool = False,
    ) -> Snapshot:
        """State and claim, and what else is asked for, at one revision."""

    async def read_many(self, namespace: str, job_ids: Sequence[str], *, deadline: float) -> list[Snapshot]:
        """State and claim of several jobs."""

    async def list_jobs(
        self,
        namespace: str,
        *,
        cursor: str,
        limit: int,
        deadline: float,
        states: frozenset[JobState] | None = None,
    ) -> JobPage:
        """The next records, at most ``limit`` examined, in ranges that end tightly. Undecodable ones are
        left out and counted."""

    async def save_checkpoint(
        self, namespace: str, job_id: str, token: int, checkpoint: Checkpoint, *, deadline: float
    ) -> bool:
        """Put it unless a later sequence of this attempt lies there (False).

        Raises:
            RequestError: CLAIM_LOST, JOB_NOT_FOUND.
        """

    async def list_due(self, namespace: str, *, until_ms: int, limit: int, deadline: float) -> list[Due]:
        """Due keys up to ``until_ms``, earliest first."""

    async def delete_stray(self, namespace: str, due: Due, *, deadline: float) -> bool:
        """Delete a due key that its job does not have, if it is unchanged."""

    async def list_ready(
        self,
        namespace: str,
        queue: str,
        type_: str,
        *,
        after: Rank | None,
        until: Rank,
        limit: int,
        deadline: float,
    ) -> ReadyPage:
        """Waiting jobs with rank in (after, until], at most ``limit``."""

    async def count_ready(
        self, namespace: str, queue: str, type_: str, *, deadline: float
    ) -> tuple[int, int]:
        """How many wait, and as of which revision; one counting range."""

    async def list_types(self, namespace: str, *, deadline: float) -> list[tuple[str, str]]:
        """(queue, type) pairs that ever had a job."""

    async def register_type(self, namespace: str, queue: str, type_: str, *, deadline: float) -> None:
        """Make sure that the pair is listed; cached."""

    async def list_claims(self, namespace: str, *, deadline: float) -> list[tuple[str, Claim]]:
        """Every claim of the namespace, in pages."""

    async def watch_states(
        self, namespace: str, *, after_revision: int, sink: StateSink, stop: Awaitable[None] | None = None
    ) -> None:
        """Feed ``sink`` with every change of a ``state`` key after ``after_revision`` (0: now) until
        cancelled.

        Raises:
            Compacted: that revision is gone.
        """


class StateSink(Protocol):
    """Where ``watch_states`` delivers, synchronously."""

    def started(self, revision: int) -> None:
        """The watch stands; changes after ``revision`` follow."""

    def changed(self, revision: int, job_id: str, stored: Stored | None) -> None:
        """One change; None: deleted or expired."""
