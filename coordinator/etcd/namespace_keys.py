"""The keys of one namespace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from coordinator.core.effects import Slot, Where
from coordinator.core.lock_order import job_waiter
from coordinator.core.rank import Rank
from coordinator.errors import KeyFormatError
from coordinator.etcd.key_parts import (
    LEASE_HEX,
    KeyRange,
    identifier,
    name,
    padded,
    parse_name,
    parse_number,
    parse_rank,
    parse_text,
    prefix_end,
    rank_part,
    segment,
    sharded,
)

__all__ = ["NamespaceKeys", "ReadyKey"]

_OF_A_JOB: Final = job_waiter("").encode()[:4]
"""No session's id begins so."""


class ReadyKey(NamedTuple):
    """The parts of a ``ready/`` key."""

    queue: str
    type: str
    rank: Rank
    job_id: str


class NamespaceKeys:
    """Keys and ranges of one namespace.

    Methods that build raise ``KeyFormatError`` on text that is no valid id or name; so do those that parse,
    on a key that no builder made.
    """

    __slots__ = (
        "_base",
        "_build",
        "_cancel",
        "_checkpoint",
        "_circuit",
        "_claim",
        "_due",
        "_lock",
        "_outbox",
        "_prefixes",
        "_queue",
        "_ready",
        "_result",
        "_session",
        "_spec",
        "_state",
        "_type",
        "_unique",
        "namespace",
    )

    def __init__(self, root: bytes, namespace: str) -> None:
        self.namespace = namespace
        base = self._base = root + b"/" + name(namespace) + b"/"
        self._spec = base + b"job/"
        self._state = base + b"state/"
        self._ready = base + b"ready/"
        self._due = base + b"due/"
        self._claim = base + b"claim/"
        self._cancel = base + b"cancel/"
        self._checkpoint = base + b"checkpoint/"
        self._result = base + b"result/"
        self._unique = base + b"unique/"
        self._session = base + b"session/"
        self._lock = base + b"lock/"
        self._outbox = base + b"outbox/"
        self._queue = base + b"queue/"
        self._type = base + b"type/"
        self._circuit = base + b"circuit/"
        self._prefixes = {
            Slot.SPEC: self._spec,
            Slot.STATE: self._state,
            Slot.READY: self._ready,
            Slot.DUE: self._due,
            Slot.CLAIM: self._claim,
            Slot.CANCEL: self._cancel,
            Slot.CHECKPOINT: self._checkpoint,
            Slot.RESULT: self._result,
            Slot.UNIQUE: self._unique,
        }
        self._build: dict[Slot, Callable[[Where], bytes]] = {
            Slot.SPEC: lambda where: self._spec + sharded(where.job_id),
            Slot.STATE: lambda where: self._state + sharded(where.job_id),
            Slot.READY: lambda where: self.ready(where.queue, where.type, where.rank, where.job_id),
            Slot.DUE: lambda where: self.due(where.ms, where.job_id),
            Slot.CLAIM: lambda where: self._claim + segment(where.job_id),
            Slot.CANCEL: lambda where: self._cancel + segment(where.job_id),
            Slot.CHECKPOINT: lambda where: self._checkpoint + segment(where.job_id),
            Slot.RESULT: lambda where: self._result + segment(where.job_id),
            Slot.UNIQUE: lambda where: self.unique(where.queue, where.unique_key),
            Slot.LOCK: lambda where: self.lock(where.lock_name, job_waiter(where.job_id)),
        }

    # --- build ------------------------------------------------------------------------------------

    def holds(self, key: bytes) -> bool:
        """Whether ``key`` lies in this namespace."""
        return key.startswith(self._base)

    def where(self, where: Where) -> bytes:
        """The key that ``where`` stands for."""
        return self._build[where.slot](where)

    def spec(self, job_id: str) -> bytes:
        """``job/<hh>/<job>``."""
        return self._spec + sharded(job_id)

    def state(self, job_id: str) -> bytes:
        """``state/<hh>/<job>``."""
        return self._state + sharded(job_id)

    def ready(self, queue: str, type_: str, rank: Rank, job_id: str) -> bytes:
        """``ready/<queue>/<type>/<rank>/<job>``."""
        return b"%b%b/%b/%b/%b" % (self._ready, name(queue), name(type_), rank_part(rank), segment(job_id))

    def due(self, ms: int, job_id: str) -> bytes:
        """``due/<ms>/<job>``."""
        return b"%b%b/%b" % (self._due, padded(ms), segment(job_id))

    def claim(self, job_id: str) -> bytes:
        """``claim/<job>``."""
        return self._claim + segment(job_id)

    def cancel(self, job_id: str) -> bytes:
        """``cancel/<job>``."""
        return self._cancel + segment(job_id)

    def checkpoint(self, job_id: str) -> bytes:
        """``checkpoint/<job>``."""
        return self._checkpoint + segment(job_id)

    def result(self, job_id: str) -> bytes:
        """``result/<job>``."""
        return self._result + segment(job_id)

    def unique(self, queue: str, unique_key: str) -> bytes:
        """``unique/<queue>/<key>``."""
        return b"%b%b/%b" % (self._unique, name(queue), segment(unique_key))

    def session(self, session_id: str) -> bytes:
        """``session/<session>``; a session id is 16 hex digits, its lease."""
        if not LEASE_HEX.fullmatch(session_id):
            raise KeyFormatError(f"{session_id!r} is no session id")
        return self._session + session_id.encode()

    def lock(self, name: str, waiter: str) -> bytes:
        """``lock/<name>/<waiter>``."""
        return b"%b%b/%b" % (self._lock, segment(name), segment(waiter))

    def outbox(self, change: str) -> bytes:
        """``outbox/<change>``."""
        return self._outbox + identifier(change)

    def queue(self, queue: str) -> bytes:
        """``queue/<queue>``."""
        return self._queue + name(queue)

    def type(self, queue: str, type_: str) -> bytes:
        """``type/<queue>/<type>``."""
        return b"%b%b/%b" % (self._type, name(queue), name(type_))

    def circuit(self, queue: str, type_: str) -> bytes:
        """``circuit/<queue>/<type>``."""
        return b"%b%b/%b" % (self._circuit, name(queue), name(type_))

    # --- ranges -----------------------------------------------------------------------------------

    def all_ready(self) -> KeyRange:
        """Every ``ready/`` key."""
        return KeyRange(self._ready, prefix_end(self._ready))

    def all_claims(self) -> KeyRange:
        """Every ``claim/`` key."""
        return KeyRange(self._claim, prefix_end(self._claim))

    def all_sessions(self) -> KeyRange:
        """Every ``session/`` key."""
        return KeyRange(self._session, prefix_end(self._session))

    def all_cancels(self) -> KeyRange:
        """Every ``cancel/`` key."""
        return KeyRange(self._cancel, prefix_end(self._cancel))

    def all_states(self) -> KeyRange:
        """Every ``state/`` key; for watches, too wide for a range."""
        return KeyRange(self._state, prefix_end(self._state))

    def all_types(self) -> KeyRange:
        """Every ``type/`` key."""
        return KeyRange(self._type, prefix_end(self._type))

    def all_circuits(self) -> KeyRange:
        """Every ``circuit/`` key."""
        return KeyRange(self._circuit, prefix_end(self._circuit))

    def all_queues(self) -> KeyRange:
        """Every ``queue/`` key."""
        return KeyRange(self._queue, prefix_end(self._queue))

    def all_of(self, slot: Slot) -> KeyRange:
        """Every key of one kind; too wide to be read at once."""
        prefix = self._prefixes[slot]
        return KeyRange(prefix, prefix_end(prefix))

    def all_locks(self) -> KeyRange:
        """Every ``lock/`` key."""
        return KeyRange(self._lock, prefix_end(self._lock))

    def lock_entries(self, name: str) -> KeyRange:
        """Every entry of one lock."""
        prefix = self._lock + segment(name) + b"/"
        return KeyRange(prefix, prefix_end(prefix))

    def state_shard(self, shard: int, after: bytes = b"") -> KeyRange:
        """``state/`` keys of one shard, those whose last part is beyond ``after``."""
        prefix = self._state + b"%02x/" % shard
        return KeyRange(prefix + after + b"\0" if after else prefix, prefix_end(prefix))

    def ready_between(self, queue: str, type_: str, after: Rank | None, until: Rank | None) -> KeyRange:
        """``ready/`` keys of one (queue, type) with a rank in (after, until]; None is unbounded."""
        prefix = b"%b%b/%b/" % (self._ready, name(queue), name(type_))
        start = prefix if after is None else prefix_end(prefix + rank_part(after) + b"/")
        end = prefix_end(prefix) if until is None else prefix_end(prefix + rank_part(until) + b"/")
        return KeyRange(start, end)

    def ready_at(self, queue: str, type_: str, rank: Rank) -> KeyRange:
        """``ready/`` keys of exactly one rank."""
        prefix = b"%b%b/%b/%b/" % (self._ready, name(queue), name(type_), rank_part(rank))
        return KeyRange(prefix, prefix_end(prefix))

    def due_until(self, ms: int) -> KeyRange:
        """``due/`` keys at or before ``ms``."""
        return KeyRange(self._due, prefix_end(self._due + padded(ms) + b"/"))

    # --- parse ------------------------------------------------------------------------------------

    def parse(self, slot: Slot, key: bytes) -> Where:
        """What a key of this kind stands for; a unique key does not say whose it is."""
        if slot is Slot.READY:
            ready = self.parse_ready(key)
            return Where(slot, self.namespace, ready.job_id, ready.queue, ready.type, ready.rank)
        if slot is Slot.DUE:
            ms, job_id = self.parse_due(key)
            return Where(slot, self.namespace, job_id, ms=ms)
        if slot is Slot.UNIQUE:
            queue, slash, text = self._tail(key, self._unique).partition(b"/")
            if not slash:
                raise KeyFormatError(f"{key!r} is no unique key")
            return Where(slot, self.namespace, "", queue=parse_name(queue), unique_key=parse_text(text))
        if slot is Slot.STATE or slot is Slot.SPEC:
            return Where(slot, self.namespace, self._parse_sharded(key, self._prefixes[slot]))
        return Where(slot, self.namespace, parse_text(self._tail(key, self._prefixes[slot])))

    def parse_state(self, key: bytes) -> str:
        """Job id of a ``state/`` key."""
        return self._parse_sharded(key, self._state)

    def _parse_sharded(self, key: bytes, prefix: bytes) -> str:
        tail = self._tail(key, prefix)
        job_id = parse_text(tail[3:])
        if sharded(job_id) != tail:
            raise KeyFormatError(f"{key!r} lies in another job's shard")
        return job_id

    def parse_ready(self, key: bytes) -> ReadyKey:
        """Parts of a ``ready/`` key."""
        parts = self._tail(key, self._ready).split(b"/")
        if len(parts) != 4:
            raise KeyFormatError(f"{key!r} is no ready key")
        queue, type_, rank, job = parts
        return ReadyKey(parse_name(queue), parse_name(type_), parse_rank(rank), parse_text(job))

    def parse_due(self, key: bytes) -> tuple[int, str]:
        """Time and job id of a ``due/`` key."""
        ms, slash, job = self._tail(key, self._due).partition(b"/")
        if not slash:
            raise KeyFormatError(f"{key!r} is no due key")
        return parse_number(ms), parse_text(job)

    def parse_claim(self, key: bytes) -> str:
        """Job id of a ``claim/`` key."""
        return parse_text(self._tail(key, self._claim))

    def parse_cancel(self, key: bytes) -> str:
        """Job id of a ``cancel/`` key."""
        return parse_text(self._tail(key, self._cancel))

    def parse_session(self, key: bytes) -> str:
        """Session id of a ``session/`` key."""
        session_id = parse_text(self._tail(key, self._session))
        if not LEASE_HEX.fullmatch(session_id):
            raise KeyFormatError(f"{key!r} is no session key")
        return session_id

    def parse_type(self, key: bytes) -> tuple[str, str]:
        """Queue and type of a ``type/`` key."""
        queue, slash, type_ = self._tail(key, self._type).partition(b"/")
        if not slash:
            raise KeyFormatError(f"{key!r} is no type key")
        return parse_name(queue), parse_name(type_)

    def parse_queue(self, key: bytes) -> str:
        """Queue of a ``queue/`` key."""
        return parse_name(self._tail(key, self._queue))

    def parse_circuit(self, key: bytes) -> tuple[str, str]:
        """Queue and type of a ``circuit/`` key."""
        queue, slash, type_ = self._tail(key, self._circuit).partition(b"/")
        if not slash:
            raise KeyFormatError(f"{key!r} is no circuit key")
        return parse_name(queue), parse_name(type_)

    def parse_lock(self, key: bytes) -> tuple[str, str]:
        """Name and waiter of a ``lock/`` key."""
        name, slash, waiter = self._tail(key, self._lock).partition(b"/")
        if not slash:
            raise KeyFormatError(f"{key!r} is no lock key")
        return parse_text(name), parse_text(waiter)

    def is_of_a_job(self, key: bytes) -> bool:
        """Whether a ``lock/`` key is of the form that claims of jobs put."""
        return key.startswith(self._lock) and key.rpartition(b"/")[2].startswith(_OF_A_JOB)

    @staticmethod
    def _tail(key: bytes, prefix: bytes) -> bytes:
        if not key.startswith(prefix):
            raise KeyFormatError(f"{key!r} does not begin with {prefix!r}")
        return key[len(prefix) :]
