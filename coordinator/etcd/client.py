"""The methods of etcd's v3 API that the coordinator uses; how calls travel stands in
`coordinator.etcd.calls`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.etcd.auth import Credentials, Login
from coordinator.etcd.calls import Calls
from coordinator.etcd.channels import ChannelConfig
from coordinator.etcd.cluster import ClusterPin
from coordinator.etcd.ring import MemberRing
from leasekeeper.internal.etcd.v1.kv_pb2 import (
    CompactionRequest,
    CompactionResponse,
    DeleteRangeRequest,
    DeleteRangeResponse,
    PutRequest,
    PutResponse,
    RangeRequest,
    RangeResponse,
    TxnRequest,
    TxnResponse,
)
from leasekeeper.internal.etcd.v1.lease_pb2 import (
    LeaseGrantRequest,
    LeaseGrantResponse,
    LeaseLeasesRequest,
    LeaseLeasesResponse,
    LeaseRevokeRequest,
    LeaseRevokeResponse,
    LeaseTimeToLiveRequest,
    LeaseTimeToLiveResponse,
)
from leasekeeper.internal.etcd.v1.maintenance_pb2 import (
    AlarmRequest,
    AlarmResponse,
    AlarmType,
    DefragmentRequest,
    DefragmentResponse,
    MemberListRequest,
    MemberListResponse,
    StatusRequest,
    StatusResponse,
)

__all__ = ["EtcdClient", "EtcdConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """Where etcd is and how to talk to it.

    Args:
        endpoints: ``host:port`` of the members, optionally with ``http://`` or ``https://``.
        channel: connection settings, TLS included.
        credentials: user and password, or None.
        read_attempt_seconds: how long one member may take for a read while others have not been asked.
    """

    endpoints: Sequence[str]
    channel: ChannelConfig = field(default_factory=ChannelConfig)
    credentials: Credentials | None = None
    read_attempt_seconds: float = 1.5


class EtcdClient:
    """One process's client; made inside the running event loop, closed by `close` or ``async with``.

    Every call takes ``timeout`` in seconds and ends by then. All raise, besides what is named at each:

    - reads: EtcdUnavailable, PermissionDenied, InvalidRequest, ClusterChanged;
    - writes: NotApplied and its kin (certain), OutcomeUnknown (perhaps applied), EtcdUnavailable (no
      member could be reached, nothing was sent), ClusterChanged.

    Args:
        config: see `EtcdConfig`.
        on_regression: see `ClusterPin`.
        monotonic: seconds, never falling.
    """

    def __init__(
        self,
        config: EtcdConfig,
        *,
        on_regression: Callable[[int, int], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ring = MemberRing(config.endpoints, config.channel)
        self.login = Login(config.credentials, monotonic)
        self.pin = ClusterPin(on_regression)
        self._calls = Calls(self.ring, self.login, self.pin, read_attempt_seconds=config.read_attempt_seconds)

    async def __aenter__(self) -> EtcdClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; calls under way end with an error. Repeatable."""
        await self.ring.close()

    @property
    def high_water(self) -> int:
        """Highest revision that any reply of a linearizable call has shown."""
        return self.pin.high_water

    @property
    def raft_term(self) -> int:
        """Raft term of the last reply."""
        return self.pin.raft_term

    @property
    def cluster_id(self) -> int:
        """Id of the cluster that the first reply came from; 0 before that."""
        return self.pin.cluster_id

    # --- keys -----------------------------------------------------------------------------------------------

    async def range(
        self,
        key: bytes,
        range_end: bytes = b"",
        *,
        limit: int = 0,
        revision: int = 0,
        keys_only: bool = False,
        count_only: bool = False,
        serializable: bool = False,
        timeout: float,
    ) -> RangeResponse:
        """Read the keys of [key, range_end), in key order; one key if *range_end* is empty.

        ``limit`` bounds the answer, not etcd's work: give ranges a tight end.

        Raises:
            Compacted: *revision* is gone.
            FutureRevision: *revision* does not exist yet.
        """
        request = RangeRequest(
            key=key,
            range_end=range_end,
            limit=limit,
            revision=revision,
            keys_only=keys_only,
            count_only=count_only,
            serializable=serializable,
        )
        return await self._calls.read(
            "/etcdserverpb.KV/Range",
            request.SerializeToString(),
            RangeResponse.FromString,
            timeout,
            linearizable=not serializable,
        )

    async def txn_bytes(self, request: bytes, *, timeout: float) -> TxnResponse:
        """Send an encoded TxnRequest, once. The hot path: nothing is encoded here."""
        return await self._calls.write("/etcdserverpb.KV/Txn", request, TxnResponse.FromString, timeout)

    async def txn(self, request: TxnRequest, *, timeout: float) -> TxnResponse:
        """Send a Txn, once."""
        return await self.txn_bytes(request.SerializeToString(), timeout=timeout)

    async def read_txn(self, request: TxnRequest, *, timeout: float) -> TxnResponse:
        """Send a flat Txn of ranges alone, which every member may be asked in turn.

        Raises:
            ValueError: it holds something else than ranges.
        """
        for op in (*request.success, *request.failure):
            if op.WhichOneof("request") != "request_range":
                raise ValueError("read_txn takes ranges alone")
        return await self._calls.read(
            "/etcdserverpb.KV/Txn", request.SerializeToString(), TxnResponse.FromString, timeout
        )

    async def put(self, key: bytes, value: bytes, *, lease: int = 0, timeout: float) -> PutResponse:
        """Write one key. Raises LeaseNotFound if *lease* does not exist."""
        request = PutRequest(key=key, value=value, lease=lease)
        return await self._calls.write(
            "/etcdserverpb.KV/Put", request.SerializeToString(), PutResponse.FromString, timeout
        )

    async def delete_range(
        self, key: bytes, range_end: bytes = b"", *, timeout: float
    ) -> DeleteRangeResponse:
        """Delete the keys of [key, range_end); one key if *range_end* is empty."""
        request = DeleteRangeRequest(key=key, range_end=range_end)
        return await self._calls.write(
            "/etcdserverpb.KV/DeleteRange",
            request.SerializeToString(),
            DeleteRangeResponse.FromString,
            timeout,
        )

    async def compact(self, revision: int, *, physical: bool = False, timeout: float) -> CompactionResponse:
        """Forget history before *revision*; *physical* waits until the space is reusable.

        Raises:
            Compacted: done already, up to *revision* or further.
            FutureRevision: there is no such revision yet.
        """
        request = CompactionRequest(revision=revision, physical=physical)
        return await self._calls.write(
            "/etcdserverpb.KV/Compact", request.SerializeToString(), CompactionResponse.FromString, timeout
        )

    # --- leases ---------------------------------------------------------------------------------------------

    async def lease_grant(self, ttl: int, lease_id: int = 0, *, timeout: float) -> LeaseGrantResponse:
        """Grant a lease of at least *ttl* seconds; the reply says how many. 0 lets etcd choose the id.

        Raises:
            LeaseExists: *lease_id* is in use. After an unknown outcome it may be our own first try.
        """
        request = LeaseGrantRequest(ttl=ttl, id=lease_id)
        return await self._calls.write(
            "/etcdserverpb.Lease/LeaseGrant",
            request.SerializeToString(),
            LeaseGrantResponse.FromString,
            timeout,
        )

    async def lease_revoke(self, lease_id: int, *, timeout: float) -> LeaseRevokeResponse:
        """End a lease, deleting its keys in one revision. Raises LeaseNotFound if there is none."""
        request = LeaseRevokeRequest(id=lease_id)
        return await self._calls.write(
            "/etcdserverpb.Lease/LeaseRevoke",
            request.SerializeToString(),
            LeaseRevokeResponse.FromString,
            timeout,
        )

    async def lease_time_to_live(
        self, lease_id: int, *, keys: bool = False, timeout: float
    ) -> LeaseTimeToLiveResponse:
        """Ask a lease's remaining seconds (-1: there is none) and, if wanted, its keys."""
        request = LeaseTimeToLiveRequest(id=lease_id, keys=keys)
        return await self._calls.read(
            "/etcdserverpb.Lease/LeaseTimeToLive",
            request.SerializeToString(),
            LeaseTimeToLiveResponse.FromString,
            timeout,
            linearizable=False,
        )

    async def leases(self, *, timeout: float) -> LeaseLeasesResponse:
        """List the ids of all leases, as one member knows them."""
        return await self._calls.read(
            "/etcdserverpb.Lease/LeaseLeases",
            LeaseLeasesRequest().SerializeToString(),
            LeaseLeasesResponse.FromString,
            timeout,
            linearizable=False,
        )

    # --- cluster --------------------------------------------------------------------------------------------

    async def status(self, endpoint: str = "", *, timeout: float) -> StatusResponse:
        """Ask one member how it is: the one at *endpoint*, without failover, or any. KeyError: no such
        one."""
        request = StatusRequest().SerializeToString()
        member = self.ring.named(endpoint) if endpoint else None
        return await self._calls.read(
            "/etcdserverpb.Maintenance/Status",
            request,
            StatusResponse.FromString,
            timeout,
            linearizable=False,
            only=member,
        )

    async def alarms(self, *, timeout: float) -> AlarmResponse:
        """List the alarms that are raised."""
        request = AlarmRequest(action=AlarmRequest.GET)
        return await self._calls.read(
            "/etcdserverpb.Maintenance/Alarm", request.SerializeToString(), AlarmResponse.FromString, timeout
        )

    async def disarm(self, alarm: AlarmType.ValueType, *, member_id: int, timeout: float) -> AlarmResponse:
        """Lift an alarm of one member, as ``alarms`` names it: etcd 3.6.16 lifts nothing for member 0."""
        request = AlarmRequest(action=AlarmRequest.DEACTIVATE, member_id=member_id, alarm=alarm)
        return await self._calls.write(
            "/etcdserverpb.Maintenance/Alarm", request.SerializeToString(), AlarmResponse.FromString, timeout
        )

    async def defragment(self, endpoint: str, *, timeout: float) -> DefragmentResponse:
        """Defragment the member at *endpoint*; it answers nobody meanwhile. KeyError: no such endpoint."""
        return await self._calls.write(
            "/etcdserverpb.Maintenance/Defragment",
            DefragmentRequest().SerializeToString(),
            DefragmentResponse.FromString,
            timeout,
            only=self.ring.named(endpoint),
        )

    async def member_list(self, *, linearizable: bool = True, timeout: float) -> MemberListResponse:
        """List the members of the cluster."""
        request = MemberListRequest(linearizable=linearizable)
        return await self._calls.read(
            "/etcdserverpb.Cluster/MemberList",
            request.SerializeToString(),
            MemberListResponse.FromString,
            timeout,
            linearizable=False,
        )
