"""How many job lifecycles a second etcd alone can take: the floor that group commit is measured against.

The same writes as submit, claim and settle, prebuilt and sent straight to etcd in groups, with no
coordinator, no index and no RPC in the way. What the whole system reaches as a share of this says what our
own code costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient

__all__ = ["FloorKeys", "claim_pieces", "etcd_floor", "settle_pieces", "submit_pieces"]

# Sizes of the records of a job with a payload of 100 bytes.
_SPEC = b"s" * 200
_STATE = b"t" * 180
_CLAIM = b"c" * 80
_TIMEOUT = 10.0
_SESSION_TTL = 600
_RETENTION_TTL = 3600

Pieces = tuple[tuple[bytes, ...], tuple[bytes, ...], tuple[bytes, ...]]
"""Compares, thens and elses of one nested operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorKeys:
    """Where a run keeps its keys, and the leases they hang on."""

    prefix: bytes
    session_lease: int
    retention_lease: int

    @property
    def epoch(self) -> bytes:
        """The key that every Txn compares."""
        return self.prefix + b"epoch"

    @property
    def session(self) -> bytes:
        """The witness of the session lease."""
        return self.prefix + b"session"

    def of_job(self, job: int) -> tuple[bytes, bytes, bytes, bytes]:
        """Keys of spec, state, ready and claim of one job."""
        name = b"%02x/%08x" % (job * 2654435761 >> 8 & 0xFF, job)
        return (
            self.prefix + b"job/" + name,
            self.prefix + b"state/" + name,
            self.prefix + b"ready/default/noop/%014d/%08x" % (1_700_000_000_000 + job, job),
            self.prefix + b"claim/" + name,
        )


def submit_pieces(keys: FloorKeys, job: int) -> Pieces:
    """A job comes in."""
    spec, state, ready, _ = keys.of_job(job)
    return (
        (wire.mod_eq(state, 0),),
        (wire.put(spec, _SPEC), wire.put(state, _STATE), wire.put(ready, _STATE)),
        (wire.get(state),),
    )


def claim_pieces(keys: FloorKeys, job: int, revision: int) -> Pieces:
    """The session takes the job that was put at ``revision``."""
    spec, state, ready, claim = keys.of_job(job)
    return (
        (
            wire.mod_eq(ready, revision),
            wire.mod_eq(state, revision),
            wire.mod_eq(claim, 0),
            wire.lease_eq(keys.session, keys.session_lease),
        ),
        (
            wire.put(claim, _CLAIM, keys.session_lease),
            wire.put(state, _STATE),
            wire.delete(ready),
            wire.get(spec),
        ),
        (wire.get(claim),),
    )


def settle_pieces(keys: FloorKeys, job: int, token: int) -> Pieces:
    """The claim of revision ``token`` ends well: the state goes to a retention lease, the spec goes away."""
    spec, state, _, claim = keys.of_job(job)
    return (
        (wire.create_eq(claim, token), wire.mod_eq(state, token)),
        (wire.delete(claim), wire.put(state, _STATE, keys.retention_lease), wire.delete(spec)),
        (wire.get(claim), wire.get(state)),
    )


async def etcd_floor(
    client: EtcdClient,
    jobs: int,
    group: int = 60,
    in_flight: int = 4,
    *,
    prefix: bytes = b"/bench-floor/",
) -> float:
    """Run ``jobs`` lifecycles in three phases and return lifecycles a second, sending time only.

    Args:
        client: of the etcd to measure.
        jobs: lifecycles.
        group: nested operations a Txn.
        in_flight: Txns under way at once.
        prefix: below it the run writes, and deletes everything at the end.

    Raises:
        ValueError: a number below 1, or a group that etcd's count rule forbids.
        RuntimeError: an operation lost its guard; somebody else writes below ``prefix``.
        StorageError: from etcd; the run is void.
    """
    if min(jobs, group, in_flight) < 1 or group > 124:
        raise ValueError(f"jobs {jobs}, group {group} (at most 124), in_flight {in_flight}: need 1 or more")
    keys = FloorKeys(
        prefix=prefix,
        session_lease=(await client.lease_grant(_SESSION_TTL, timeout=_TIMEOUT)).id,
        retention_lease=(await client.lease_grant(_RETENTION_TTL, timeout=_TIMEOUT)).id,
    )
    guard = wire.value_eq(keys.epoch, b"1")
    try:
        await client.put(keys.epoch, b"1", timeout=_TIMEOUT)
        await client.put(keys.session, b"", lease=keys.session_lease, timeout=_TIMEOUT)
        chunks = [range(start, min(start + group, jobs)) for start in range(0, jobs, group)]
        submits = [_txn(guard, [submit_pieces(keys, job) for job in chunk]) for chunk in chunks]
        seconds, revisions = await _send(client, submits, in_flight)
        claims = [
            _txn(guard, [claim_pieces(keys, job, revision) for job in chunk])
            for chunk, revision in zip(chunks, revisions, strict=True)
        ]
        more, tokens = await _send(client, claims, in_flight)
        seconds += more
        settles = [
            _txn(guard, [settle_pieces(keys, job, token) for job in chunk])
            for chunk, token in zip(chunks, tokens, strict=True)
        ]
        more, _ = await _send(client, settles, in_flight)
        return jobs / (seconds + more)
    finally:
        await client.lease_revoke(keys.session_lease, timeout=_TIMEOUT)
        await client.lease_revoke(keys.retention_lease, timeout=_TIMEOUT)
        await client.delete_range(prefix, prefix[:-1] + bytes((prefix[-1] + 1,)), timeout=_TIMEOUT)


def _txn(guard: bytes, operations: Sequence[Pieces]) -> bytes:
    return wire.txn((guard,), [wire.nested(*pieces) for pieces in operations], ())


async def _send(client: EtcdClient, requests: Sequence[bytes], in_flight: int) -> tuple[float, list[int]]:
    """Seconds for all ``requests``, and the revision of each."""
    revisions = [0] * len(requests)
    todo: Iterator[tuple[int, bytes]] = iter(enumerate(requests))

    async def sender() -> None:
        for number, request in todo:
            response = await client.txn_bytes(request, timeout=_TIMEOUT)
            if not response.succeeded or not all(one.response_txn.succeeded for one in response.responses):
                raise RuntimeError("a guard failed: the prefix is not the run's own")
            revisions[number] = response.header.revision

    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(sender())
    return time.perf_counter() - start, revisions
