"""`Worker`: claims jobs, runs their handlers, reports how they ended, and stops cleanly."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from worker_sdk._claimer import SESSION_CAPACITY
from worker_sdk._handlers import AsyncFunction, HandlerTable, PoolName, ProcessFunction, SyncFunction
from worker_sdk._seams import Seams
from worker_sdk._worker_run import RunPlan, WorkerRun
from worker_sdk.config import ConnectionConfig, WorkerConfig
from worker_sdk.errors import ConfigError, ForkedProcess
from worker_sdk.stats import WorkerHealth, WorkerStats

__all__ = ["Worker"]

F = TypeVar("F", bound=AsyncFunction | SyncFunction | ProcessFunction)


class Worker:
    """Runs the jobs of some queues with the handlers registered on it.

    ::

        worker = Worker("localhost:7420", queues={"email": 8})

        @worker.handler("email.send")
        async def send(ctx: Context) -> bytes: ...

        asyncio.run(worker.run())

    Args:
        endpoints: ``host:port[,host:port]``, or a whole `ConnectionConfig`.
        queues: names, which share *concurrency* slots, or a mapping from each name to slots of its own.
        concurrency: slots for queues given by name alone.
        namespace: the namespace; not with a `ConnectionConfig`, which has its own.
        config: times and sizes.
        seams: clock, randomness, ids.

    Raises:
        ConfigError: settings that cannot work.
    """

    def __init__(
        self,
        endpoints: str | ConnectionConfig,
        *,
        queues: Mapping[str, int] | Sequence[str],
        concurrency: int = 16,
        namespace: str | None = None,
        config: WorkerConfig | None = None,
        seams: Seams | None = None,
    ) -> None:
        self._connection = ConnectionConfig.of(endpoints, namespace)
        self._config = config or WorkerConfig()
        self._seams = seams or Seams()
        self._limits = _limits(queues, concurrency)
        self._table = HandlerTable()
        self.drain_timeout = self._config.drain_timeout
        self.stats = WorkerStats()
        self._ready = asyncio.Event()
        self._run: WorkerRun | None = None
        self._stop_early = False
        self._pid = os.getpid()

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues that it serves."""
        return tuple(queue for group in self._limits for queue in group)

    def serve(self, queues: Mapping[str, int] | Sequence[str], *, concurrency: int = 16) -> None:
        """Serve other queues, with other slots, from the next `run` on; arguments as those of the class.

        Raises:
            ConfigError: settings that cannot work.
        """
        self._limits = _limits(queues, concurrency)

    def handler(
        self, type: str, *, queues: Iterable[str] = (), pool: PoolName | None = None
    ) -> Callable[[F], F]:
        """Return a decorator that registers a function for jobs of *type*.

        It takes ``(ctx)``, or ``(ctx, payload)`` with a payload of the annotated type: bytes, str, JSON
        values, a dataclass, a model of msgspec or pydantic. A payload of another shape makes the job DEAD
        (failure ``BadPayload``). What a handler may return and raise stands in `worker_sdk.context`.

        Args:
            type: the jobs' type.
            queues: only jobs from these queues; empty: from all that the worker serves.
            pool: where it runs. An ``async def`` runs on the event loop (``loop``) and gets a `Context`; a
                plain function in a thread of the worker's own (``thread``), with a `SyncContext`, or in a
                child process (``process``), with a `ProcessContext`; the child imports it by its name.

        Raises:
            ConfigError: a bad name, a second handler for one type, a function that does not fit its pool, or
                a payload type for which there is no rule.
        """

        def register(function: F) -> F:
            self._table.add(type, function, tuple(queues), pool)
            return function

        return register

    def health(self) -> WorkerHealth:
        """Return how the worker does now, from any thread; see also `WorkerConfig.health_listen`."""
        run = self._run
        return WorkerHealth(not_ready=("the worker does not run",)) if run is None else run.health()

    @property
    def health_address(self) -> str:
        """``host:port`` at which the health of a running worker is served, or empty."""
        run = self._run
        return "" if run is None else run.health_address

    async def run(self) -> None:
        """Work until stopped: by SIGTERM, SIGINT, `stop`, or the coordinator.

        On a stop: claim nothing more; let handlers end for up to `drain_timeout` seconds; cancel the rest;
        give their jobs back uncharged; close the session. A second signal cuts the drain short. Beats go on
        until the last handler has settled.

        Raises:
            LeasekeeperError: the coordinator refuses this worker (permission, bad settings).
            ConfigError: a queue has no handler, or the worker runs already.
            ForkedProcess: the worker runs in the parent of this process.
        """
        self._refuse_fork()
        if self._run is not None:
            raise ConfigError("this worker runs already")
        for queues in self._limits:
            self._table.wanted(queues)
        self._table.check_importable()
        plan = RunPlan(
            connection=self._connection,
            config=self._config,
            drain_timeout=self.drain_timeout,
            limits=self._limits,
            table=self._table,
            stats=self.stats,
            seams=self._seams,
        )
        self._run = WorkerRun(plan, self._ready)
        self._pid = os.getpid()
        try:
            if self._stop_early:
                self._run.stop()
            await self._run.work()
        finally:
            self._run, self._stop_early, self._ready = None, False, asyncio.Event()

    def stop(self, *, now: bool = False) -> None:
        """Ask the worker to stop, as a signal does.

        *now*: without waiting for handlers. Call it on its loop.

        Raises:
            ForkedProcess: the worker runs in the parent of this process.
        """
        self._refuse_fork()
        if self._run is None:
            self._stop_early = True
        else:
            self._run.stop(now=now)

    def _refuse_fork(self) -> None:
        if self._run is not None and os.getpid() != self._pid:
            raise ForkedProcess(
                "this worker runs in the parent process, and its connections do not pass over a fork:"
                " start a program of its own, or use pool='process'"
            )

    async def ready(self) -> None:
        """Wait until the worker has a session. Call it on its loop."""
        await self._ready.wait()


def _limits(queues: Mapping[str, int] | Sequence[str], concurrency: int) -> dict[tuple[str, ...], int]:
    """Return the slots of each group of queues."""
    if isinstance(queues, str):
        raise ConfigError(f"queues is the text {queues!r}: give a list of names, or a mapping to slots")
    limits: dict[tuple[str, ...], int] = (
        {(queue,): limit for queue, limit in queues.items()}
        if isinstance(queues, Mapping)
        else {tuple(queues): concurrency}
    )
    total = sum(limits.values())
    if not all(limits) or min(limits.values(), default=0) < 1:
        raise ConfigError(f"queues is {queues!r}: give at least one queue, each with at least one slot")
    if total > SESSION_CAPACITY:
        raise ConfigError(f"{total} slots are too many for one session: at most {SESSION_CAPACITY}")
    return limits
