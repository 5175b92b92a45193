"""What a test asks of the stores: where jobs stand now, and at the end the judgement."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from coordinator.core.job import TERMINAL, Job
from coordinator.errors import StorageError
from coordinator.etcd.client import EtcdClient, EtcdConfig
from coordinator.etcd.job_codec import JobCodec
from coordinator.etcd.keys import KeySpace
from tests.fault.support.checker import Judgement, judge
from tests.fault.support.history import History, read_history
from tests.fault.support.sink import Sink, SinkReading
from tests.support.polling import eventually

__all__ = ["Court", "metric"]

_TIMEOUT = 5.0


class Court:
    """Reads one namespace straight from etcd, and its sink.

    Args:
        endpoints: of etcd itself, never of a proxy.
        namespace: whose jobs.
        sink: where handlers write; made, and judged, once it has been asked for.
    """

    def __init__(self, endpoints: Sequence[str], namespace: str, sink: Path) -> None:
        self.endpoints = tuple(endpoints)
        self.namespace = namespace
        self.keys = KeySpace().namespace(namespace)
        self._sink_path = sink
        self._sink: Sink | None = None
        self._codec = JobCodec()
        self._kept: History | None = None

    @property
    def sink(self) -> Sink:
        """The sink, for workers."""
        if self._sink is None:
            self._sink = Sink(self._sink_path).create()
        return self._sink

    @asynccontextmanager
    async def etcd(self) -> AsyncIterator[EtcdClient]:
        """A client of our own."""
        async with EtcdClient(EtcdConfig(endpoints=self.endpoints)) as client:
            yield client

    def read(self) -> SinkReading:
        """What the sink says."""
        return self.sink.read()

    async def jobs(self, client: EtcdClient) -> dict[str, Job]:
        """Every job as it stands."""
        start, end = self.keys.all_states()
        found = await client.range(start, end, timeout=_TIMEOUT)
        jobs = {}
        for entry in found.kvs:
            job_id = self.keys.parse_state(entry.key)
            jobs[job_id] = self._codec.decode(self.namespace, job_id, entry.value)
        return jobs

    async def ended(self, job_ids: Iterable[str], *, timeout: float) -> dict[str, Job]:
        """All jobs, once *job_ids* are in a terminal state.

        Raises:
            AssertionError: not within *timeout* seconds; it names a few that are not.
        """
        wanted = list(job_ids)
        last: dict[str, Job] = {}

        async def all_ended() -> bool:
            nonlocal last
            try:
                last = await self.jobs(client)
            except StorageError:
                return False
            return all(job_id in last and last[job_id].state in TERMINAL for job_id in wanted)

        async with self.etcd() as client:
            try:
                await eventually(all_ended, timeout=timeout, interval=0.1, what="all jobs ended")
            except AssertionError:
                open_jobs = {
                    job_id: last[job_id].state.name if job_id in last else "nowhere"
                    for job_id in wanted
                    if job_id not in last or last[job_id].state not in TERMINAL
                }
                first = [last[job_id] for job_id in list(open_jobs)[:2] if job_id in last]
                raise AssertionError(
                    f"{len(open_jobs)} of {len(wanted)} have not ended after {timeout} s: "
                    f"{dict(list(open_jobs.items())[:10])}; {first}"
                ) from None
        return last

    async def judge(
        self,
        *,
        submitted: Iterable[str] | None = None,
        by_hand: Iterable[str] = (),
        raw: Iterable[str] = (),
        quiet: bool = True,
    ) -> Judgement:
        """The judgement, which must be clean; see `judge`. Effects count where a worker has the sink."""
        history = await self.history()
        reading = None if self._sink is None else await asyncio.to_thread(self._sink.read)
        return judge(history, reading, submitted=submitted, by_hand=by_hand, raw=raw, quiet=quiet).clean()

    async def history(self) -> History:
        """All of it, with what `keep` read before it was compacted away."""
        kept = self._kept
        if kept is None:
            return await read_history(self.endpoints, self.namespace)
        later = await read_history(self.endpoints, self.namespace, start=kept.steps[-1].revision + 1)
        return replace(later, steps=(*kept.steps, *later.steps))

    async def keep(self) -> int:
        """Read history until now, so that it may be compacted; the revision that may be compacted at."""
        self._kept = await self.history()
        return self._kept.steps[-1].revision

    async def claim_revision(self, job_id: str) -> int:
        """Create revision of the job's claim; 0: nobody holds it."""
        async with self.etcd() as client:
            found = await client.range(self.keys.claim(job_id), timeout=_TIMEOUT)
        return found.kvs[0].create_revision if found.kvs else 0

    async def sessions(self) -> int:
        """How many sessions are open."""
        async with self.etcd() as client:
            found = await client.range(*self.keys.all_sessions(), count_only=True, timeout=_TIMEOUT)
        return found.count

    async def leases(self) -> int:
        """How many leases etcd has."""
        async with self.etcd() as client:
            return len((await client.leases(timeout=_TIMEOUT)).leases)


def metric(url: str, name: str) -> float:
    """One plain metric of etcd, by its name; blocking."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise AssertionError(f"etcd has no metric {name}")
