"""The methods of JobService on the fake's world. Each is called with the stage's lock held."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Final
from urllib.parse import quote

from coordinator.core.commands import Cancel, Command, Delete, Retry, Submit, Update
from coordinator.core.job import FAILED, Job, JobState
from coordinator.core.machine import Decision, Refusal, Unchanged
from leasekeeper.v1 import job_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types
from worker_sdk.testing import _job_forms as forms
from worker_sdk.testing import _messages as messages
from worker_sdk.testing._fields import duration_ms
from worker_sdk.testing._refusals import Field, Refused, not_found, refused_by, to_status
from worker_sdk.testing._stage import Call, Stage
from worker_sdk.testing._world import Record, Spec, Taken

__all__ = ["JobCalls", "WatchStream"]

_DEFAULT_PAGE: Final = 100


class JobCalls:
    """JobService.

    Args:
        stage: where it plays.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._world = stage.world

    # -- submitting

    def submit_job(self, request: pb.SubmitJobRequest, call: Call) -> pb.SubmitJobResponse:
        """SubmitJob."""
        forms.check_submit(request)
        record, created = self._submit(request, request.job, 0)
        return pb.SubmitJobResponse(
            job_id=record.job.job_id,
            created=created,
            state=messages.state(record.job.state),
            etag=str(record.revision),
        )

    def submit_jobs(self, request: pb.SubmitJobsRequest, call: Call) -> pb.SubmitJobsResponse:
        """SubmitJobs."""
        errors = forms.check_jobs(request)
        self._check_made_ids(request)
        results = []
        for item, (spec, error) in enumerate(zip(request.jobs, errors, strict=True)):
            try:
                if error is not None:
                    raise error
                record, created = self._submit(request, spec, item)
            except Refused as refused:
                results.append(pb.SubmitResult(job_id=spec.job_id, error=to_status(refused)))
                continue
            results.append(
                pb.SubmitResult(
                    job_id=record.job.job_id,
                    created=created,
                    state=messages.state(record.job.state),
                    etag=str(record.revision),
                )
            )
        return pb.SubmitJobsResponse(results=results)

    def _id_of(self, namespace: str, request_id: str, spec: types.JobSpec, item: int) -> str:
        return spec.job_id or messages.made_job_id(_ns(namespace), request_id, item)

    def _check_made_ids(self, request: pb.SubmitJobsRequest) -> None:
        ids = [
            self._id_of(request.namespace, request.request_id, spec, item)
            for item, spec in enumerate(request.jobs)
        ]
        twice = [item for item, job_id in enumerate(ids) if ids.count(job_id) > 1]
        if twice:
            told = "{!r} stands in this call more than once"
            raise Refused(
                "VALIDATION_FAILED",
                "two jobs of one call have the same id",
                fields=[Field(f"jobs[{item}].job_id", told.format(ids[item])) for item in twice],
            )

    def _submit(
        self, request: pb.SubmitJobRequest | pb.SubmitJobsRequest, spec: types.JobSpec, item: int
    ) -> tuple[Record, bool]:
        namespace = _ns(request.namespace)
        terms = messages.terms_of(
            spec,
            submit_ms=self._world.now_ms,
            counter=self._world.next_counter(),
            request_id=request.request_id,
        )
        job_id = self._id_of(namespace, request.request_id, spec, item)
        new = (namespace, job_id) not in self._world.records
        command = Submit(namespace=namespace, job_id=job_id, terms=terms, run_at_ms=terms.run_at_ms)
        stored = self._world.submit(command, Spec(spec.payload, spec.content_type))
        if isinstance(stored, Refusal):
            raise refused_by(stored)
        if isinstance(stored, Taken):
            owner = self._world.records[namespace, stored.owner].job
            raise Refused(
                "DUPLICATE_JOB",
                f"its unique key belongs to job {stored.owner}",
                metadata={
                    "job_id": stored.owner,
                    "unique_key": terms.unique_key,
                    "state": owner.state.name,
                    "same_content": str(owner.terms.digest == terms.digest).lower(),
                },
            )
        return stored, new

    # -- reading

    def get_job(self, request: pb.GetJobRequest, call: Call) -> pb.GetJobResponse:
        """GetJob."""
        forms.check_named(request)
        return pb.GetJobResponse(job=messages.job_message(self._find(request.namespace, request.job_id)))

    def list_attempts(self, request: pb.ListAttemptsRequest, call: Call) -> pb.ListAttemptsResponse:
        """ListAttempts."""
        forms.check_named(request)
        return messages.attempts_message(self._find(request.namespace, request.job_id))

    def list_jobs(self, request: pb.ListJobsRequest, call: Call) -> pb.ListJobsResponse:
        """ListJobs."""
        forms.check_list(request)
        said = (_ns(request.namespace), sorted(request.states), request.queue, request.type)
        mark = _mark(*said, sorted(request.labels.items()))
        after = _position(request.page_token, mark)
        matching = [
            record
            for record in self._in_order(request.namespace, after)
            if _matches(record.job, request.states, request.queue, request.type, request.labels)
        ]
        size = request.page_size or _DEFAULT_PAGE
        page = matching[:size]
        more = len(matching) > size
        return pb.ListJobsResponse(
            jobs=[messages.listed_message(record.job, record.revision) for record in page],
            next_page_token=f"{mark}.{_place(page[-1])}" if more else "",
        )

    def _in_order(self, namespace: str, after: str) -> list[Record]:
        found = (record for record in self._world.of_namespace(_ns(namespace)) if _place(record) > after)
        return sorted(found, key=_place)

    def wait_job(self, request: pb.WaitJobRequest, call: Call) -> pb.WaitJobResponse:
        """WaitJob."""
        forms.check_wait(request)
        wanted = duration_ms(request.timeout) if request.HasField("timeout") else forms.LONGEST_WAIT_MS
        now = time.monotonic()
        until = now + min(wanted / 1000, max(0.0, call.deadline - now) * 0.9)
        while True:
            record = self._find(request.namespace, request.job_id)
            finished = record.job.terminal
            if finished or not self._stage.wait(call, until):
                # Read again: it may have ended in the very moment in which the time was up.
                record = self._find(request.namespace, request.job_id)
                return pb.WaitJobResponse(job=messages.job_message(record), finished=record.job.terminal)

    def watch_jobs(self, request: pb.WatchJobsRequest, call: Call) -> WatchStream:
        """WatchJobs."""
        forms.check_watch(request)
        return WatchStream(self._stage, request)

    # -- changing

    def cancel_job(self, request: pb.CancelJobRequest, call: Call) -> pb.CancelJobResponse:
        """CancelJob."""
        forms.check_cancel(request)
        record = self._find(request.namespace, request.job_id)
        token = record.claim.token if record.claim is not None else 0
        self._change(record, Cancel(reason=messages.cut(request.reason), token=token), "")
        return pb.CancelJobResponse(job=messages.job_message(record, whole=False))

    def update_job(self, request: pb.UpdateJobRequest, call: Call) -> pb.UpdateJobResponse:
        """UpdateJob."""
        forms.check_update(request)
        record = self._find(request.namespace, request.job_id)
        command = Update(
            priority=request.priority or None,
            due_ms=messages.optional_ms(request.due_time, request.HasField("due_time")) or None,
            run_at_ms=messages.optional_ms(request.run_at, request.HasField("run_at")) or None,
        )
        self._change(record, command, request.etag)
        return pb.UpdateJobResponse(job=messages.job_message(record, whole=False))

    def delete_job(self, request: pb.DeleteJobRequest, call: Call) -> pb.DeleteJobResponse:
        """DeleteJob."""
        forms.check_delete(request)
        self._change(self._find(request.namespace, request.job_id), Delete(), request.etag)
        return pb.DeleteJobResponse()

    def retry_job(self, request: pb.RetryJobRequest, call: Call) -> pb.RetryJobResponse:
        """RetryJob."""
        forms.check_retry(request)
        record = self._find(request.namespace, request.job_id)
        run_at_ms = messages.optional_ms(request.run_at, request.HasField("run_at"))
        command = Retry(run_at_ms=run_at_ms, digest=messages.request_digest(request.request_id))
        self._change(record, command, request.etag, self._check_owner)
        return pb.RetryJobResponse(job=messages.job_message(record, whole=False))

    def redrive_jobs(self, request: pb.RedriveJobsRequest, call: Call) -> pb.RedriveJobsResponse:
        """RedriveJobs, without its pace: the fake's time does not pass in a call."""
        forms.check_redrive(request)
        states: list[int] = [*request.states] or [state.value for state in FAILED]
        before = messages.optional_ms(request.settled_before, request.HasField("settled_before"))
        said = (_ns(request.namespace), sorted(request.states), request.queue, request.type)
        mark = _mark(*said, sorted(request.labels.items()), request.failure_type, before)
        command = Retry(digest=messages.request_digest(request.request_id))
        answer = pb.RedriveJobsResponse()
        taken, last = 0, ""
        for record in self._in_order(request.namespace, _position(request.page_token, mark)):
            if taken == (request.max_jobs or _DEFAULT_PAGE):
                answer.next_page_token = f"{mark}.{last}"
                break
            answer.examined += 1
            last = _place(record)
            job = record.job
            if not _matches(job, states, request.queue, request.type, request.labels):
                continue
            failed = job.last_failed
            if request.failure_type and (failed is None or failed.failure_type != request.failure_type):
                continue
            if before and job.settle_ms >= before:
                continue
            if not isinstance(self._world.decide(record, command), Decision):
                continue
            taken += 1
            try:
                if not request.validate_only:
                    self._change(record, command, "", self._check_owner)
            except Refused as refused:
                answer.failures.add(job_id=job.job_id, error=to_status(refused))
            else:
                answer.job_ids.append(job.job_id)
        return answer

    def _change(
        self, record: Record, command: Command, etag: str, check: Callable[[Record], None] | None = None
    ) -> None:
        outcome = self._world.decide(record, command)
        if isinstance(outcome, Unchanged):
            return
        if etag and etag != str(record.revision):
            raise Refused(
                "ETAG_MISMATCH",
                "the job has changed since; read it again",
                metadata={"job_id": record.job.job_id, "etag": str(record.revision)},
                retry_after_ms=0,
            )
        if isinstance(outcome, Refusal):
            raise refused_by(outcome)
        if check is not None:
            check(record)
        self._world.act(record, command)

    def _check_owner(self, record: Record) -> None:
        """A retried job wants its unique key back."""
        job = record.job
        owner = self._world.owner_of(job.namespace, job.terms.queue, job.terms.unique_key)
        if owner and owner != job.job_id:
            raise Refused(
                "DUPLICATE_JOB",
                f"its unique key belongs to job {owner} by now",
                metadata={"job_id": owner, "unique_key": job.terms.unique_key},
            )

    def _find(self, namespace: str, job_id: str) -> Record:
        record = self._world.records.get((_ns(namespace), job_id))
        if record is None:
            raise not_found(job_id)
        return record


