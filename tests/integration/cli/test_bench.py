"""`leasekeeper bench`: every line is one JSON object with the fields that others read."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.integration.cli.dev_process import COMMAND


def bench(*arguments: str) -> list[dict[str, object]]:
    """Run it; the lines as objects."""
    ran = subprocess.run(
        [*COMMAND, "bench", *arguments], capture_output=True, text=True, timeout=110, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_everything_in_one_run_prints_a_line_for_each_bench() -> None:
    lines = bench("--scale", "0.005", "--rounds", "1")

    named = [(line["bench"], line.get("mode"), line.get("client")) for line in lines]
    assert named == [
        ("environment", None, None),
        ("etcd_floor", None, None),
        ("lifecycle", "batch", "sdk"),
        ("lifecycle", "batch", "raw"),
        ("grpc_echo", None, None),
        ("lifecycle", "unary", "raw"),
        ("idle_latency", None, "sdk"),
        ("shares", None, None),
    ]
    for line in lines:
        if line["bench"] == "lifecycle":
            assert {"jobs_per_second", "p50_ms", "p99_ms", "etcd", "jobs"} <= set(line)
    by_name = {line["bench"]: line for line in lines}
    assert float(str(by_name["etcd_floor"]["lifecycles_per_second"])) > 0
    assert float(str(by_name["grpc_echo"]["calls_per_second"])) > 0
    assert {"p50_ms", "p99_ms"} <= set(by_name["idle_latency"])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("lifecycle", "--jobs", "150", "--mode", "batch", "--rounds", "1", "--json"), "lifecycle"),
        (("idle-latency", "--jobs", "5", "--rounds", "1", "--json"), "idle_latency"),
    ],
)
def test_one_bench_alone_prints_one_line(arguments: tuple[str, ...], name: str) -> None:
    (line,) = bench(*arguments)

    assert line["bench"] == name
    assert line["rounds"] == 1


def test_locks_are_measured_beside_others_in_one_run() -> None:
    (line,) = bench("locks", "--pairs", "128", "--handovers", "20", "--rounds", "1", "--json")

    assert line["bench"] == "locks"
    for name in ("pairs_per_second", "p50_ms", "p99_ms", "handover_p99_ms"):
        assert float(str(line[name])) > 0
    for maker in ("redis_", "etcd3_"):
        assert float(str(line[f"{maker}pairs_per_second"])) > 0
    assert float(str(line["redis_handover_p99_ms"])) > 0


def test_recovery_tells_how_long_jobs_rested() -> None:
    (line,) = bench("recovery", "--ttl", "2", "--kills", "1", "--releases", "1", "--jobs", "24", "--json")

    assert line["bench"] == "recovery"
    assert line["mass_jobs"] == 24
    told = ("killed_max_s", "released_max_ms", "mass_all_back_s", "storm_back_to_90_percent_s")
    assert all(float(str(line[name])) > 0 for name in told)
