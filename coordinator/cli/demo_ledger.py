"""What really happened in a demo: read from etcd and from the SQLite file, never from anybody's counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from coordinator.cli.demo_sink import SinkReading, SinkRow
from coordinator.core.fencing import make_token
from coordinator.core.job import AttemptOutcome, Claim, Job, JobState
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import decode_claim, decode_epoch, decode_session
from coordinator.etcd.job_codec import JobCodec
from coordinator.etcd.keys import SHARDS, KeySpace

__all__ = ["Ledger", "Summary", "summarize"]

_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a demo.

    Args:
        jobs: jobs submitted.
        succeeded: of these, SUCCEEDED in etcd and with a row in the SQLite file.
        recovered: SUCCEEDED in etcd after at least one attempt was lost with its session.
        stale_effects_refused: writes that the SQLite file refused for their older token.
        stale_settlements_rejected: completions with an old token that were answered CLAIM_LOST, of jobs whose
            settlement in etcd carries another token.
        duplicate_effects: jobs whose row carries a token other than the settlement's in etcd, or whose log
            shows a write accepted after one with a higher token.
        lost: jobs submitted that have no row, or whose record in etcd is missing or not terminal.
        seconds: from the first submission until the last settlement.
    """

    jobs: int
    succeeded: int
    recovered: int
    stale_effects_refused: int
    stale_settlements_rejected: int
    duplicate_effects: int
    lost: int
    seconds: float
    jobs_per_second: float

    @property
    def good(self) -> bool:
        """Whether the demo showed what it promises; decides the exit code."""
        return (
            self.succeeded == self.jobs
            and self.recovered >= 1
            and self.stale_effects_refused >= 1
            and self.duplicate_effects == 0
            and self.lost == 0
        )

    def to_dict(self) -> dict[str, int | float]:
        """The fields, for JSON."""
        return asdict(self)


def summarize(
    submitted: Sequence[str], jobs: Mapping[str, Job], sink: SinkReading, seconds: float
) -> Summary:
    """Compare the two stores.

    Args:
        submitted: ids of the jobs, which are those of the rows too.
        jobs: records in etcd.
        sink: the SQLite file.
        seconds: how long it took.
    """
    succeeded = {job_id for job_id, job in jobs.items() if job.state is JobState.SUCCEEDED}
    settled = {job_id: _settlement_token(jobs[job_id]) for job_id in succeeded}
    done = [job_id for job_id in submitted if job_id in succeeded and job_id in sink.rows]
    wrong_rows = {job_id for job_id in done if sink.rows[job_id] != settled[job_id]}
    missing = [
        job_id
        for job_id in submitted
        if job_id not in sink.rows or job_id not in jobs or not jobs[job_id].terminal
    ]
    recovered = [
        job_id
        for job_id in succeeded
        if any(attempt.outcome is AttemptOutcome.LOST for attempt in jobs[job_id].attempts)
    ]
    rejected = [one for one in sink.stale_settlements if settled.get(one.unit, one.token) != one.token]
    return Summary(
        jobs=len(submitted),
        succeeded=len(done),
        recovered=len(recovered),
        stale_effects_refused=len(sink.refused),
        stale_settlements_rejected=len(rejected),
        duplicate_effects=len(wrong_rows | _went_back(sink.accepted)),
        lost=len(missing),
        seconds=round(seconds, 2),
        jobs_per_second=round(len(done) / seconds, 1) if seconds > 0 else 0.0,
    )


def _settlement_token(job: Job) -> int:
    return next((one.token for one in reversed(job.attempts) if one.outcome is AttemptOutcome.SUCCEEDED), 0)


def _went_back(accepted: Sequence[SinkRow]) -> set[str]:
    """Units with a write accepted after one with a higher token."""
    highest: dict[str, int] = {}
    back = set()
    for write in accepted:
        if write.token < highest.get(write.unit, 0):
            back.add(write.unit)
        highest[write.unit] = max(write.token, highest.get(write.unit, 0))
    return back


class Ledger:
    """Reads the records of one namespace straight from etcd.

    Args:
        client: stays the caller's.
        namespace: whose records.
        keys: where they lie.
    """

    def __init__(self, client: EtcdClient, namespace: str, keys: KeySpace | None = None) -> None:
        self._client = client
        self._namespace = namespace
        self._space = keys or KeySpace()
        self._keys = self._space.namespace(namespace)
        self._codec = JobCodec()

    async def jobs(self) -> dict[str, Job]:
        """Every job, shard by shard. Raises CodecError on a record that cannot be read."""
        found: dict[str, Job] = {}
        for shard in range(SHARDS):
            start, end = self._keys.state_shard(shard)
            reply = await self._client.range(start, end, timeout=_TIMEOUT)
            for entry in reply.kvs:
                job_id = self._keys.parse_state(entry.key)
                found[job_id] = self._codec.decode(self._namespace, job_id, entry.value)
        return found

    async def job(self, job_id: str) -> Job | None:
        """One job; None if there is no record."""
        reply = await self._client.range(self._keys.state(job_id), timeout=_TIMEOUT)
        return self._codec.decode(self._namespace, job_id, reply.kvs[0].value) if reply.kvs else None

    async def claims(self) -> dict[str, Claim]:
        """Who holds which job now."""
        epoch = await self._epoch()
        start, end = self._keys.all_claims()
        reply = await self._client.range(start, end, timeout=_TIMEOUT)
        return {
            self._keys.parse_claim(entry.key): decode_claim(
                entry.value, make_token(epoch, entry.create_revision)
            )
            for entry in reply.kvs
        }

    async def sessions(self) -> dict[str, str]:
        """Who says what of itself: session to identity."""
        start, end = self._keys.all_sessions()
        reply = await self._client.range(start, end, timeout=_TIMEOUT)
        found = {}
        for entry in reply.kvs:
            session_id = self._keys.parse_session(entry.key)
            session = decode_session(self._namespace, session_id, entry.value, entry.mod_revision)
            found[session_id] = session.identity
        return found

    async def _epoch(self) -> int:
        reply = await self._client.range(self._space.epoch, timeout=_TIMEOUT)
        return decode_epoch(reply.kvs[0].value) if reply.kvs else 0