class WatchStream:
    """One WatchJobs under way."""

    def __init__(self, stage: Stage, request: pb.WatchJobsRequest) -> None:
        self._stage = stage
        self._request = request
        world = stage.world
        self._start = request.resume_revision or world.revision
        self._next = len(world.changes)
        if request.resume_revision:
            self._next = next(
                (n for n, one in enumerate(world.changes) if one.revision > request.resume_revision),
                self._next,
            )

    def messages(self, call: Call) -> Iterator[pb.WatchJobsResponse]:
        """What it says, until its caller goes. Takes the lock itself, and holds it never while it says it.

        Raises:
            Unreachable: the network was cut.
        """
        yield pb.WatchJobsResponse(revision=self._start)
        while True:
            with self._stage.changed:
                batch = self._batch()
                if not batch and not self._stage.wait(call, call.deadline):
                    return
            yield from batch

    def _batch(self) -> list[pb.WatchJobsResponse]:
        request, changes = self._request, self._stage.world.changes
        said = []
        for change in changes[self._next :]:
            if change.namespace != _ns(request.namespace):
                continue
            if request.job_ids and change.job_id not in request.job_ids:
                continue
            if change.job is None:
                gone = types.Job(namespace=change.namespace, job_id=change.job_id)
                said.append(pb.WatchJobsResponse(revision=change.revision, job=gone, deleted=True))
            elif _matches(change.job, request.states, request.queue, request.type, {}):
                told = messages.listed_message(change.job, change.revision)
                said.append(pb.WatchJobsResponse(revision=change.revision, job=told))
        self._next = len(changes)
        return said


def _ns(namespace: str) -> str:
    return namespace or "default"


def _matches(job: Job, states: Iterable[int], queue: str, type_: str, labels: Mapping[str, str]) -> bool:
    terms = job.terms
    wanted = {JobState(state) for state in states}
    return (
        (not wanted or job.state in wanted)
        and (not queue or terms.queue == queue)
        and (not type_ or terms.type == type_)
        and all(terms.labels.get(key) == value for key, value in labels.items())
    )


def _place(record: Record) -> str:
    """Where a list has it: in the order of the service, by a hash of the id and then by the id."""
    part = quote(record.job.job_id, safe="")
    return f"{zlib.crc32(part.encode()) & 0xFF:02x}/{part}"


def _mark(*said: object) -> str:
    return sha256(repr(said).encode()).hexdigest()[:12]


def _position(cursor: str, mark: str) -> str:
    if not cursor:
        return ""
    made_for, dot, position = cursor.partition(".")
    if made_for != mark or not dot or not position:
        told = "it was not made for this query"
        raise Refused("VALIDATION_FAILED", f"page_token: {told}", fields=[Field("page_token", told)])
    return position
