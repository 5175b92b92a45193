"""Commit transitions through the group committer, and the few writes beside them; reads are inherited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

from coordinator.core.fencing import split_token
from coordinator.core.job import RETAINED
from coordinator.core.machine import Guard
from coordinator.errors import CodecError, LeaseNotFound, NotApplied, Reason, RequestError
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import FORMAT, decode_checkpoint, encode_checkpoint
from coordinator.etcd.committer import Committer, GuardedOp
from coordinator.etcd.group_read import GroupReader
from coordinator.etcd.job_reads import JobReader
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.pending import Pending
from coordinator.etcd.present import EtcdPresent, regressed_error
from coordinator.etcd.retention import RetentionBuckets
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.state_watch import watch_states
from coordinator.etcd.txn import TxnCodec, one
from coordinator.ports import (
    Checkpoint,
    Clock,
    Commit,
    CommitObserver,
    Due,
    Operation,
    PendingCommit,
    StateSink,
)
from leasekeeper.internal.storage.v1.records_pb2 import TypeRecord

__all__ = ["EtcdJobStore"]

_CHECKPOINT_ROUNDS: Final = 5
"""Tries against other writers of the same checkpoint; only attempts that overlap by a token can be those."""

_CHECKPOINT_BYTES: Final = 4096

# Looked up once: a member of an enum costs thirty times what a global costs.
_HELD: Final = Guard.HELD
_READY: Final = Guard.READY

_TYPES_REMEMBERED: Final = 10_000
_LEASE_ROUNDS: Final = 3


class EtcdJobStore(JobReader):
    """Implements ``ports.JobStore``.

    Args:
        client: the etcd client.
        reader: for point reads.
        space: the keys.
        codec: builds and reads operations.
        set_aside: told of undecodable records.
        clock: the time that deadlines are measured in.
        committer: commits.
        present: the epoch.
        buckets: retention leases.
        observer: told of each own win.
    """

    def __init__(
        self,
        client: EtcdClient,
        reader: GroupReader,
        space: KeySpace,
        codec: TxnCodec,
        set_aside: SetAside,
        clock: Clock,
        *,
        committer: Committer,
        present: EtcdPresent,
        buckets: RetentionBuckets,
        observer: CommitObserver,
    ) -> None:
        super().__init__(client, reader, space, codec, set_aside, clock)
        self.codec = codec
        self.committer = committer
        self.observer = observer
        self._present = present
        self._buckets = buckets
        self._types: set[tuple[str, str, str]] = set()

    # --- transitions ------------------------------------------------------------------------------

    def commit(self, operation: Operation) -> PendingCommit:
        """Queue one operation; the awaitable ends by the operation's deadline.

        Raises (from the awaitable):
            NotApplied, EtcdUnavailable: certain, nothing was written.
            OutcomeUnknown: nobody knows.
            RequestError: EPOCH_REGRESSED, for claims and settlements while the store stands behind what was
                seen.
            CodecError: the guard failed, and what stands there cannot be decoded.
            KeyFormatError: an id cannot be a key.
        """
        guard = operation.guard
        if guard is _HELD or guard is _READY:
            if self._present.regressed:
                return asyncio.ensure_future(_refuse(regressed_error()))
            if guard is _HELD and split_token(operation.token).epoch != self._present.epoch:
                return asyncio.ensure_future(self._lost_token(operation))
        after = operation.after
        if after is None or after.state not in RETAINED:
            return Pending(self, operation)
        retained = 1
        if operation.usual is None:
            retained = sum([write.retained and write.put for write in operation.writes])
        lease = self._buckets.take(after.namespace, retained)
        if not lease:
            return asyncio.ensure_future(self.commit_with_lease(operation, 0, retained))
        return Pending(self, operation, lease, retained)

    def another_lease(self, operation: Operation, dead: int, retained: int) -> int:
        """Another retention lease than the one that etcd called dead; 0: there is none at hand."""
        namespace = _namespace(operation)
        self._buckets.dead(namespace, dead)
        return self._buckets.take(namespace, retained)

    async def commit_with_lease(self, operation: Operation, dead: int, retained: int) -> Commit:
        """Wait for a retention lease first; and again if etcd lost all that we had."""
        namespace, lease = _namespace(operation), dead
        for _ in range(_LEASE_ROUNDS):
            self._buckets.dead(namespace, lease)
            await self._buckets.ensure(namespace, deadline=operation.deadline)
            lease = self._buckets.take(namespace, retained)
            if not lease:
                continue
            try:
                return await Pending(self, operation, lease)
            except LeaseNotFound:
                continue  # nothing was written: the next one
        raise NotApplied("retention leases die as fast as they are granted")

    async def _lost_token(self, operation: Operation) -> Commit:
        """A token of another epoch is stale everywhere: say what stands there, write nothing."""
        before = operation.before
        assert before is not None, "a settlement is of a job"
        found = await self.read(before.job.namespace, before.job.job_id, deadline=operation.deadline)
        return Commit(won=False, revision=found.revision, stored=found.stored, claim=found.claim)

    def finish(self, commit: Commit) -> Commit:
        """What the caller of ``commit`` is told of a win."""
        if commit.token and self._present.regressed:
            # The store went back while the claim was made: its token may have been another's.
            raise regressed_error()
        return commit

    # --- beside transitions -----------------------------------------------------------------------

    async def save_checkpoint(
        self, namespace: str, job_id: str, token: int, checkpoint: Checkpoint, *, deadline: float
    ) -> bool:
        """Put it unless a later sequence of this attempt, or a later attempt's, lies there (False).

        Raises:
            RequestError: CLAIM_LOST, JOB_NOT_FOUND, EPOCH_REGRESSED.
            NotApplied, OutcomeUnknown: see ``commit``.
        """
        if self._present.regressed:
            raise regressed_error()
        keys = self._space.namespace(namespace)
        position = split_token(token)
        key, claim_key, state_key = keys.checkpoint(job_id), keys.claim(job_id), keys.state(job_id)
        value = encode_checkpoint(checkpoint)
        mine = position.epoch == self._present.epoch
        known = checkpoint.revision
        for _ in range(_CHECKPOINT_ROUNDS if mine else 0):
            result = await self.committer.commit(
                GuardedOp(
                    lanes=(state_key,),
                    compares=(wire.create_eq(claim_key, position.revision), wire.mod_eq(key, known)),
                    thens=(wire.put(key, value),),
                    elses=(wire.get(claim_key), wire.get(key)),
                    deadline=deadline,
                    reply_bytes=_CHECKPOINT_BYTES,
                )
            )
            if result.won:
                return True
            claim, lying = one(result.responses[0]), one(result.responses[1])
            if claim is None or claim.create_revision != position.revision:
                break
            if lying is not None and lying.value == value:
                return True  # a first try of unknown outcome, or a repeat
            known = lying.mod_revision if lying is not None else 0
            if lying is not None and not _gives_way(lying.value, checkpoint):
                return False
        else:
            if mine:
                raise NotApplied("other writers of this checkpoint were faster every time")
        found = await self.read(namespace, job_id, deadline=deadline)
        if found.stored is None:
            raise RequestError(Reason.JOB_NOT_FOUND, "there is no such job", metadata={"job_id": job_id})
        current = found.claim.token if found.claim is not None else 0
        raise RequestError(
            Reason.CLAIM_LOST,
            "the claim that this token stood for has ended",
            metadata={
                "job_id": job_id,
                "held": str(token),
                "current": str(current),
                "state": found.stored.job.state.name,
            },
        )

    async def delete_stray(self, namespace: str, due: Due, *, deadline: float) -> bool:
        """Delete a due key that its job does not have, if it is unchanged; True if it is gone by this."""
        keys = self._space.namespace(namespace)
        key = keys.due(due.ms, due.job_id)
        result = await self.committer.commit(
            GuardedOp(
                lanes=(keys.state(due.job_id),),
                compares=(wire.mod_eq(key, due.revision),),
                thens=(wire.delete(key),),
                deadline=deadline,
            )
        )
        return result.won

    async def register_type(self, namespace: str, queue: str, type_: str, *, deadline: float) -> None:
        """Make sure that the pair is listed; remembered, so that it costs one Txn in this process."""
        pair = (namespace, queue, type_)
        if pair in self._types:
            return
        key = self._space.namespace(namespace).type(queue, type_)
        value = TypeRecord(format=FORMAT, first_ms=self._clock.now_ms()).SerializeToString()
        await self.committer.commit(
            GuardedOp(
                lanes=(key,),
                compares=(wire.create_eq(key, 0),),
                thens=(wire.put(key, value),),
                deadline=deadline,
            )
        )
        if len(self._types) >= _TYPES_REMEMBERED:
            self._types.clear()
        self._types.add(pair)

    def forget_types(self) -> None:
        """The store went back: what was registered may not be any more."""
        self._types.clear()

    async def watch_states(
        self, namespace: str, *, after_revision: int, sink: StateSink, stop: Awaitable[None] | None = None
    ) -> None:
        """Feed ``sink`` with every change of a ``state`` key after ``after_revision`` (0: now).

        Ends when ``stop`` does, or by cancellation.

        Raises:
            Compacted: that revision is gone.
        """
        await watch_states(
            self._client,
            self._space.namespace(namespace),
            after_revision=after_revision,
            sink=sink,
            stop=stop,
            codec=self.codec,
            set_aside=self._set_aside,
            clock=self._clock,
        )


def _gives_way(value: bytes, checkpoint: Checkpoint) -> bool:
    """Whether what lies there is no later than ``checkpoint``. What cannot be read gives way."""
    try:
        lying = decode_checkpoint(value, 0)
    except CodecError:
        return True
    return (lying.attempt, lying.sequence) <= (checkpoint.attempt, checkpoint.sequence)


def _namespace(operation: Operation) -> str:
    assert operation.after is not None, "what is retained is there"
    return operation.after.namespace


async def _refuse(error: RequestError) -> Commit:
    raise error
