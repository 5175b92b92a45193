"""What a process and an etcd hold (oracle O4): files, threads, children, memory, watchers, leases."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from coordinator.embedded.etcd_process import EtcdProcess
from tests.fault.support.court import Court, metric

__all__ = ["Holdings", "back_to", "leaked_leases", "process_holdings", "watchers"]

_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Of one process at one moment; ``kib``: resident memory."""

    files: int
    threads: int
    children: int
    kib: int

    def near(self, before: Holdings, *, files: int = 5, threads: int = 2, kib: int = 60_000) -> bool:
        """Whether it is back to *before*, but for so much more: connections are made anew, caches fill."""
        return (
            self.files <= before.files + files
            and self.threads <= before.threads + threads
            and self.children <= before.children
            and self.kib <= before.kib + kib
        )


def process_holdings(pid: int) -> Holdings:
    """What a process holds now."""
    proc = Path(f"/proc/{pid}")
    tasks = list((proc / "task").iterdir())
    return Holdings(
        files=len(os.listdir(proc / "fd")),
        threads=len(tasks),
        children=sum(len((task / "children").read_text().split()) for task in tasks if task.exists()),
        kib=int((proc / "statm").read_text().split()[1]) * _PAGE_KIB,
    )


def watchers(etcd: EtcdProcess) -> float:
    """How many watchers an etcd has."""
    return metric(etcd.metrics_url, "etcd_debugging_mvcc_watcher_total")


async def back_to(pid: int, before: Holdings, *, timeout: float = 10.0, files: int = 5) -> None:
    """Wait until the process is back to *before*, see `Holdings.near`.

    Raises:
        AssertionError: it is not within *timeout* seconds; with both.
    """
    deadline = time.monotonic() + timeout
    while not (now := process_holdings(pid)).near(before, files=files):
        assert time.monotonic() < deadline, f"{now}, before {before}"
        await asyncio.sleep(0.1)


async def leaked_leases(court: Court, *, coordinators: int) -> int:
    """How many leases are neither a session's nor a retained job's, beyond what coordinators have open.

    Each has its membership, and may have a retention bucket that nothing was put on yet.
    """
    async with court.etcd() as etcd:
        told = {lease.id for lease in (await etcd.leases(timeout=5)).leases}
        used = set()
        for span in (court.keys.all_states(), court.keys.all_sessions()):
            found = await etcd.range(*span, timeout=10)
            used |= {entry.lease for entry in found.kvs}
    return max(0, len(told - used) - 2 * coordinators)
