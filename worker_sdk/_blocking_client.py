"""`SyncJobClient`: `JobClient` for code without an event loop."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

from worker_sdk._blocking import Blocking, Iterating, LoopThread
from worker_sdk._watch import JobWatch
from worker_sdk.client import JobClient
from worker_sdk.config import ConnectionConfig
from worker_sdk.errors import ClientClosed
from worker_sdk.jobs import JobChange, JobState

__all__ = ["SyncJobClient", "SyncJobWatch"]


class SyncJobWatch:
    """`JobWatch` for code without an event loop; iterate over it, once. `close` may come from any thread."""

    def __init__(self, thread: LoopThread, make: Callable[[], JobWatch]) -> None:
        self._thread = thread
        self._watch = make()
        self._lock = threading.Lock()
        self._waiting: concurrent.futures.Future[JobChange] | None = None
        self._closed = False

    @property
    def revision(self) -> int:
        """The last revision seen; 0 before the start. Pass it to `SyncJobClient.watch` to go on later."""
        return self._watch.revision

    def ready(self) -> int:
        """Wait until the coordinator has told where the watch starts; return that revision.

        A job submitted afterwards is certainly seen.

        Raises:
            Unavailable, DeadlineExceeded: no coordinator answered in time.
        """
        return self._thread.run(self._watch.ready)

    def __iter__(self) -> Iterator[JobChange]:
        return self

    def __next__(self) -> JobChange:
        self._thread.check()
        with self._lock:
            if self._closed:
                raise StopIteration
            waiting = self._waiting = self._thread.start(self._watch.__anext__)
        try:
            return self._thread.result(waiting)
        except ClientClosed:
            if self._closed:
                raise StopIteration from None
            raise
        finally:
            self._waiting = None

    def close(self) -> None:
        """End the watch; whoever waits for a change is told that there are no more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = self._waiting
        if waiting is not None:
            waiting.cancel()
        try:
            self._thread.run(self._end)
        except ClientClosed:
            pass  # the client's end was the watch's

    async def _end(self) -> None:
        await self._watch.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SyncJobClient:
    """`JobClient` for code without an event loop: the same engine, on a loop in a thread of its own.

    May be used from any thread of the process that made it; connections and thread are made at first use.
    Arguments, results and errors are those of `JobClient`; `list` and `redrive` iterate, `watch` gives a
    `SyncJobWatch`. Where an event loop runs, calls raise `WrongEventLoop`, in a forked child `ForkedProcess`,
    after `close` `ClientClosed`.

    Args:
        endpoints: ``host:port[,host:port]``, or a whole `ConnectionConfig`.
        namespace: the namespace; not with a `ConnectionConfig`, which has its own.
    """

    def __init__(self, endpoints: str | ConnectionConfig, *, namespace: str | None = None) -> None:
        self._client = JobClient(endpoints, namespace=namespace)
        self._thread = LoopThread("leasekeeper-jobs")
        self._timeouts = ConnectionConfig.of(endpoints, namespace).timeouts

    submit = Blocking(JobClient.submit)
    submit_many = Blocking(JobClient.submit_many)
    get = Blocking(JobClient.get)
    list = Iterating(JobClient.list)
    wait = Blocking(JobClient.wait)
    cancel = Blocking(JobClient.cancel)
    retry = Blocking(JobClient.retry)
    redrive = Iterating(JobClient.redrive)
    attempts = Blocking(JobClient.attempts)
    delete = Blocking(JobClient.delete)
    update = Blocking(JobClient.update)

    def watch(
        self,
        *,
        job_ids: Iterable[str] = (),
        queue: str = "",
        type: str = "",
        states: Iterable[JobState] = (),
        resume_revision: int = 0,
        timeout: float | None = None,
    ) -> SyncJobWatch:
        """Return the changes of jobs, to iterate over; see `JobClient.watch`."""
        self._thread.check()
        return SyncJobWatch(
            self._thread,
            lambda: self._client.watch(
                job_ids=job_ids,
                queue=queue,
                type=type,
                states=states,
                resume_revision=resume_revision,
                timeout=timeout,
            ),
        )

    def close(self) -> None:
        """Close the connections and end the thread; calls under way end with `ClientClosed`."""
        self._thread.close(self._client.close, timeout=self._timeouts.close + 5.0)

    def __enter__(self) -> Self:
        self._thread.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
