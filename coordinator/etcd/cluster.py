"""Which cluster we talk to, and where its history stands: cluster id, highest revision, raft term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.errors import ClusterChanged
from leasekeeper.internal.etcd.v1.kv_pb2 import ResponseHeader

__all__ = ["ClusterPin", "VersionVerdict", "judge_version"]

RegressionCallback = Callable[[int, int], None]


class ClusterPin:
    """Compares each reply's header with what was seen before.

    Only replies of linearizable calls may be judged by revision, and only against what was known when the
    call was sent: replies overtake each other, and members that lag answer local reads from the past.

    Args:
        on_regression: called with (highest revision seen before the call, revision of the reply) whenever a
            reply shows that history went back, as after a restore in place, which keeps the cluster id.
    """

    def __init__(self, on_regression: RegressionCallback | None = None) -> None:
        self._on_regression = on_regression
        self.cluster_id = 0
        self.high_water = 0
        self.history = 0
        self.raft_term = 0
        self.regressions = 0

    def check_cluster(self, cluster_id: int) -> None:
        """Pin the first cluster id, and refuse any other.

        Raises:
            ClusterChanged: the reply comes from another cluster. A write was applied there, not here. This
                stays so until `accept`.
        """
        if cluster_id != self.cluster_id and cluster_id:
            if self.cluster_id:
                raise ClusterChanged(f"etcd cluster {cluster_id:x} answers in place of {self.cluster_id:x}")
            self.cluster_id = cluster_id

    def observe(self, header: ResponseHeader, sent_at: int, history: int) -> None:
        """Judge the reply of a linearizable call.

        Args:
            header: outermost header of the reply.
            sent_at: `high_water` when the call was sent.
            history: `history` then. What was sent before `accept` says nothing of what was accepted.

        Raises:
            ClusterChanged: as of `check_cluster`.
        """
        if header.cluster_id != self.cluster_id:
            self.check_cluster(header.cluster_id)
        if history != self.history:
            return
        revision = header.revision
        if revision > self.high_water:
            self.high_water = revision
        elif revision < sent_at:
            self.regressions += 1
            if self._on_regression is not None:
                self._on_regression(sent_at, revision)
        self.raft_term = header.raft_term

    def accept(self, cluster_id: int, revision: int) -> None:
        """Go on with a cluster, or a history, that an operator vouches for."""
        self.cluster_id = cluster_id
        self.high_water = revision
        self.history += 1


@dataclass(frozen=True, slots=True)
class VersionVerdict:
    """Whether a server version is supported, and why not."""

    supported: bool
    defect: str = ""


# First patch of each release with the lease fixes (etcd CHANGELOG-3.4, -3.5, -3.6).
_FLOORS: dict[tuple[int, int], int] = {(3, 4): 38, (3, 5): 23, (3, 6): 5}
_LEASE_DEFECT = "a keepalive may be answered with success for a revoked lease (etcd issue 20616)"


def judge_version(version: str) -> VersionVerdict:
    """Judge an etcd version such as ``3.5.23``: supported are 3.4.38+, 3.5.23+, 3.6.5+ and later releases."""
    try:
        major, minor, patch = (int(part) for part in version.split("-")[0].split(".")[:3])
    except ValueError:
        return VersionVerdict(False, f"unknown etcd version {version!r}")
    if (major, minor) < (3, 4):
        return VersionVerdict(False, f"etcd {version} is older than 3.4 and lacks watch fragments")
    if (major, minor) in ((3, 4), (3, 5)) and patch < _FLOORS[major, minor]:
        extra = "; data may differ between members after a crash (etcd issue 13766)"
        broken = (major, minor) == (3, 5) and patch < 3
        return VersionVerdict(False, f"etcd {version}: {_LEASE_DEFECT}{extra if broken else ''}")
    floor = _FLOORS.get((major, minor))
    if floor is not None and patch < floor:
        return VersionVerdict(False, f"etcd {version}: {_LEASE_DEFECT}")
    return VersionVerdict(True)
