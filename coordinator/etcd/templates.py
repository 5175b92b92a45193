"""The operations that nearly every job makes, each as one join of bytes.

Submission, claim and end of a job differ from one job to the next in a few keys and values alone. All that
stands around these, tags and lengths of nested messages, is the same as long as they have the same sizes. So
it is made once for each set of sizes, from a description that reads like the messages, and kept. An operation
then costs one join, a fifth of what it costs to nest it piece by piece with ``coordinator.etcd.wire``.
test_templates.py holds both ways against each other, byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeAlias

from coordinator.core.effects import Usual
from coordinator.core.fencing import split_token
from coordinator.core.job import Job
from coordinator.core.machine import Guard
from coordinator.etcd.namespace_keys import NamespaceKeys
from coordinator.etcd.record_codec import encode_claim, encode_spec
from coordinator.etcd.wire import moment, varint
from coordinator.ports import Operation

__all__ = ["WIDEST", "by_template"]

WIDEST: Final = 4
"""Compares, writes or reads of the widest of these operations."""

_KEPT: Final = 4_096
"""Sets of sizes kept of each template, at 1 KB each; callers choose sizes, so there could be many."""

# Looked up once: a member of an enum costs thirty times what a global costs.
_SUBMISSION: Final = Usual.SUBMISSION
_CLAIM: Final = Usual.CLAIM
_IF_ABSENT: Final = Guard.ABSENT
_IF_HELD: Final = Guard.HELD
_IF_READY: Final = Guard.READY


def by_template(
    operation: Operation, job: Job, keys: NamespaceKeys, state: bytes, value: bytes, lease: int
) -> bytes | None:
    """``wire.nested`` of a usual operation; None where it wants more, or lacks something.

    Args:
        operation: what to commit.
        job: its record to be.
        keys: of the job's namespace.
        state: the job's ``state/`` key.
        value: the encoded record.
        lease: retention lease of what is retained.

    Raises:
        KeyFormatError: an id or name cannot be a key.
    """
    usual, guard, before = operation.usual, operation.guard, operation.before
    if usual is None or operation.want_checkpoint:
        return None
    job_id, terms = job.job_id, job.terms
    if before is None:
        if usual is not _SUBMISSION or guard is not _IF_ABSENT or operation.spec is None:
            return None
        spec, payload = keys.spec(job_id), encode_spec(operation.spec)
        ready = keys.ready(terms.queue, terms.type, job.rank, job_id)
        around = _submission(len(state), len(spec), len(ready), len(value), len(payload))
        return _filled(around, (state, state, value, spec, payload, ready, value, state))
    if before.revision <= 0:
        return None
    claim, revision = keys.claim(job_id), moment(before.revision)
    if usual is _CLAIM:
        held = operation.claim
        if guard is not _IF_READY or held is None:
            return None
        ready = keys.ready(terms.queue, terms.type, before.job.rank, job_id)
        witness, session = _session(keys, held.session)
        record = encode_claim(held)
        spec = keys.spec(job_id) if operation.want_spec else b""
        around = _claim(
            len(ready),
            len(revision),
            len(state),
            len(claim),
            len(witness),
            len(session),
            len(value),
            len(record),
            len(spec),
        )
        guarded = (ready, revision, state, revision, claim, witness, session)
        written = (ready, state, value, claim, record, session)
        return _filled(around, (*guarded, *written, spec, state, claim, witness))
    if guard is not _IF_HELD or operation.want_spec or not lease:
        return None
    token, retention = moment(split_token(operation.token).revision), moment(lease)
    spec, checkpoint = keys.spec(job_id), keys.checkpoint(job_id)
    around = _end(
        len(claim),
        len(token),
        len(state),
        len(revision),
        len(spec),
        len(value),
        len(retention),
        len(checkpoint),
    )
    written = (claim, spec, state, value, retention, checkpoint)
    return _filled(around, (claim, token, state, revision, *written, state, claim))


@lru_cache(maxsize=1024)
def _session(keys: NamespaceKeys, session: str) -> tuple[bytes, bytes]:
    """Its witness and the varint of its lease."""
    return keys.session(session), varint(int(session, 16))


def _filled(around: tuple[bytes, ...], holes: tuple[bytes, ...]) -> bytes:
    parts = [*around, *holes]
    parts[::2] = around
    parts[1::2] = holes
    return b"".join(parts)


# --- messages with holes --------------------------------------------------------------------------


class _Hole:
    """A place of known size, to be filled."""

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


_Part: TypeAlias = bytes | _Hole
_Parts: TypeAlias = tuple[_Part, ...]


def _field(tag: bytes, *parts: _Part) -> _Parts:
    """A length-delimited field."""
    return (tag + varint(sum(map(len, parts))), *parts)


def _put(key: _Part, value: _Part, *lease: _Part) -> _Parts:
    attached = (b"\x18", *lease) if lease else ()
    return _field(b"\x12", *_field(b"\x0a", key), *_field(b"\x12", value), *attached)


def _delete(key: _Part) -> _Parts:
    return _field(b"\x1a", *_field(b"\x0a", key))


def _get(key: _Part) -> _Parts:
    return _field(b"\x0a", *_field(b"\x0a", key))


def _absent(key: _Part) -> _Parts:
    return (b"\x10\x01", *_field(b"\x1a", key), b"\x28\x00")


def _created(key: _Part, revision: _Part) -> _Parts:
    return (b"\x10\x01", *_field(b"\x1a", key), b"\x28", revision)


def _modified(key: _Part, revision: _Part) -> _Parts:
    return (b"\x10\x02", *_field(b"\x1a", key), b"\x30", revision)


def _leased(key: _Part, lease: _Part) -> _Parts:
    return (b"\x10\x04", *_field(b"\x1a", key), b"\x40", lease)


def _around(
    compares: Sequence[_Parts], thens: Sequence[_Parts], elses: Sequence[_Parts]
) -> tuple[bytes, ...]:
    """What stands before, between and behind the holes of ``wire.nested(compares, thens, elses)``."""
    body: list[_Part] = []
    for tag, pieces in ((b"\x0a", compares), (b"\x12", thens), (b"\x1a", elses)):
        for piece in pieces:
            body += _field(tag, *piece)
    around = [b""]
    for part in _field(b"\x22", *body):
        if isinstance(part, bytes):
            around[-1] += part
        else:
            around.append(b"")
    return tuple(around)


@lru_cache(_KEPT)
def _submission(state: int, spec: int, ready: int, value: int, payload: int) -> tuple[bytes, ...]:
    k, s, r, v, p = map(_Hole, (state, spec, ready, value, payload))
    return _around([_absent(k)], [_put(k, v), _put(s, p), _put(r, v)], [_get(k)])


@lru_cache(_KEPT)
def _claim(
    ready: int,
    revision: int,
    state: int,
    claim: int,
    witness: int,
    session: int,
    value: int,
    record: int,
    spec: int,
) -> tuple[bytes, ...]:
    """``spec`` 0: it is not read; then its hole is one of no size behind the writes."""
    r, m, k, c, w, n = map(_Hole, (ready, revision, state, claim, witness, session))
    v, h, s = map(_Hole, (value, record, spec))
    thens = [_delete(r), _put(k, v), _put(c, h, n)]
    if spec:
        thens.append(_get(s))
    around = _around(
        [_modified(r, m), _modified(k, m), _absent(c), _leased(w, n)], thens, [_get(k), _get(c), _get(w)]
    )
    return around if spec else (*around[:13], b"", *around[13:])


@lru_cache(_KEPT)
def _end(
    claim: int,
    token: int,
    state: int,
    revision: int,
    spec: int,
    value: int,
    retention: int,
    checkpoint: int,
) -> tuple[bytes, ...]:
    c, t, k, m, s, v = map(_Hole, (claim, token, state, revision, spec, value))
    n, x = map(_Hole, (retention, checkpoint))
    return _around(
        [_created(c, t), _modified(k, m)],
        [_delete(c), _delete(s), _put(k, v, n), _delete(x)],
        [_get(k), _get(c)],
    )
