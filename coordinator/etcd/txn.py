"""One transition as a guarded operation, and its answer back: the table of docs/keys.md, "Transactions".

Tokens become revisions here and nowhere else (with ``core.fencing``): a claim's token is the present epoch
and the create revision of its key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from coordinator.core.copying import changed
from coordinator.core.effects import Slot, Where
from coordinator.core.fencing import make_token, split_token
from coordinator.core.follow_ups import Standing
from coordinator.core.job import Claim, Job
from coordinator.core.lock_order import LockEntry
from coordinator.core.machine import Guard
from coordinator.errors import CodecError, NotApplied
from coordinator.etcd import wire
from coordinator.etcd.codec import (
    JobCodec,
    decode_checkpoint,
    decode_claim,
    decode_spec,
    decode_unique,
    encode_cancel,
    encode_claim,
    encode_due,
    encode_result,
    encode_spec,
    encode_unique,
)
from coordinator.etcd.guarded_op import GuardedOp, lane_names
from coordinator.etcd.job_locks import LINE_GUESS, found_lines, locks_guard, put_entry
from coordinator.etcd.keys import KeySpace, NamespaceKeys
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.templates import WIDEST, by_template
from coordinator.ports import Checkpoint, Commit, Operation, Spec, Stored
from leasekeeper.internal.etcd.v1.kv_pb2 import RequestOp

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue, ResponseOp

__all__ = ["Compiled", "TxnCodec", "one"]

# Looked up once: a member of an enum costs thirty times what a global costs.
_CANCEL: Final = Slot.CANCEL
_CHECKPOINT: Final = Slot.CHECKPOINT
_CLAIM: Final = Slot.CLAIM
_DUE: Final = Slot.DUE
_READY: Final = Slot.READY
_RESULT: Final = Slot.RESULT
_SPEC: Final = Slot.SPEC
_STATE: Final = Slot.STATE
_UNIQUE: Final = Slot.UNIQUE
_LOCK: Final = Slot.LOCK
_new: Final = tuple.__new__
_IF_ABSENT: Final = Guard.ABSENT
_IF_HELD: Final = Guard.HELD
_IF_READY: Final = Guard.READY
_IF_REVIVED: Final = Guard.REVIVE
_IF_SEEN: Final = Guard.SEEN
_IF_STATE: Final = Guard.STATE
_IF_UNHELD: Final = Guard.UNHELD

_REPLY_BASE = 640  # a record with a few attempts, and the frame around it
_CLAIM_WRITES = 3  # behind which stands the spec, the only thing that a usual operation reads
_CHECKPOINT_GUESS = 4096  # sizes of checkpoints are not known before they are read


def one(response: ResponseOp) -> KeyValue | None:
    """The key-value of a range of one key."""
    kvs = response.response_range.kvs
    return kvs[0] if kvs else None


def _net(thens: Sequence[bytes]) -> list[bytes]:
    """One write of each key, the put where there are both: etcd refuses two in one Txn, and a follow-up may
    take a key that its parent gives up."""
    by_key: dict[bytes, bytes] = {}
    for then in thens:
        write = RequestOp.FromString(then)
        key = write.request_put.key or write.request_delete_range.key
        held = by_key.get(key)
        if held is None or wire.is_put(then) or not wire.is_put(held):
            by_key[key] = then
    return list(by_key.values())


def _job(operation: Operation) -> Job:
    """The job that it is about."""
    if operation.after is not None:
        return operation.after
    assert operation.before is not None, "an operation from nothing to nothing"
    return operation.before.job


class Compiled(NamedTuple):
    """An operation, ready to be sent. ``reads_at``: where among the answers of a win its reads begin."""

    lanes: tuple[bytes, ...]
    nested: bytes
    width: int
    reply_bytes: int
    reads_at: int


class TxnCodec:
    """Builds guarded operations and reads their results.

    Args:
        space: the keys.
        jobs: encodes and decodes records.
        epoch: the present epoch.
        set_aside: told what cannot be decoded where the answer can do without.
        now_ms: Unix milliseconds, for cancel keys.
        leads: the compare that this process leads the sweeps, None if it does not.
    """

    def __init__(
        self,
        space: KeySpace,
        jobs: JobCodec,
        *,
        epoch: Callable[[], int],
        set_aside: SetAside,
        now_ms: Callable[[], int],
        leads: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        self._space = space
        self._jobs = jobs
        self._epoch = epoch
        self._set_aside = set_aside
        self._now_ms = now_ms
        self._leads = leads

    # --- build ------------------------------------------------------------------------------------

    def compile(self, operation: Operation, lease: int = 0) -> Compiled:
        """What is sent of ``operation``.

        Args:
            operation: what to commit; a token in it is of the present epoch.
            lease: retention lease of the writes that are retained.

        Raises:
            KeyFormatError: an id or name cannot be a key.
            NotApplied: it is a sweep's, and this process does not lead the sweeps.
        """
        job = operation.after
        if job is not None and operation.usual is not None:
            keys = self._space.namespace(job.namespace)
            state = keys.state(job.job_id)
            nested = by_template(operation, job, keys, state, self._jobs.encode(job), lease)
            if nested is not None:
                reply = _REPLY_BASE + job.terms.payload_size if operation.want_spec else _REPLY_BASE
                return _new(Compiled, ((state,), nested, WIDEST, reply, _CLAIM_WRITES))
        guarded, reads_at = self.describe(operation, lease)
        pieces = (guarded.compares, guarded.thens, guarded.elses)
        width = max(map(len, pieces))
        return Compiled(lane_names(guarded), wire.nested(*pieces), width, guarded.reply_bytes, reads_at)

    def describe(self, operation: Operation, lease: int = 0) -> tuple[GuardedOp, int]:
        """Any operation piece by piece, and where its reads begin; arguments and errors as of ``compile``."""
        before = operation.before
        job = _job(operation)
        keys = self._space.namespace(job.namespace)
        state_key = keys.state(job.job_id)
        claim_key = keys.claim(job.job_id)
        ready_key = b""
        lanes = [state_key]
        value = self._jobs.encode(operation.after) if operation.after is not None else b""
        thens: list[bytes] = []
        absent: list[bytes] = []
        for where, put, retained in operation.writes:
            slot = where.slot
            if slot is _STATE:
                written = (
                    wire.put(state_key, value, lease if retained else 0) if put else wire.delete(state_key)
                )
                thens.append(written)
                continue
            if slot is _READY:
                key = ready_key = keys.ready(where.queue, where.type, where.rank, where.job_id)
                if put:
                    thens.append(wire.put(key, value, 0))
                    continue
            elif slot is _CLAIM:
                key = claim_key
            elif slot is _SPEC:
                key = keys.spec(job.job_id)
            elif slot is _CHECKPOINT:
                key = keys.checkpoint(job.job_id)
            else:
                key = keys.where(where)
                if slot is _LOCK:
                    lanes.append(key)
                elif slot is _UNIQUE:
                    lanes.append(key)
                    if put and (before is None or before.job.terminal or operation.guard is _IF_SEEN):
                        absent.append(key)
            thens.append(
                self._put(operation, where, key, lease if retained else 0) if put else wire.delete(key)
            )
        compares, elses = self._guard(operation, keys, state_key, claim_key, ready_key)
        adds: tuple[bytes, ...] = ()
        if operation.claim is not None and job.terms.locks:
            guards = locks_guard(keys, job, operation.lock_revisions)
            compares += guards.compares
            elses += guards.elses
            adds = guards.adds
        for key in absent:
            compares.append(wire.create_eq(key, 0))
            elses.append(wire.get(key))
        if operation.as_leader:
            leads = self._leads()
            if leads is None:
                raise NotApplied("another process leads the sweeps")
            compares.append(leads)
        if operation.also:
            given_up = frozenset(lanes[1:])
            for follow_up in operation.also:
                added, _ = self.describe(follow_up)
                record, *unique = added.lanes
                if operation.guards_also:
                    compares.append(wire.create_eq(record, 0))
                    compares += [wire.create_eq(key, 0) for key in unique if key not in given_up]
                    elses += map(wire.get, added.lanes)
                elif not given_up.issuperset(unique):
                    raise ValueError("no guard compares a unique key but that which the parent gives up")
                lanes += added.lanes
                thens += added.thens
            thens = _net(thens)
        reads_at = len(thens)
        reply = _REPLY_BASE + LINE_GUESS * len(adds)
        if operation.want_spec:
            thens.append(wire.get(keys.spec(job.job_id)))
            reply += job.terms.payload_size
        if operation.want_checkpoint:
            thens.append(wire.get(keys.checkpoint(job.job_id)))
            reply += _CHECKPOINT_GUESS
        guarded = GuardedOp(
            lanes=tuple(dict.fromkeys(lanes)),
            adds=adds,
            compares=tuple(compares),
            thens=tuple(thens),
            elses=tuple(elses),
            deadline=operation.deadline,
            reply_bytes=reply,
            retention=lease,
        )
        return guarded, reads_at

    def _guard(
        self,
        operation: Operation,
        keys: NamespaceKeys,
        state_key: bytes,
        claim_key: bytes,
        ready_key: bytes,
    ) -> tuple[list[bytes], list[bytes]]:
        guard = operation.guard
        if guard is _IF_ABSENT:
            return [wire.create_eq(state_key, 0)], [wire.get(state_key)]
        before = operation.before
        if before is None or before.revision <= 0:
            raise ValueError(f"guard {guard.name} needs the record as read")
        elses = [wire.get(state_key), wire.get(claim_key)]
        unchanged = wire.mod_eq(state_key, before.revision)
        if guard is _IF_HELD:
            return [wire.create_eq(claim_key, split_token(operation.token).revision), unchanged], elses
        if guard is _IF_UNHELD:
            return [wire.create_eq(claim_key, 0), unchanged], elses
        if guard is _IF_STATE or guard is _IF_REVIVED:
            return [unchanged], elses
        if guard is _IF_SEEN:
            created = split_token(operation.token).revision if operation.token else 0
            return [wire.create_eq(claim_key, created), unchanged], elses
        claim = operation.claim
        if claim is None:
            raise ValueError("a claim operation carries its claim")
        if not ready_key:
            raise ValueError("a claim operation takes the job out of its line")
        witness = keys.session(claim.session)
        compares = [
            wire.mod_eq(ready_key, before.revision),
            unchanged,
            wire.create_eq(claim_key, 0),
            wire.lease_eq(witness, int(claim.session, 16)),
        ]
        elses.append(wire.get(witness))
        return compares, elses

    def _put(self, operation: Operation, where: Where, key: bytes, lease: int) -> bytes:
        slot = where.slot
        after = operation.after
        assert after is not None, "a deleted job has no puts"
        if slot is _CLAIM:
            if operation.claim is None:
                raise ValueError("only a claim operation puts a claim")
            return wire.put(key, encode_claim(operation.claim), int(operation.claim.session, 16))
        if slot is _LOCK:
            if operation.claim is None:
                raise ValueError("only a claim operation puts entries of locks")
            return put_entry(key, where, after, operation.claim)
        if slot is _DUE:
            return wire.put(key, encode_due(after), lease)
        if slot is _UNIQUE:
            return wire.put(key, encode_unique(after.job_id), lease)
        if slot is _CANCEL:
            return wire.put(key, encode_cancel(operation.cancelled_by, self._now_ms()), lease)
        if slot is _RESULT:
            return wire.put(key, encode_result(operation.big_result, after.result_content_type), lease)
        if slot is _SPEC:
            if operation.spec is None:
                raise ValueError("an operation that puts the spec carries it")
            return wire.put(key, encode_spec(operation.spec), lease)
        raise ValueError(f"no transition puts a {slot.value} key")

    # --- read -------------------------------------------------------------------------------------

    def won(
        self,
        operation: Operation,
        reads_at: int,
        revision: int,
        responses: Sequence[ResponseOp],
        resent: bool = False,
    ) -> Commit:
        """The commit of an operation whose guard held; ``reads_at`` as compiled."""
        after = operation.after
        at = reads_at
        spec: Spec | None = None
        checkpoint: Checkpoint | None = None
        if operation.want_spec:
            spec = self._spec(one(responses[at]))
            at += 1
        if operation.want_checkpoint:
            checkpoint = self._checkpoint(one(responses[at]))
        claim = operation.claim
        token = 0
        if claim is not None:
            token = make_token(self._epoch(), revision)
            claim = changed(claim, token=token)
        return Commit(
            won=True,
            revision=revision,
            resent=resent,
            stored=Stored(after, revision) if after is not None else None,
            claim=claim,
            token=token,
            spec=spec,
            checkpoint=checkpoint,
        )

    def lost(
        self, operation: Operation, revision: int, responses: Sequence[ResponseOp], resent: bool
    ) -> Commit:
        """What stands in the way of an operation whose guard did not hold.

        Raises:
            CodecError: the record that stands there cannot be read, so nobody can decide anything.
        """
        stored = self._stored(self._space.namespace(_job(operation).namespace), one(responses[0]))
        claim: Claim | None = None
        at = 1
        if operation.guard is not _IF_ABSENT:
            claim = self.claim_of(one(responses[1]))
            at = 2
        session_gone = False
        if operation.guard is _IF_READY and operation.claim is not None:
            witness = one(responses[at])
            session_gone = witness is None or witness.lease != int(operation.claim.session, 16)
            at += 1
        lines: Mapping[str, tuple[LockEntry, ...]] | None = None
        job = _job(operation)
        if operation.claim is not None and job.terms.locks:
            reads = responses[at : at + len(job.terms.locks)]
            lines = found_lines(self._space.namespace(job.namespace), job, reads, self._set_aside)
            at += len(reads)
        also, until = self._standing(operation, responses)
        owner = ""
        for response in responses[at:until]:
            kv = one(response)
            if kv is not None and not owner:
                owner = decode_unique(kv.value)
        return Commit(
            won=False,
            revision=revision,
            resent=resent,
            stored=stored,
            claim=claim,
            unique_owner=owner,
            session_gone=session_gone,
            also=also,
            lines=lines,
        )

    def _standing(
        self, operation: Operation, responses: Sequence[ResponseOp]
    ) -> tuple[tuple[Standing, ...], int]:
        """What stands where guarded follow-ups want to be, and where among ``responses`` that begins."""
        if not operation.guards_also:
            return (), len(responses)
        jobs = [_job(follow_up) for follow_up in operation.also]
        at = until = len(responses) - sum(2 if job.terms.unique_key else 1 for job in jobs)
        found: list[Standing] = []
        for job in jobs:
            stored = self._stored(self._space.namespace(job.namespace), one(responses[at]))
            at += 1
            owner = ""
            if job.terms.unique_key:
                kv = one(responses[at])
                at += 1
                owner = decode_unique(kv.value) if kv is not None else ""
            found.append(Standing(job=stored.job if stored is not None else None, unique_owner=owner))
        return tuple(found), until

    def claim_of(self, kv: KeyValue | None) -> Claim | None:
        """The claim at a ``claim/`` key, with its token."""
        if kv is None:
            return None
        return decode_claim(kv.value, make_token(self._epoch(), kv.create_revision))

    def stored_of(self, namespace: str, job_id: str, kv: KeyValue | None) -> Stored | None:
        """The record at a ``state/`` or ``ready/`` key."""
        if kv is None:
            return None
        return Stored(self._jobs.decode(namespace, job_id, kv.value), kv.mod_revision)

    def _stored(self, keys: NamespaceKeys, kv: KeyValue | None) -> Stored | None:
        if kv is None:
            return None
        return self.stored_of(keys.namespace, keys.parse_state(kv.key), kv)

    def _spec(self, kv: KeyValue | None) -> Spec | None:
        if kv is None:
            return None
        try:
            return decode_spec(kv.value)
        except CodecError as error:
            self._set_aside.add("job", kv.key, error)
            return None

    def _checkpoint(self, kv: KeyValue | None) -> Checkpoint | None:
        if kv is None:
            return None
        try:
            return decode_checkpoint(kv.value, kv.mod_revision)
        except CodecError as error:
            self._set_aside.add("checkpoint", kv.key, error)
            return None
