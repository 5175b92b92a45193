"""Point reads and listings of jobs, each in ranges with a tight end."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from coordinator.core.job import Claim, JobState
from coordinator.core.rank import Rank
from coordinator.errors import CodecError, FieldViolation, KeyFormatError, Reason, RequestError
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import decode_checkpoint, decode_due, decode_result, decode_spec
from coordinator.etcd.group_read import GroupReader, KeysAt
from coordinator.etcd.keys import SHARDS, KeyRange, KeySpace, NamespaceKeys
from coordinator.etcd.paging import pages
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.time_left import read_timeout
from coordinator.etcd.txn import TxnCodec
from coordinator.ports import Checkpoint, Clock, Due, JobPage, ReadyPage, Snapshot, Spec, Stored
from leasekeeper.internal.etcd.v1.kv_pb2 import RangeResponse, TxnRequest

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue

__all__ = ["JobReader", "decode_cursor", "encode_cursor"]

_MAX_CURSOR: Final = 1024

_DECODED_AT_ONCE: Final = 100

_MAX_FAN: Final = 32
"""Shards that one read of a listing covers while they are sparse."""

_READ_MANY: Final = 64
"""Jobs of one point read, two keys each."""

_SPEC_GUESS: Final = 64 * 1024
_RESULT_GUESS: Final = 64 * 1024
_CHECKPOINT_GUESS: Final = 16 * 1024


def encode_cursor(shard: int, last: bytes) -> str:
    """Where a listing goes on: in ``shard``, beyond the key whose last part is ``last``, if that is not
    empty.
    """
    return base64.urlsafe_b64encode(b"1:%02x:%b" % (shard, last)).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[int, bytes]:
    """Undo ``encode_cursor``; an empty cursor is the beginning.

    Raises:
        RequestError: VALIDATION_FAILED, no cursor of ours.
    """
    if not cursor:
        return 0, b""
    try:
        if len(cursor) > _MAX_CURSOR:
            raise ValueError("too long")
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        version, shard, last = base64.b64decode(padded, b"-_", validate=True).split(b":", 2)
        if version != b"1" or not re.fullmatch(rb"[0-9a-f]{2}", shard):
            raise ValueError("not a position")
    except ValueError as error:  # binascii.Error and UnicodeEncodeError are ValueErrors
        raise RequestError(
            Reason.VALIDATION_FAILED,
            "the page token was not made by this service",
            fields=(FieldViolation("page_token", "malformed"),),
        ) from error
    return int(shard, 16), last


class JobReader:
    """The reading half of ``ports.JobStore``.

    Args:
        client: for ranges.
        reader: for point reads.
        space: the keys.
        codec: decodes.
        set_aside: told of undecodable records in listings.
        clock: the time that deadlines are measured in.
    """

    def __init__(
        self,
        client: EtcdClient,
        reader: GroupReader,
        space: KeySpace,
        codec: TxnCodec,
        set_aside: SetAside,
        clock: Clock,
    ) -> None:
        self._client = client
        self._reader = reader
        self._space = space
        self._codec = codec
        self._set_aside = set_aside
        self._clock = clock

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
        """State and claim, and what else is asked for, at one revision.

        Raises:
            EtcdUnavailable: no answer by the deadline.
            CodecError: what was found cannot be decoded.
        """
        keys = self._space.namespace(namespace)
        wanted = [keys.state(job_id), keys.claim(job_id)]
        size = 1024
        if spec:
            wanted.append(keys.spec(job_id))
            size += _SPEC_GUESS
        if checkpoint:
            wanted.append(keys.checkpoint(job_id))
            size += _CHECKPOINT_GUESS
        if result:
            wanted.append(keys.result(job_id))
            size += _RESULT_GUESS
        found = await self._reader.get(wanted, deadline=deadline, reply_bytes=size)
        stored = self._codec.stored_of(namespace, job_id, found.kvs[0])
        rest = iter(found.kvs[2:])
        return Snapshot(
            stored=stored,
            claim=self._codec.claim_of(found.kvs[1]),
            spec=_spec(next(rest)) if spec else None,
            checkpoint=_checkpoint(next(rest)) if checkpoint else None,
            result=_result(stored, next(rest)) if result else None,
            revision=found.revision,
        )

    async def read_many(self, namespace: str, job_ids: Sequence[str], *, deadline: float) -> list[Snapshot]:
        """State and claim of several jobs, in their order, each at one revision of its own.

        A record that cannot be decoded counts as absent here, and is counted.
        """
        keys = self._space.namespace(namespace)
        snapshots: list[Snapshot] = []
        for start in range(0, len(job_ids), _READ_MANY):
            ids = job_ids[start : start + _READ_MANY]
            wanted = [key for job_id in ids for key in (keys.state(job_id), keys.claim(job_id))]
            found = await self._reader.get(wanted, deadline=deadline, reply_bytes=1024 * len(ids))
            snapshots.extend(self._snapshots(namespace, ids, found))
        return snapshots

    def _snapshots(self, namespace: str, job_ids: Sequence[str], found: KeysAt) -> list[Snapshot]:
        snapshots: list[Snapshot] = []
        for index, job_id in enumerate(job_ids):
            state, held = found.kvs[2 * index], found.kvs[2 * index + 1]
            stored: Stored | None = None
            claim: Claim | None = None
            try:
                stored = self._codec.stored_of(namespace, job_id, state)
                claim = self._codec.claim_of(held)
            except CodecError as error:
                self._set_aside.add("state" if stored is None else "claim", job_id.encode(), error)
            snapshots.append(Snapshot(stored=stored, claim=claim, revision=found.revision))
        return snapshots

    async def list_jobs(
        self,
        namespace: str,
        *,
        cursor: str,
        limit: int,
        deadline: float,
        states: frozenset[JobState] | None = None,
    ) -> JobPage:
        """The next records, at most ``limit`` examined, shard by shard; a page may be short, even empty.

        Raises:
            RequestError: VALIDATION_FAILED, the cursor is malformed.
        """
        keys = self._space.namespace(namespace)
        shard, after = decode_cursor(cursor)
        jobs: list[Stored] = []
        left = limit
        fan = 1
        while shard < SHARDS:
            fan = min(fan, SHARDS - shard)
            spans = [keys.state_shard(shard, after), *map(keys.state_shard, range(shard + 1, shard + fan))]
            before = left
            for offset, found in enumerate(await self._ranges(spans, left, deadline)):
                prefix = len(keys.state_shard(shard + offset).start)
                last = b""
                for kv in found.kvs[:left]:
                    last = kv.key[prefix:]
                    left -= 1
                    stored = self._decode_state(keys, kv)
                    if stored is not None and (states is None or stored.job.state in states):
                        jobs.append(stored)
                if not left:
                    if found.more or last != (found.kvs[-1].key[prefix:] if found.kvs else b""):
                        return JobPage(tuple(jobs), encode_cursor(shard + offset, last), limit)
                    following = shard + offset + 1
                    after_it = encode_cursor(following, b"") if following < SHARDS else ""
                    return JobPage(tuple(jobs), after_it, limit)
            shard, after = shard + fan, b""
            # Dense shards are read one by one, sparse ones many at a time.
            seen = before - left
            fan = min(_MAX_FAN, max(1, left * fan // seen)) if seen else min(_MAX_FAN, 2 * fan)
        return JobPage(tuple(jobs), "", limit - left)

    async def _ranges(self, spans: Sequence[KeyRange], limit: int, deadline: float) -> list[RangeResponse]:
        request = wire.txn((), [wire.get(span.start, span.end, limit) for span in spans], ())
        reply = await self._client.read_txn(
            TxnRequest.FromString(request), timeout=read_timeout(self._clock, deadline)
        )
        return [response.response_range for response in reply.responses]

    def _decode_state(self, keys: NamespaceKeys, kv: KeyValue) -> Stored | None:
        try:
            return self._codec.stored_of(keys.namespace, keys.parse_state(kv.key), kv)
        except (CodecError, KeyFormatError) as error:
            self._set_aside.add("state", kv.key, error)
            return None

    async def list_due(self, namespace: str, *, until_ms: int, limit: int, deadline: float) -> list[Due]:
        """Due keys up to ``until_ms``, earliest first, at most ``limit``."""
        keys = self._space.namespace(namespace)
        span = keys.due_until(until_ms)
        reply = await self._client.range(
            span.start, span.end, limit=limit, timeout=read_timeout(self._clock, deadline)
        )
        due: list[Due] = []
        for kv in reply.kvs:
            try:
                ms, job_id = keys.parse_due(kv.key)
            except KeyFormatError as error:
                self._set_aside.add("due", kv.key, error)
                continue
            try:
                hold_ms = decode_due(kv.value)
            except CodecError as error:
                # Not left out: a page with gaps would look like the last one, and hide all that follow.
                self._set_aside.add("due", kv.key, error)
                hold_ms = 0  # the record says it as well
            due.append(Due(job_id, ms, hold_ms, kv.mod_revision))
        return due

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
        """Waiting jobs with rank in (after, until], at most ``limit``, but never a part of one rank: a caller
        goes on after the last job's rank."""
        keys = self._space.namespace(namespace)
        span = keys.ready_between(queue, type_, after, until)
        timeout = read_timeout(self._clock, deadline)
        reply = await self._client.range(span.start, span.end, limit=limit, timeout=timeout)
        jobs = await self._decode_all(keys, reply)
        if not reply.more:
            return ReadyPage(tuple(jobs), True, None)
        last = _last_rank(keys, reply.kvs)
        if last is not None:
            # Two coordinators may give the same rank; the rest of the last one belongs to this page.
            tie = keys.ready_at(queue, type_, last)
            rest = await self._client.range(
                reply.kvs[-1].key + b"\0", tie.end, timeout=read_timeout(self._clock, deadline)
            )
            jobs += await self._decode_all(keys, rest)
        return ReadyPage(tuple(jobs), False, last)

    async def _decode_all(self, keys: NamespaceKeys, reply: RangeResponse) -> list[Stored]:
        """Decode a window's worth without holding up the event loop: each record costs some 15 µs."""
        jobs: list[Stored] = []
        for number, kv in enumerate(reply.kvs, start=1):
            stored = self._decode_ready(keys, kv)
            if stored is not None:
                jobs.append(stored)
            if number % _DECODED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return jobs

    def _decode_ready(self, keys: NamespaceKeys, kv: KeyValue) -> Stored | None:
        try:
            return self._codec.stored_of(keys.namespace, keys.parse_ready(kv.key).job_id, kv)
        except (CodecError, KeyFormatError) as error:
            self._set_aside.add("ready", kv.key, error)
            return None

    async def count_ready(
        self, namespace: str, queue: str, type_: str, *, deadline: float
    ) -> tuple[int, int]:
        """How many wait, and as of which revision. etcd walks all of them: for the start and after errors."""
        span = self._space.namespace(namespace).ready_between(queue, type_, None, None)
        reply = await self._client.range(
            span.start, span.end, count_only=True, timeout=read_timeout(self._clock, deadline)
        )
        return reply.count, reply.header.revision

    async def list_types(self, namespace: str, *, deadline: float) -> list[tuple[str, str]]:
        """(queue, type) pairs that ever had a job."""
        keys = self._space.namespace(namespace)
        pairs: list[tuple[str, str]] = []
        async for kv in pages(self._client, keys.all_types(), clock=self._clock, deadline=deadline):
            try:
                pairs.append(keys.parse_type(kv.key))
            except KeyFormatError as error:
                self._set_aside.add("type", kv.key, error)
        return pairs

    async def list_claims(self, namespace: str, *, deadline: float) -> list[tuple[str, Claim]]:
        """Every claim of the namespace, in pages."""
        keys = self._space.namespace(namespace)
        claims: list[tuple[str, Claim]] = []
        async for kv in pages(self._client, keys.all_claims(), clock=self._clock, deadline=deadline):
            try:
                claim = self._codec.claim_of(kv)
                assert claim is not None
                claims.append((keys.parse_claim(kv.key), claim))
            except (CodecError, KeyFormatError) as error:
                self._set_aside.add("claim", kv.key, error)
        return claims


def _last_rank(keys: NamespaceKeys, kvs: Sequence[KeyValue]) -> Rank | None:
    """Rank of the last key that is one of ours, whatever its value."""
    for kv in reversed(kvs):
        try:
            return keys.parse_ready(kv.key).rank
        except KeyFormatError:
            continue  # set aside when it was decoded
    return None


def _spec(kv: KeyValue | None) -> Spec | None:
    return decode_spec(kv.value) if kv is not None else None


def _checkpoint(kv: KeyValue | None) -> Checkpoint | None:
    return decode_checkpoint(kv.value, kv.mod_revision) if kv is not None else None


def _result(stored: Stored | None, kv: KeyValue | None) -> bytes | None:
    if stored is None:
        return None
    if kv is not None and stored.job.result_size > len(stored.job.result):
        return decode_result(kv.value)
    return stored.job.result
