"""One run of the demo: servers, workers, jobs, faults, and at the end what etcd and the SQLite file say."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.cli.demo_control import FREEZE, KILL, Control
from coordinator.cli.demo_faults import FaultTimes, freeze_one, kill_one
from coordinator.cli.demo_input import Unit
from coordinator.cli.demo_ledger import Ledger, Summary, summarize
from coordinator.cli.demo_sink import Sink, SinkReading, read_sink
from coordinator.cli.demo_view import DemoView, Scene, WorkerLine
from coordinator.cli.demo_worker import QUEUE, TYPE
from coordinator.cli.demo_workers import Crew, CrewConfig
from coordinator.cli.dev_servers import CoordinatorProcess, running_etcd
from coordinator.etcd.client import EtcdClient, EtcdConfig
from worker_sdk import JobClient, JobSpec, JobState

__all__ = ["DemoConfig", "DemoFailed", "run_demo"]

NAMESPACE = "demo"
_WATCHED = frozenset({JobState.PENDING, JobState.DEAD, JobState.QUARANTINED})


class DemoFailed(RuntimeError):
    """The demo could not be carried through; the message says at which point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What to run.

    Args:
        folder: for data, logs and the SQLite file; must exist.
        input_folder: below which the files lie.
        workers: worker processes.
        session_ttl: of the workers, seconds.
        limit: seconds after which the run is given up.
        look: seconds between two looks at etcd and the SQLite file.
        times: see `FaultTimes`.
    """

    folder: Path
    input_folder: Path
    workers: int = 4
    session_ttl: float = 3.0
    limit: float = 240.0
    look: float = 0.2
    times: FaultTimes = field(default_factory=FaultTimes)


@dataclass(slots=True, kw_only=True)
class _Run:
    """The parts of a run, and what the watch has seen of recoveries."""

    config: DemoConfig
    units: Sequence[Unit]
    sink_path: Path
    crew: Crew
    ledger: Ledger
    view: DemoView
    recovered: set[str] = field(default_factory=set)
    sessions: dict[str, str] = field(default_factory=dict)


def run_demo(
    config: DemoConfig, units: Sequence[Unit], view: DemoView, clock: Callable[[], float] = time.monotonic
) -> tuple[Summary, SinkReading]:
    """Run the demo from the first server to the last; nothing runs any more when it returns or raises.

    Args:
        config: see `DemoConfig`.
        units: the jobs, in order; their ids must differ.
        view: what people see.
        clock: seconds, never falling.

    Raises:
        DemoFailed: something did not come about in time, or a worker ended by itself.
        MissingExtra: there is no embedded etcd.
        ChildStartError: a server did not come up.
    """
    folder = config.folder
    sink_path = folder / "effects.sqlite"
    Sink.create(sink_path)
    control_folder = folder / "control"
    control_folder.mkdir()
    with running_etcd(folder / "etcd") as etcd, CoordinatorProcess(etcd.endpoint, folder) as coordinator:
        version = ".".join(map(str, etcd.version()))
        view.tell(f"etcd {version} at {etcd.endpoint}, coordinator at {coordinator.endpoint}")
        crew_config = CrewConfig(
            endpoint=coordinator.endpoint,
            namespace=NAMESPACE,
            input_folder=config.input_folder,
            sink=sink_path,
            control=control_folder,
            logs=folder,
            session_ttl=config.session_ttl,
        )
        with Crew(crew_config, config.workers) as crew:
            return asyncio.run(
                _run(config, units, view, crew, crew_config, etcd.endpoint, clock), debug=False
            )


async def _run(
    config: DemoConfig,
    units: Sequence[Unit],
    view: DemoView,
    crew: Crew,
    crew_config: CrewConfig,
    etcd: str,
    clock: Callable[[], float],
) -> tuple[Summary, SinkReading]:
    control = Control(crew_config.control)
    async with (
        EtcdClient(EtcdConfig(endpoints=(etcd,))) as client,
        JobClient(crew_config.endpoint, namespace=NAMESPACE) as jobs,
    ):
        ledger = Ledger(client, NAMESPACE)
        run = _Run(
            config=config, units=units, sink_path=crew_config.sink, crew=crew, ledger=ledger, view=view
        )
        for ticket in (KILL, FREEZE):
            control.lay_ticket(ticket, len(units) // 2)
        try:
            async with asyncio.timeout(config.limit):
                watching = asyncio.create_task(_watch(run, jobs), name="demo watch")
                showing = asyncio.create_task(_show(run), name="demo view")
                try:
                    start = clock()
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(_submit(run, jobs))
                        tasks.create_task(kill_one(crew, control, view.tell, config.times))
                        tasks.create_task(freeze_one(crew, control, ledger, view.tell, config.times))
                        finished = tasks.create_task(_finished(run, clock))
                    seconds = finished.result() - start
                finally:
                    await _cancel(watching, showing)
        except TimeoutError as error:
            raise DemoFailed("the run did not end in time") from error
        except ExceptionGroup as group:
            raise DemoFailed("; ".join(_leaves(group))) from group
        await asyncio.to_thread(crew.stop)
        records = await ledger.jobs()
        reading = read_sink(crew_config.sink)
        view.show(_scene(run, reading, {}))
        return summarize([unit.unit_id for unit in units], records, reading, seconds), reading


async def _submit(run: _Run, jobs: JobClient) -> None:
    specs = (
        JobSpec(
            queue=QUEUE,
            type=TYPE,
            job_id=unit.unit_id,
            payload=unit.to_payload(number),
            content_type="application/json",
        )
        for number, unit in enumerate(run.units)
    )
    results = await jobs.submit_many(specs)
    refused = [result for result in results if result.error is not None]
    if refused:
        raise DemoFailed(f"{len(refused)} jobs were refused, the first with {refused[0].error}")
    run.view.tell(f"submitted {len(run.units)} jobs")


async def _finished(run: _Run, clock: Callable[[], float]) -> float:
    """When the last job ended: rows for all, then no claims, then every record terminal."""
    while True:
        broken = run.crew.broken()
        if broken:
            raise DemoFailed(f"worker {broken[0].name} ended by itself; see {broken[0].log}")
        if len(read_sink(run.sink_path).rows) == len(run.units) and not await run.ledger.claims():
            now = clock()
            records = await run.ledger.jobs()
            if len(records) >= len(run.units) and all(job.terminal for job in records.values()):
                return now
        await asyncio.sleep(run.config.look / 4)


async def _watch(run: _Run, jobs: JobClient) -> None:
    """Tell of every job that comes back because its holder is gone."""
    async for change in jobs.watch():
        job = change.job
        if job is not None and job.lease_losses and job.job_id not in run.recovered:
            run.recovered.add(job.job_id)
            run.view.tell(f"{job.job_id} is back: its holder's session has ended")


async def _show(run: _Run) -> None:
    while True:
        claims = await run.ledger.claims()
        if any(claim.session not in run.sessions for claim in claims.values()):
            run.sessions.update(await run.ledger.sessions())
        holds: dict[str, list[str]] = {}
        for job_id, claim in claims.items():
            holds.setdefault(run.sessions.get(claim.session, claim.session), []).append(job_id)
        run.view.show(_scene(run, read_sink(run.sink_path), holds))
        await asyncio.sleep(run.config.look)


def _scene(run: _Run, reading: SinkReading, holds: dict[str, list[str]]) -> Scene:
    return Scene(
        total=len(run.units),
        done=len(reading.rows),
        recoveries=len(run.recovered),
        refused=len(reading.refused),
        workers=[
            WorkerLine(name=one.name, pid=one.pid, state=one.state, holds=sorted(holds.get(one.name, ())))
            for one in run.crew
        ],
    )


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    """End the tasks that only show things; what went wrong in one of them is raised."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterable[str]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        elif isinstance(error, DemoFailed):
            yield str(error)
        else:
            yield f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
