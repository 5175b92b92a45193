"""`FakeCoordinator`: a coordinator in this process, for tests of workers and producers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Final, Protocol, Self

from coordinator.core.commands import Cancel
from coordinator.core.machine import Refusal
from worker_sdk._convert.jobs import job_from
from worker_sdk.errors import ConfigError, DeadlineExceeded, JobNotFound
from worker_sdk.jobs import Job, JobState
from worker_sdk.testing import _messages as messages
from worker_sdk.testing import _upkeep as upkeep
from worker_sdk.testing._job_calls import JobCalls
from worker_sdk.testing._server import Server
from worker_sdk.testing._stage import Stage
from worker_sdk.testing._work_calls import WorkCalls
from worker_sdk.testing._world import Place, Record, World

__all__ = ["FakeCoordinator", "HasJobId"]

_TICK_SECONDS: Final = 0.02
_MOST_STEPS: Final = 100_000


class HasJobId(Protocol):
    """Anything that names a job: `Submitted`, `Job`, `JobSpec`, a context."""

    @property
    def job_id(self) -> str:
        """The id."""


class FakeCoordinator:
    """A coordinator whose rules are the real one's and whose store is this process's memory.

    ::

        with FakeCoordinator() as fake:
            client = JobClient(fake.endpoint)
            worker = Worker(fake.endpoint, queues=["email"])

    It serves JobService and WorkerService on a free port of 127.0.0.1, in threads of its own. Every method
    may be called from any thread. Every time in it is that of its own clock, which moves by `advance` alone:
    delays, timeouts, due times. Only the waits of calls, as of a long poll, and what contention tells
    them, are real.

    A session whose worker can reach it is taken to beat while the time is advanced; `partition` and
    `expire` end that. Jobs may name locks; there is no LockService and no work stream.

    Args:
        real_time: the clock is the wall's, and a session without beats ends after its TTL.
        start: where the clock begins; None: now.
        beat_seconds: how often workers are told to beat; None: as the service does, a third of the TTL, at
            most 5 s. The shorter, the sooner they hear that a job is cancelled or lost.
    """

    def __init__(
        self,
        *,
        real_time: bool = False,
        start: datetime | None = None,
        beat_seconds: float | None = None,
    ) -> None:
        if real_time and start is not None:
            raise ConfigError("a clock that is the wall's begins now: give real_time or start, not both")
        begin = time.time() if start is None else start.timestamp()
        self._real_time = real_time
        self._stage = Stage(World(round(begin * 1000)))
        self._jobs = JobCalls(self._stage)
        self._work = WorkCalls(self._stage)
        self._work.interval_ms = None if beat_seconds is None else round(beat_seconds * 1000)
        self._server: Server | None = None
        self._ticker: threading.Thread | None = None
        self._ended = threading.Event()

    # -- life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: it was started before.
        """
        if self._server is not None:
            raise ConfigError("this fake coordinator was started before: make another")
        self._server = Server(self._stage, self._jobs, self._work, self._catch_up)
        self._server.start()
        if self._real_time:
            self._ticker = threading.Thread(target=self._tick, name="leasekeeper-fake-clock", daemon=True)
            self._ticker.start()

    def stop(self) -> None:
        """Cut all connections. Repeating it is no error."""
        self._ended.set()
        with self._stage.changed:
            self._stage.stopped = True
            self._stage.changed.notify_all()
        if self._ticker is not None:
            self._ticker.join(5)
        if self._server is not None:
            self._server.stop()

    @property
    def endpoint(self) -> str:
        """``host:port``, for `Worker` and `JobClient`.

        Raises:
            ConfigError: it is not started.
        """
        if self._server is None:
            raise ConfigError("the fake coordinator is not started: use it in a with statement")
        return f"127.0.0.1:{self._server.port}"

    # -- time

    @property
    def now(self) -> datetime:
        """Its clock."""
        with self._stage.changed:
            self._catch_up()
            return datetime.fromtimestamp(self._stage.world.now_ms / 1000, UTC)

    def advance(self, seconds: float | timedelta) -> None:
        """Let time pass: whatever falls due on the way happens, each at its own moment.

        Raises:
            ValueError: a negative time.
            ConfigError: the clock is the wall's.
        """
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds} s")
        if self._real_time:
            raise ConfigError("the clock is the wall's (real_time): wait instead")
        with self._stage.changed:
            self._run_to(self._stage.world.now_ms + round(seconds * 1000))
            self._stage.changed.notify_all()

    def _run_to(self, until_ms: int) -> None:
        world = self._stage.world
        for _ in range(_MOST_STEPS):
            self._keep_sessions(world.now_ms)
            upkeep.step(world)
            self._keep_sessions(until_ms)
            following = upkeep.next_ms(world)
            if following is None or following > until_ms:
                break
            world.now_ms = max(world.now_ms, following)
        world.now_ms = until_ms
        self._keep_sessions(until_ms)

    def _keep_sessions(self, now_ms: int) -> None:
        if self._real_time or self._stage.cut_off:
            return
        for session in self._stage.world.sessions.values():
            session.beat_ms = now_ms

    def _catch_up(self) -> None:
        """Before each call: what is due by now is done."""
        if self._real_time:
            self._run_to(max(self._stage.world.now_ms, round(time.time() * 1000)))

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            with self._stage.changed:
                before = self._stage.world.revision
                self._catch_up()
                if self._stage.world.revision != before:
                    self._stage.changed.notify_all()

    # -- what tests do to it

    def expire(self, job: str | HasJobId, *, namespace: str = "default") -> None:
        """Let the claim on a job be lost, as if its holder's session had ended without it.

        The next beat tells the holder LOST, its settlement is refused as CLAIM_LOST, and the job runs again.

        Raises:
            JobNotFound: there is no such job.
            ValueError: nobody holds it.
        """
        with self._stage.changed:
            record = self._record(job, namespace)
            if record.claim is None:
                raise ValueError(f"job {record.job.job_id!r} is {record.job.state.name}: nobody holds it")
            upkeep.lose(self._stage.world, record)
            self._stage.changed.notify_all()

    def expire_session(self, session_id: str, *, namespace: str = "default") -> None:
        """End one session, as if its worker had died: all that it holds is lost.

        Raises:
            ValueError: there is no such session.
        """
        with self._stage.changed:
            if (namespace, session_id) not in self._stage.world.sessions:
                raise ValueError(f"there is no session {session_id!r}")
            upkeep.end_session(self._stage.world, (namespace, session_id))
            self._stage.changed.notify_all()

    def expire_sessions(self) -> None:
        """End every session, as if no worker had beaten for a TTL: all that they hold is lost."""
        with self._stage.changed:
            for place in list(self._stage.world.sessions):
                upkeep.end_session(self._stage.world, place)
            self._stage.changed.notify_all()

    def cancel(self, job: str | HasJobId, reason: str = "", *, namespace: str = "default") -> None:
        """Cancel a waiting job, or ask a running one to stop, as `JobClient.cancel` does.

        Raises:
            JobNotFound: there is no such job.
            ValueError: it has ended otherwise.
        """
        with self._stage.changed:
            record = self._record(job, namespace)
            token = record.claim.token if record.claim is not None else 0
            outcome = self._stage.world.act(record, Cancel(reason=reason, token=token))
            if isinstance(outcome, Refusal):
                raise ValueError(f"job {record.job.job_id!r} is {record.job.state.name}: {outcome.message}")
            self._stage.changed.notify_all()

    def partition(self) -> None:
        """Cut the network: every call, also one that waits, ends with UNAVAILABLE and changes nothing.

        Sessions are not heard of from here on, so they end once the time is advanced by their TTL.
        """
        with self._stage.changed:
            self._stage.cut_off = True
            self._stage.changed.notify_all()

    def heal(self) -> None:
        """End the partition."""
        with self._stage.changed:
            self._stage.cut_off = False
            self._stage.changed.notify_all()

    def pause(self, queue: str, reason: str = "", *, namespace: str = "default") -> None:
        """Hand out nothing from a queue. What runs goes on."""
        with self._stage.changed:
            self._stage.paused[namespace, queue] = reason

    def resume(self, queue: str, *, namespace: str = "default") -> None:
        """Hand out jobs of the queue again."""
        with self._stage.changed:
            self._stage.paused.pop((namespace, queue), None)
            self._stage.changed.notify_all()

    # -- what tests ask

    def job(self, job: str | HasJobId, *, namespace: str = "default") -> Job:
        """A job with all that is known of it.

        Raises:
            JobNotFound: there is no such job.
        """
        with self._stage.changed:
            self._catch_up()
            return job_from(messages.job_message(self._record(job, namespace)))

    def jobs(self, *, namespace: str = "default") -> list[Job]:
        """All jobs, in the order of their submission."""
        with self._stage.changed:
            self._catch_up()
            found = sorted(self._stage.world.of_namespace(namespace), key=_age)
            return [job_from(messages.job_message(record)) for record in found]

    @property
    def states(self) -> Mapping[str, JobState]:
        """State of every job of the default namespace by its id, in the order of their submission."""
        return {job.job_id: job.state for job in self.jobs()}

    def wait(
        self, job: str | HasJobId, *states: JobState, timeout: float = 5.0, namespace: str = "default"
    ) -> Job:
        """Wait until a job is in one of *states*, or, if none is given, has ended. Blocks this thread.

        Do not call it on the loop that runs the worker; there, await `JobClient.wait`.

        Args:
            job: which one; it may yet have to be submitted.
            timeout: real seconds.

        Raises:
            DeadlineExceeded: it did not come to that; the text says how it stands.
        """
        job_id = job if isinstance(job, str) else job.job_id
        until = time.monotonic() + timeout
        with self._stage.changed:
            while True:
                record = self._stage.world.records.get((namespace, job_id))
                if record is not None:
                    state = JobState(record.job.state.value)
                    if state in states or (not states and record.job.terminal):
                        return job_from(messages.job_message(record))
                left = until - time.monotonic()
                if left <= 0:
                    told = f"is {record.job.state.name}" if record is not None else "does not exist"
                    raise DeadlineExceeded(f"job {job_id!r} {told} after {timeout:g} s")
                self._stage.changed.wait(left)

    def _record(self, job: str | HasJobId, namespace: str) -> Record:
        job_id = job if isinstance(job, str) else job.job_id
        place: Place = (namespace, job_id)
        record = self._stage.world.records.get(place)
        if record is None:
            raise JobNotFound(
                f"there is no job {job_id!r}", reason="JOB_NOT_FOUND", metadata={"job_id": job_id}
            )
        return record


def _age(record: Record) -> tuple[int, int]:
    return record.job.terms.submit_ms, record.job.terms.counter
