"""The bench's arithmetic and its lines: percentiles, medians of rounds, processor time, the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

__all__ = [
    "Measured",
    "Number",
    "cpu_seconds",
    "environment",
    "filesystem_of",
    "median_of",
    "percentile",
    "write_line",
]

Number = int | float | str | bool | None

_PACKAGES = ("grpcio", "protobuf", "uvloop", "leasekeeper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One round of a load.

    Args:
        count: jobs or calls done.
        seconds: from the first request sent to the last answer.
        latencies: of each, in seconds, in no order.
    """

    count: int
    seconds: float
    latencies: Sequence[float]

    @property
    def per_second(self) -> float:
        """Rate."""
        return self.count / self.seconds if self.seconds > 0 else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0-1) of the values do not exceed (nearest rank).

    Raises:
        ValueError: there are no values, or ``share`` is out of range.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"no percentile {share} of {len(values)} values")
    ordered = sorted(values)
    rank = max(0, -(-len(ordered) * share // 1) - 1)
    return ordered[int(rank)]


def median_of(rounds: Sequence[Measured], rate: str) -> dict[str, Number]:
    """Medians of the rounds' rate, p50 and p99, and the rates of all rounds, under the names of the output.

    Args:
        rate: name of the rate's field, such as ``jobs_per_second``.
    """
    return {
        rate: round(statistics.median(one.per_second for one in rounds), 1),
        "p50_ms": round(statistics.median(percentile(one.latencies, 0.50) for one in rounds) * 1000, 2),
        "p99_ms": round(statistics.median(percentile(one.latencies, 0.99) for one in rounds) * 1000, 2),
        "rounds": len(rounds),
        "slowest_round": round(min(one.per_second for one in rounds), 1),
        "fastest_round": round(max(one.per_second for one in rounds), 1),
    }


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used; 0.0 where ``/proc`` does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def filesystem_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Type of the file system that holds ``path``, "" if unknown. On tmpfs fsync costs nothing."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    resolved = path.resolve()
    best, kind = -1, ""
    for line in lines:
        fields = line.split()
        if len(fields) >= 3 and resolved.is_relative_to(fields[1]) and len(fields[1]) >= best:
            best, kind = len(fields[1]), fields[2]
    return kind


def environment(data: Path) -> dict[str, Number]:
    """The machine and the versions that numbers depend on; ``data`` is where etcd writes."""
    versions: dict[str, Number] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": _processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": filesystem_of(data),
        "python": platform.python_version(),
        **versions,
    }


def write_line(bench: str, fields: Mapping[str, Number], out: TextIO | None = None) -> None:
    """Print one JSON object on one line."""
    stream = sys.stdout if out is None else out
    print(json.dumps({"bench": bench, **fields}), file=stream, flush=True)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
