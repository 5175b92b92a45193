"""The follow-up jobs of one settlement, from what the worker said to the operations that submit them.

They are not held up where submissions are (a store that is nearly full): they are a part of work under way,
which must be able to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.core.commands import Submit
from coordinator.core.follow_ups import NOTHING, Standing, admit, follow_up_job_id
from coordinator.core.job import Job
from coordinator.core.machine import Refusal
from coordinator.core.queue_settings import QueueSettings
from coordinator.errors import Reason, RequestError
from coordinator.ports import Operation, Spec
from coordinator.services.api import NewJob
from coordinator.services.commits import operation_of
from coordinator.services.digests import job_digest

__all__ = ["FollowUps"]


class FollowUps:
    """What is to be submitted with one completion, and what is known to stand where they want to be.

    Args:
        namespace: the completing job's, and theirs.
        parent: id of the completing job.
        token: its fencing token.
        jobs: what the worker said.
        submit_ms: their submit time, Unix milliseconds.
        counter: gives each its place among jobs of one rank.
        settings: (namespace, queue) → what jobs take where they leave it out, None for nothing.

    Raises:
        RequestError: VALIDATION_FAILED, two of them have one id, or one has its parent's.
    """

    def __init__(
        self,
        namespace: str,
        parent: str,
        token: int,
        jobs: Sequence[NewJob],
        *,
        submit_ms: int,
        counter: Callable[[], int],
        settings: Callable[[str, str], QueueSettings | None] = lambda namespace, queue: None,
    ) -> None:
        self.jobs = jobs
        self._commands = [
            Submit(
                namespace=namespace,
                job_id=job.job_id or follow_up_job_id(namespace, parent, token, place),
                terms=job.terms(
                    submit_ms=submit_ms,
                    counter=counter(),
                    digest=job_digest(job),
                    request_digest=b"",
                    settings=settings(namespace, job.queue),
                ),
                run_at_ms=job.run_at_ms,
            )
            for place, job in enumerate(jobs)
        ]
        ids = {command.job_id for command in self._commands}
        if len(ids) != len(jobs) or parent in ids:
            raise RequestError(
                Reason.VALIDATION_FAILED,
                "two follow-up jobs have the same id, or one has the id of the job that completes",
                metadata={"job_id": parent},
            )
        self._found: list[Standing] = [NOTHING] * len(jobs)
        self._sent: tuple[int, ...] = ()

    def operations(self, parent: Job, now_ms: int, deadline: float) -> tuple[Operation, ...] | Refusal:
        """What submits those that are not there yet; a refusal if one of them cannot be."""
        admitted = admit(parent, self._commands, self._found, now_ms)
        if isinstance(admitted, Refusal):
            return admitted
        self._sent = tuple(admitted)
        return tuple(
            operation_of(
                None,
                decision,
                deadline,
                spec=Spec(payload=self.jobs[place].payload, content_type=self.jobs[place].content_type),
            )
            for place, decision in admitted.items()
        )

    def met(self, found: Sequence[Standing]) -> None:
        """What the commit that lost met where those that it was to submit want to be."""
        for place, standing in zip(self._sent, found, strict=False):  # none, if it was not looked
            self._found[place] = standing
