"""Circuits in etcd: ``circuit/<queue>/<type>``, swapped under a compare of its mod revision and the epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.core.circuit import CLOSED, Circuit, CircuitState, Probe
from coordinator.errors import CodecError, KeyFormatError
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import FORMAT, decode_record
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.paging import pages
from coordinator.etcd.present import EtcdPresent
from coordinator.etcd.record_swap import swap_record
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.time_left import read_timeout
from coordinator.ports import CircuitSwap, Clock, StoredCircuit
from leasekeeper.internal.storage.v1.records_pb2 import CircuitRecord, ProbeRecord

if TYPE_CHECKING:
    from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue

__all__ = ["EtcdCircuitStore", "decode_circuit", "encode_circuit"]


def encode_circuit(circuit: Circuit) -> bytes:
    """Value of ``circuit/<queue>/<type>``."""
    probe = circuit.probe
    return CircuitRecord(
        format=FORMAT,
        state=circuit.state.value,
        since_ms=circuit.since_ms,
        probe_ms=circuit.probe_ms,
        openings=circuit.openings,
        probe=ProbeRecord(job=probe.job_id, attempt=probe.attempt, who=probe.who) if probe else None,
        probes_passed=circuit.passed,
        reason=circuit.reason,
        who=circuit.who,
    ).SerializeToString()


def decode_circuit(value: bytes) -> Circuit:
    """Undo ``encode_circuit``.

    Raises:
        CodecError: it is no such record.
    """
    record = decode_record(CircuitRecord.FromString, value, "circuit")
    try:
        state = CircuitState(record.state)
    except ValueError as error:
        raise CodecError(f"circuit: there is no state {record.state}") from error
    held = record.probe if record.HasField("probe") else None
    return Circuit(
        state=state,
        since_ms=record.since_ms,
        probe_ms=record.probe_ms,
        openings=record.openings,
        probe=Probe(job_id=held.job, attempt=held.attempt, who=held.who) if held is not None else None,
        passed=record.probes_passed,
        reason=record.reason,
        who=record.who,
    )


class EtcdCircuitStore:
    """Implements ``ports.CircuitStore``. Swaps are rare, so each is a Txn of its own.

    Args:
        client: the etcd client.
        space: the keys.
        present: the epoch that every Txn compares.
        set_aside: told of undecodable records.
        clock: deadlines.
    """

    def __init__(
        self, client: EtcdClient, space: KeySpace, present: EtcdPresent, set_aside: SetAside, clock: Clock
    ) -> None:
        self._client = client
        self._space = space
        self._present = present
        self._set_aside = set_aside
        self._clock = clock

    async def read(self, namespace: str, queue: str, type_: str, *, deadline: float) -> StoredCircuit:
        """See ``ports.CircuitStore``."""
        key = self._space.namespace(namespace).circuit(queue, type_)
        reply = await self._client.range(key, timeout=read_timeout(self._clock, deadline))
        return self._stored(reply.kvs[0] if reply.kvs else None)

    async def swap(
        self,
        namespace: str,
        queue: str,
        type_: str,
        *,
        before: StoredCircuit,
        after: Circuit,
        deadline: float,
    ) -> CircuitSwap:
        """See ``ports.CircuitStore``."""
        key = self._space.namespace(namespace).circuit(queue, type_)
        write = wire.delete(key) if after == CLOSED else wire.put(key, encode_circuit(after))
        reply = await swap_record(
            self._client,
            self._present,
            self._clock,
            key,
            write,
            version=before.revision,
            deadline=deadline,
        )
        if reply.won:
            written = StoredCircuit(after, 0 if after == CLOSED else reply.revision)
            return CircuitSwap(won=True, stored=written, revision=reply.revision)
        stands = self._stored(reply.stands)
        # Two coordinators, or two of its calls, never ask for the same: who and when are in the record.
        # Of a deletion nobody can say whose it was, and it matters to nobody.
        won = reply.doubtful and stands.circuit == after
        return CircuitSwap(won=won, stored=stands, revision=reply.revision)

    async def list_circuits(self, namespace: str, *, deadline: float) -> list[tuple[str, str, StoredCircuit]]:
        """See ``ports.CircuitStore``."""
        keys = self._space.namespace(namespace)
        found: list[tuple[str, str, StoredCircuit]] = []
        async for kv in pages(self._client, keys.all_circuits(), clock=self._clock, deadline=deadline):
            try:
                queue, type_ = keys.parse_circuit(kv.key)
            except KeyFormatError as error:
                self._set_aside.add("circuit", kv.key, error)
                continue
            found.append((queue, type_, self._stored(kv)))
        return found

    def _stored(self, kv: KeyValue | None) -> StoredCircuit:
        if kv is None:
            return StoredCircuit()
        try:
            return StoredCircuit(decode_circuit(kv.value), kv.mod_revision)
        except CodecError as error:
            self._set_aside.add("circuit", kv.key, error)
            return StoredCircuit(revision=kv.mod_revision)
