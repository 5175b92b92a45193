"""Several embedded etcd members that form one cluster."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from coordinator.embedded.child_process import PortTaken
from coordinator.embedded.etcd_process import EtcdOptions, EtcdProcess

__all__ = ["EtcdCluster"]

_START_ATTEMPTS = 5


class EtcdCluster:
    """A fresh cluster of *size* members under *folder*; blocking, not thread-safe.

    Args:
        folder: each member gets ``<folder>/m<i>``.
        options: the same for every member.
        size: number of members, 1 to 5.
    """

    def __init__(self, folder: Path, options: EtcdOptions | None = None, *, size: int = 3) -> None:
        if not 1 <= size <= 5:
            raise ValueError("a cluster has 1 to 5 members")
        self.folder = folder
        self.members = [EtcdProcess(folder / f"m{i}", options, name=f"m{i}") for i in range(size)]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Client endpoints of all members, in member order."""
        return tuple(member.endpoint for member in self.members)

    def start(self) -> Self:
        """Found the cluster, and return once every member is healthy.

        If somebody takes one of the ports, the half-made cluster is deleted and founded again, 5 tries.

        Raises:
            ChildStartError: it did not come up.
        """
        for attempt in range(1, _START_ATTEMPTS + 1):
            peers = {member.name: member.choose_ports() for member in self.members}
            try:
                for member in self.members:
                    member.place(peers, token=f"leasekeeper-{self.folder.name}-{attempt}")
                    member.spawn()
                for member in self.members:
                    member.wait_healthy()
                return self
            except PortTaken:
                self._discard()
                if attempt == _START_ATTEMPTS:
                    raise
            except BaseException:
                self.stop()
                raise
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Stop every member. Repeatable."""
        for member in self.members:
            # Without the others a member cannot hand over leadership, so waiting long for it is no use.
            member.stop(timeout=3.0)

    def _discard(self) -> None:
        for member in self.members:
            member.kill()
            shutil.rmtree(member.data_dir, ignore_errors=True)
