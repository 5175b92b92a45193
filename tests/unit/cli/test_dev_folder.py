"""The folder of a development server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coordinator.cli.dev_folder import DevFolder, FolderBusy, FolderUnusable
from coordinator.cli.dev_tour import grpcurl_path_line, tour_lines


def test_a_folder_has_one_user_at_a_time(tmp_path: Path) -> None:
    folder, other = DevFolder(tmp_path / "dev"), DevFolder(tmp_path / "dev")

    busy = pytest.raises(FolderBusy, match=f"in use by process {os.getpid()}")
    with folder.locked(), busy, other.locked():
        pass
    with other.locked():
        pass


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("kept")

    for root in (file, file / "below"):
        with pytest.raises(FolderUnusable, match=f"{root} cannot be used: "), DevFolder(root).locked():
            pass
    assert file.read_text() == "kept"


def test_only_a_folder_that_is_made_here_hides_itself_from_git(tmp_path: Path) -> None:
    own, theirs = DevFolder(tmp_path / "made" / "dev"), DevFolder(tmp_path)

    with own.locked(), theirs.locked():
        assert (own.root / ".gitignore").read_text() == "*\n"
        assert not (theirs.root / ".gitignore").exists()


def test_grpcurl_is_put_on_the_path_where_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, on_path = tmp_path / "tools" / "grpcurl", tmp_path / "bin" / "grpcurl"
    for program in (built, on_path):
        program.parent.mkdir()
        program.touch(mode=0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    assert grpcurl_path_line(built) == [f"PATH='{built.parent}':$PATH"]
    assert grpcurl_path_line(tmp_path / "absent") == []
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert grpcurl_path_line(built) == []


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
