"""The folder of a development server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coordinator.cli.dev_folder import DevFolder, FolderBusy
from coordinator.cli.dev_tour import tour_lines


def test_a_folder_has_one_user_at_a_time(tmp_path: Path) -> None:
    folder, other = DevFolder(tmp_path / "dev"), DevFolder(tmp_path / "dev")

    busy = pytest.raises(FolderBusy, match=f"in use by process {os.getpid()}")
    with folder.locked(), busy, other.locked():
        pass
    with other.locked():
        pass


def test_endpoints_are_announced_as_long_as_the_servers_run(tmp_path: Path) -> None:
    folder = DevFolder(tmp_path)

    with folder.announced({"etcd": "127.0.0.1:1"}):
        assert json.loads(folder.endpoints.read_text()) == {"etcd": "127.0.0.1:1"}
    assert not folder.endpoints.exists()


def test_the_tour_has_every_call_of_a_worker() -> None:
    lines = tour_lines("127.0.0.1:7")

    methods = [line.partition("127.0.0.1:7 leasekeeper.v1.")[2].partition(" ")[0] for line in lines]
    assert [method.partition("/")[2] for method in methods] == [
        "SubmitJob",
        "OpenSession",
        "ClaimJob",
        "Heartbeat",
        "CompleteJob",
        "GetJob",
    ]
