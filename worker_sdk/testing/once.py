"""`run_once`: one run of a handler as a worker makes it, without any coordinator."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypedDict, Unpack

from leasekeeper.v1 import types_pb2 as types
from worker_sdk._claims import ClaimBook, HeldClaim
from worker_sdk._convert.jobs import job_from
from worker_sdk._handlers import HandlerTable, PoolName, bind_process
from worker_sdk._machine import ClaimPhase
from worker_sdk._outcome import from_exception, from_result, with_follow_ups
from worker_sdk._payloads import json_bytes
from worker_sdk._seams import boottime
from worker_sdk._work import ClaimedJob, Completed, Failed, Released, StopReason
from worker_sdk._work import Outcome as Ending
from worker_sdk.context import Context, ContextHost, SyncContext
from worker_sdk.errors import ConfigError
from worker_sdk.jobs import JobSpec, Progress
from worker_sdk.process_context import ProcessContext

__all__ = ["Facts", "Outcome", "run_once", "run_once_async"]

_NEVER = float("inf")


class Facts(TypedDict, total=False):
    """What else the handler reads of its job. Spans are seconds."""

    job_id: str
    queue: str
    type: str
    attempt: int
    fencing_token: int
    content_type: str
    labels: Mapping[str, str]
    checkpoint: bytes
    run_timeout: float
    priority: int
    failures: int
    max_retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one run ended, and what it asked for on the way.

    Attributes:
        kind: ``lost``: its claim was lost, and there is nothing to report.
        result, content_type: of a success.
        failure_type, failure_message: of a failure.
        retry_delay: seconds that a `Retry` asked for; None: what the job's policy says.
        no_retry: the failure makes the job DEAD, whatever its policy says.
        reason: why it was released.
        error: what the handler raised, as it was raised.
        checkpoints, progress: all that it stored and told, oldest first.
        follow_ups: jobs that are submitted with its success.
    """

    kind: Literal["succeeded", "failed", "released", "lost"]
    result: bytes = b""
    content_type: str = ""
    failure_type: str = ""
    failure_message: str = ""
    retry_delay: float | None = None
    no_retry: bool = False
    reason: str = ""
    error: BaseException | None = None
    checkpoints: tuple[bytes, ...] = ()
    progress: tuple[Progress, ...] = ()
    follow_ups: tuple[JobSpec, ...] = ()

    def json(self) -> Any:
        """The result, read as JSON.

        Raises:
            ValueError: it is none.
        """
        return json.loads(self.result)


class _Recording(HeldClaim):
    """A claim that nobody takes away, and that remembers every progress."""

    __slots__ = ("told",)

    def __init__(self, job: ClaimedJob) -> None:
        self.told: list[Progress] = []
        super().__init__(job, _NEVER, ClaimPhase.RUNNING)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "progress" and value is not None:
            self.told.append(Progress(*value))
        super().__setattr__(name, value)


