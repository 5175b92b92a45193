"""The bench's arithmetic."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli.bench_numbers import (
    Measured,
    cpu_seconds,
    environment,
    filesystem_of,
    median_of,
    percentile,
    write_line,
)


@given(
    values=st.lists(st.floats(0, 1e6), min_size=1, max_size=200), share=st.sampled_from([0.0, 0.5, 0.99, 1.0])
)
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)

    needed = max(1, math.ceil(len(values) * share))
    assert found in values
    assert sum(value <= found for value in values) >= needed
    assert sum(value < found for value in values) < needed


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.5)])
def test_a_percentile_of_nothing_is_refused(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="no percentile"):
        percentile(values, share)


def test_the_median_of_three_rounds_is_the_middle_one() -> None:
    rounds = [Measured(count=100, seconds=s, latencies=[s / 10, s / 5]) for s in (1.0, 4.0, 2.0)]

    assert median_of(rounds, "jobs_per_second") == {
        "jobs_per_second": 50.0,
        "p50_ms": 200.0,
        "p99_ms": 400.0,
        "rounds": 3,
        "slowest_round": 25.0,
        "fastest_round": 100.0,
    }


def test_a_line_is_one_json_object() -> None:
    out = io.StringIO()
    write_line("x", {"a": 1, "b": None}, out)

    assert out.getvalue() == '{"bench": "x", "a": 1, "b": null}\n'


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/a / ext4 rw 0 0\ntmpfs {tmp_path.resolve()} tmpfs rw 0 0\nnone /elsewhere xfs rw 0 0\n"
    )

    assert filesystem_of(tmp_path / "data", mounts) == "tmpfs"
    assert filesystem_of(Path("/"), mounts) == "ext4"
    assert filesystem_of(tmp_path, tmp_path / "absent") == ""


def test_processor_time_grows_and_is_zero_for_nobody() -> None:
    assert cpu_seconds(os.getpid()) > 0
    assert cpu_seconds(2**22 + 1) == 0.0


def test_the_environment_names_machine_and_versions(tmp_path: Path) -> None:
    found = environment(tmp_path)

    assert json.loads(json.dumps(found)) == found
    assert found["python"]
    assert found["grpcio"]
