"""Sessions: one lease each, its id the session's, and a witness key on it that every claim compares."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from coordinator.core.fencing import make_token
from coordinator.core.job import Claim
from coordinator.errors import (
    CodecError,
    KeyFormatError,
    LeaseExists,
    LeaseNotFound,
    OutcomeUnknown,
    Reason,
    RequestError,
)
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import decode_epoch, decode_session, encode_session
from coordinator.etcd.group_read import GroupReader
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.lease_keeper import LeaseKeeper
from coordinator.etcd.paging import pages
from coordinator.etcd.present import EtcdPresent
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.time_left import read_timeout, write_timeout
from coordinator.etcd.txn import TxnCodec, one
from coordinator.ports import Clock, Confirmation, KeptAlive, Session

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue

__all__ = ["EtcdSessionStore", "SessionStoreConfig"]

_OPEN_ROUNDS: Final = 8
_PLACES_PER_READ: Final = 124
"""Keys of jobs (two each) and locks, beside session and epoch, in a Txn of 128."""

_KEYS_PER_READ: Final = 128
_PAUSE_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStoreConfig:
    """Times in seconds.

    Attributes:
        call_timeout: longest wait for one call to etcd.
    """

    call_timeout: float = 3.0


class EtcdSessionStore:
    """Implements ``ports.SessionStore``.

    Args:
        client: the etcd client.
        reader: for reads.
        keeper: renews leases.
        space: the keys.
        codec: decodes claims.
        present: the epoch.
        set_aside: told of undecodable records.
        clock: the time that deadlines are measured in.
        config: see ``SessionStoreConfig``.
    """

    def __init__(
        self,
        client: EtcdClient,
        reader: GroupReader,
        keeper: LeaseKeeper,
        space: KeySpace,
        codec: TxnCodec,
        present: EtcdPresent,
        set_aside: SetAside,
        clock: Clock,
        config: SessionStoreConfig | None = None,
    ) -> None:
        self._client = client
        self._reader = reader
        self._keeper = keeper
        self._space = space
        self._codec = codec
        self._present = present
        self._set_aside = set_aside
        self._clock = clock
        self._config = config or SessionStoreConfig()

    # --- open and close ---------------------------------------------------------------------------

    async def open(self, session: Session, *, deadline: float) -> Session:
        """Grant the lease and put the witness; a repeat answers the session that is there.

        The request digest in the witness tells whose session it is. After an unknown outcome the same is done
        again: each step finds what the first try left.

        Returns:
            The session with the granted TTL (etcd rounds up), the epoch and the witness's create revision.

        Raises:
            RequestError: REQUEST_ID_REUSED, another session's content under this id.
            NotApplied, EtcdUnavailable: certain, there is no session by this call.
            OutcomeUnknown: there may be one; it ends by itself.
        """
        lease = int(session.session_id, 16)
        ttl = max(1, math.ceil(session.ttl_ms / 1000))
        unknown: OutcomeUnknown | None = None
        for _ in range(_OPEN_ROUNDS):
            try:
                granted = await self._lease(session, lease, ttl, deadline)
                if isinstance(granted, Session):
                    return self._same(session, granted)
                opened = await self._put_witness(replace(session, ttl_ms=granted * 1000), lease, deadline)
                if opened is not None:
                    return self._same(session, opened)
            except LeaseNotFound:
                pass  # it was revoked or ended in between: from the start
            except OutcomeUnknown as error:
                unknown = error
                if self._clock.monotonic() >= deadline:
                    break
                await self._clock.sleep(_PAUSE_SECONDS)
        raise unknown or OutcomeUnknown("the session's lease was lost again and again while it was opened")

    async def _lease(self, session: Session, lease: int, ttl: int, deadline: float) -> int | Session:
        """Grant the lease: its TTL in seconds; or the session that has it already."""
        try:
            return (await self._client.lease_grant(ttl, lease, timeout=self._write_left(deadline))).ttl
        except LeaseExists:
            there = await self.read(session.namespace, session.session_id, deadline=deadline)
            if there is not None:
                return there
        # A first try got this far, or is under way elsewhere. Renewed, so that the lease lasts its TTL.
        left = min(self._config.call_timeout, read_timeout(self._clock, deadline))
        kept = await self._keeper.keep_alive(lease, timeout=left)
        if not kept.ttl:
            raise LeaseNotFound("the lease ended meanwhile")
        return kept.ttl

    async def _put_witness(self, session: Session, lease: int, deadline: float) -> Session | None:
        """Put the witness unless one is there; the session that stands there then. None: the epoch
        changed.
        """
        key = self._space.namespace(session.namespace).session(session.session_id)
        session = replace(session, epoch=self._present.epoch)
        put = wire.nested(
            (wire.create_eq(key, 0),), (wire.put(key, encode_session(session), lease),), (wire.get(key),)
        )
        reply = await self._client.txn_bytes(
            wire.txn((self._present.guard(),), (put,), ()), timeout=self._write_left(deadline)
        )
        if not reply.succeeded:
            await self._present.refresh(deadline=deadline)
            return None
        inner = reply.responses[0].response_txn
        if inner.succeeded:
            return replace(session, revision=reply.header.revision)
        kv = one(inner.responses[0])
        if kv is None:
            return None
        return decode_session(session.namespace, session.session_id, kv.value, kv.create_revision)

    @staticmethod
    def _same(asked: Session, found: Session) -> Session:
        if found.request_digest != asked.request_digest:
            raise RequestError(
                Reason.REQUEST_ID_REUSED,
                "this request_id opened a session with other content before",
                metadata={"session_id": found.session_id},
            )
        return found

    async def shut(self, namespace: str, session_id: str, *, deadline: float) -> None:
        """Delete the witness. Every claim compares it, so none is committed after this. Repeatable.

        Raises:
            NotApplied, EtcdUnavailable: nothing was deleted.
            OutcomeUnknown: it may still be there.
        """
        key = self._space.namespace(namespace).session(session_id)
        await self._client.delete_range(key, timeout=self._write_left(deadline))

    async def close(self, namespace: str, session_id: str, *, deadline: float) -> None:
        """Revoke the lease, and with it witness, claims and locks; no error if it is gone.

        A session's id is its lease's, so a caller may name any lease: one with keys outside the namespace is
        no session of it, and stays.

        Raises:
            NotApplied, EtcdUnavailable: nothing was revoked.
            OutcomeUnknown: it may still be there; it ends by its TTL.
        """
        lease = int(session_id, 16)
        keys = self._space.namespace(namespace)
        found = await self._client.lease_time_to_live(
            lease, keys=True, timeout=read_timeout(self._clock, deadline)
        )
        if not all(map(keys.holds, found.keys)):
            return
        unknown: OutcomeUnknown | None = None
        for _ in range(_OPEN_ROUNDS):
            try:
                await self._client.lease_revoke(lease, timeout=self._write_left(deadline))
                return
            except LeaseNotFound:
                return
            except OutcomeUnknown as error:
                unknown = error
                if self._clock.monotonic() + _PAUSE_SECONDS >= deadline:
                    break
                await self._clock.sleep(_PAUSE_SECONDS)
        raise unknown or OutcomeUnknown("the session could not be closed in time")

    # --- keep and look ----------------------------------------------------------------------------

    async def read(self, namespace: str, session_id: str, *, deadline: float) -> Session | None:
        """The session, None if it has ended. Raises CodecError, EtcdUnavailable."""
        key = self._space.namespace(namespace).session(session_id)
        found = await self._reader.get((key,), deadline=deadline)
        kv = found.kvs[0]
        if kv is None:
            return None
        return decode_session(namespace, session_id, kv.value, kv.create_revision)

    async def keep_alive(self, session_id: str, *, deadline: float) -> KeptAlive:
        """Renew once.

        Raises:
            OutcomeUnknown: no member answered in time; the old deadline stands.
        """
        left = deadline - self._clock.monotonic()
        if left <= 0:
            raise OutcomeUnknown("the deadline passed before the lease could be renewed")
        kept = await self._keeper.keep_alive(int(session_id, 16), timeout=left)
        return KeptAlive(ttl_ms=kept.ttl * 1000, raft_term=kept.raft_term)

    async def confirm(
        self,
        namespace: str,
        session_id: str,
        job_ids: Sequence[str],
        *,
        locks: Sequence[tuple[str, str]] = (),
        deadline: float,
    ) -> Confirmation:
        """Read session, epoch, claims, cancel keys and entries of locks.

        Up to 62 jobs, each as two locks, at one revision; more in several reads, of which the position is the
        earliest and the raft term 0 if they differ. Claims of other sessions are told as they are; entries
        count only on this session's lease.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """
        keys = self._space.namespace(namespace)
        witness = keys.session(session_id)
        chunks = _chunks(job_ids, locks)
        reads = [
            self._reader.get(
                [
                    witness,
                    self._space.epoch,
                    *map(keys.claim, jobs),
                    *map(keys.cancel, jobs),
                    *(keys.lock(name, waiter) for name, waiter in entries),
                ],
                deadline=deadline,
                reply_bytes=512 + 256 * (len(jobs) + len(entries)),
            )
            for jobs, entries in chunks
        ]
        answers = [await reads[0]] if len(reads) == 1 else await asyncio.gather(*reads)
        claims: dict[str, Claim] = {}
        cancelled: set[str] = set()
        standing: dict[tuple[str, str], int] = {}
        lease = int(session_id, 16)
        session: Session | None = None
        terms = {answer.raft_term for answer in answers}
        for (jobs, entries), answer in zip(chunks, answers, strict=True):
            kv = answer.kvs[0]
            session = decode_session(namespace, session_id, kv.value, kv.create_revision) if kv else None
            if session is None:
                break  # ended: whatever the earlier reads showed is over
            epoch = answer.kvs[1]
            if epoch is None or decode_epoch(epoch.value) != self._present.epoch:
                # Tokens of claims are told in the present epoch: those of an older one then match no more.
                await self._present.refresh(deadline=deadline)
            rest = iter(answer.kvs[2:])
            held_by_job, asked_of_job = list(islice(rest, len(jobs))), list(islice(rest, len(jobs)))
            for job_id, held, asked in zip(jobs, held_by_job, asked_of_job, strict=True):
                claim = self._claim(job_id, held)
                if claim is not None:
                    claims[job_id] = claim
                if asked is not None:
                    cancelled.add(job_id)
            for entry, kv in zip(entries, rest, strict=True):
                if kv is not None and kv.lease == lease:
                    standing[entry] = make_token(self._present.epoch, kv.create_revision)
        revision = min(answer.revision for answer in answers)
        return Confirmation(
            session=session,
            claims=claims if session is not None else {},
            cancelled=frozenset(cancelled),
            position=make_token(self._present.epoch, revision),
            raft_term=terms.pop() if len(terms) == 1 else 0,
            locks=standing if session is not None else {},
        )

    def _claim(self, job_id: str, kv: KeyValue | None) -> Claim | None:
        try:
            return self._codec.claim_of(kv)
        except CodecError as error:
            self._set_aside.add("claim", job_id.encode(), error)
            return None

    async def claims_of(self, namespace: str, session_id: str, *, deadline: float) -> list[tuple[str, Claim]]:
        """Claims attached to the session's lease, as of one moment each.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """
        keys = self._space.namespace(namespace)
        lease = int(session_id, 16)
        span = keys.all_claims()
        answer = await self._client.lease_time_to_live(
            lease, keys=True, timeout=read_timeout(self._clock, deadline)
        )
        held = [key for key in answer.keys if span.start <= key < span.end]
        claims: list[tuple[str, Claim]] = []
        for at in range(0, len(held), _KEYS_PER_READ):
            chunk = held[at : at + _KEYS_PER_READ]
            found = await self._reader.get(chunk, deadline=deadline, reply_bytes=256 * len(chunk))
            for key, kv in zip(chunk, found.kvs, strict=True):
                if kv is None or kv.lease != lease:
                    continue
                try:
                    job_id = keys.parse_claim(key)
                except KeyFormatError as error:
                    self._set_aside.add("claim", key, error)
                    continue
                claim = self._claim(job_id, kv)
                if claim is not None:
                    claims.append((job_id, claim))
        return claims

    async def list_sessions(self, namespace: str, *, deadline: float) -> list[Session]:
        """Every open session, in pages.

        Raises:
            EtcdUnavailable: no answer by the deadline.
        """
        keys = self._space.namespace(namespace)
        sessions: list[Session] = []
        async for kv in pages(self._client, keys.all_sessions(), clock=self._clock, deadline=deadline):
            try:
                session_id = keys.parse_session(kv.key)
                sessions.append(decode_session(namespace, session_id, kv.value, kv.create_revision))
            except (CodecError, KeyFormatError) as error:
                self._set_aside.add("session", kv.key, error)
        return sessions

    def _write_left(self, deadline: float) -> float:
        return min(self._config.call_timeout, write_timeout(self._clock, deadline))


def _chunks(
    job_ids: Sequence[str], locks: Sequence[tuple[str, str]]
) -> list[tuple[Sequence[str], Sequence[tuple[str, str]]]]:
    """Jobs and locks of each read; the last read of jobs takes locks as well. At least one read."""
    most = _PLACES_PER_READ // 2
    chunks: list[tuple[Sequence[str], Sequence[tuple[str, str]]]] = [
        (job_ids[at : at + most], ()) for at in range(0, len(job_ids), most)
    ] or [((), ())]
    jobs, _ = chunks[-1]
    room = _PLACES_PER_READ - 2 * len(jobs)
    chunks[-1] = (jobs, locks[:room])
    return chunks + [
        ((), locks[at : at + _PLACES_PER_READ]) for at in range(room, len(locks), _PLACES_PER_READ)
    ]