def run_once(
    handler: Callable[..., Any],
    payload: object = b"",
    *,
    pool: PoolName | None = None,
    stop: str = "",
    **facts: Unpack[Facts],
) -> Outcome:
    """Run a handler once and say how its attempt would end.

    Payload, pool, return value and exceptions are treated as by a worker, see `Worker.handler`.

    Args:
        handler: ``async def`` or plain, as it is registered.
        payload: bytes as they are, a text in UTF-8, anything else as JSON.
        pool: where it runs; ``process`` gives it a `ProcessContext`, in a thread of this process.
        stop: why it is told to stop as soon as it waits: ``cancelled``, ``lost``, ``run_timeout`` or
            ``worker_shutdown``; empty: it is not.
        facts: what else it reads of its job.

    Raises:
        ConfigError: a handler that a worker would not take; or an event loop runs here: await
            `run_once_async`.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run_once_async(handler, payload, pool=pool, stop=stop, **facts))
    raise ConfigError("an event loop runs in this thread: await run_once_async")


async def run_once_async(
    handler: Callable[..., Any],
    payload: object = b"",
    *,
    pool: PoolName | None = None,
    stop: str = "",
    **facts: Unpack[Facts],
) -> Outcome:
    """`run_once` on the running event loop."""
    try:
        reason = StopReason(stop) if stop else None
    except ValueError:
        known = ", ".join(one.value for one in StopReason)
        raise ConfigError(f"stop is {stop!r}: one of {known}") from None
    return await _Run(handler, _job(payload, facts), pool, reason).outcome()


def _job(payload: object, facts: Facts) -> ClaimedJob:
    if isinstance(payload, bytes | bytearray | memoryview):
        data = bytes(payload)
    else:
        data = payload.encode() if isinstance(payload, str) else json_bytes(payload)
    return ClaimedJob(
        job_id=facts.get("job_id", "job-1"),
        fencing_token=facts.get("fencing_token", (1 << 44) | 1),
        queue=facts.get("queue", "default"),
        type=facts.get("type", "test"),
        attempt=facts.get("attempt", 1),
        payload=data,
        content_type=facts.get("content_type", ""),
        labels=facts.get("labels", {}),
        checkpoint=facts.get("checkpoint", b""),
        run_timeout=facts.get("run_timeout"),
        heartbeat_timeout=None,
        due_time=None,
        submit_time=datetime.now(UTC),
        priority=facts.get("priority", 3),
        failures=facts.get("failures", 0),
        max_retries=facts.get("max_retries", 5),
    )


class _Run:
    """One run under way, on the running event loop."""

    def __init__(
        self, handler: Callable[..., Any], job: ClaimedJob, pool: PoolName | None, stop: StopReason | None
    ) -> None:
        table = HandlerTable()
        table.add(job.type, handler, (), pool)
        registered = table.get(job.type)
        assert registered is not None, "it was added"
        self._handler = registered
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._claim = _Recording(job)
        self._checkpoints: list[bytes] = []
        self._error: BaseException | None = None
        self._host = ContextHost(
            book=ClaimBook(),
            now=boottime,
            loop=self._loop,
            pid=os.getpid(),
            save_checkpoint=self._save,
            call_timeout=20.0,
        )

    async def _save(self, claim: HeldClaim, data: bytes, timeout: float) -> None:
        self._checkpoints.append(bytes(data))

    async def outcome(self) -> Outcome:
        """Run it to its end."""
        task = self._loop.create_task(self._run())
        timers = []
        job = self._claim.job
        if job.run_timeout is not None:
            self._claim.run_until = boottime() + job.run_timeout
            timers.append(self._loop.call_later(job.run_timeout, self._tell, StopReason.RUN_TIMEOUT, task))
        if self._stop is not None:
            timers.append(self._loop.call_later(0, self._tell, self._stop, task))
        try:
            await asyncio.wait({task})
        finally:
            for timer in timers:
                timer.cancel()
            task.cancel()
        return self._told(task.result())

    def _tell(self, reason: StopReason, task: asyncio.Task[Ending | None]) -> None:
        if reason is StopReason.LOST:
            self._claim.phase = ClaimPhase.LOST
        self._claim.tell(reason)
        if self._handler.on_loop is not None:
            task.cancel()

    async def _run(self) -> Ending | None:
        try:
            ending: Ending = from_result(await self._call())
        except BaseException as error:  # noqa: BLE001  as a worker does: nothing escapes a handler
            self._error = error
            return from_exception(error, self._claim.stop_reason)
        return with_follow_ups(ending, self._claim.follow_ups)

    async def _call(self) -> object:
        handler = self._handler
        if handler.on_loop is not None:
            return await handler.on_loop(Context(self._claim, self._host))
        if handler.in_thread is not None:
            return await asyncio.to_thread(handler.in_thread, SyncContext(self._claim, self._host))
        assert handler.in_process is not None, "it runs somewhere"
        context = self._process_context()
        self._claim.follow_ups = context.follow_ups
        return await asyncio.to_thread(bind_process(handler.in_process), context)

    def _process_context(self) -> ProcessContext:
        job, inner = self._claim.job, SyncContext(self._claim, self._host)

        def tell(progress: tuple[float, str] | None) -> None:
            if progress is None:
                inner.check()
            else:
                inner.progress(*progress)

        def save(data: bytes, timeout: float | None) -> None:
            inner.save_checkpoint(data, timeout=timeout)

        return ProcessContext(
            job_id=job.job_id,
            fencing_token=job.fencing_token,
            queue=job.queue,
            type=job.type,
            attempt=job.attempt,
            payload=job.payload,
            content_type=job.content_type,
            labels=job.labels,
            checkpoint=job.checkpoint,
            failures=job.failures,
            max_retries=job.max_retries,
            run_until=self._claim.run_until,
            tell=tell,
            save=save,
        )

    def _told(self, ending: Ending | None) -> Outcome:
        asked: dict[str, Any] = {
            "error": self._error,
            "checkpoints": tuple(self._checkpoints),
            "progress": tuple(self._claim.told),
        }
        match ending:
            case Completed():
                follow_ups = tuple(map(_spec, ending.follow_ups))
                return Outcome(
                    kind="succeeded",
                    result=ending.result,
                    content_type=ending.content_type,
                    follow_ups=follow_ups,
                    **asked,
                )
            case Failed():
                return Outcome(
                    kind="failed",
                    failure_type=ending.type,
                    failure_message=ending.message,
                    retry_delay=ending.delay,
                    no_retry=ending.no_retry,
                    **asked,
                )
            case Released():
                return Outcome(kind="released", reason=ending.reason, **asked)
        return Outcome(kind="lost", **asked)


def _spec(encoded: bytes) -> JobSpec:
    spec = types.JobSpec.FromString(encoded)
    return job_from(types.Job(job_id=spec.job_id, spec=spec, state=types.JOB_STATE_PENDING)).spec
