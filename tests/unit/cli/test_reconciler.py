"""`leasekeeper reconciler`: what it is refused for, at which address it listens."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.app import COORDINATOR, RECONCILER, Role
from coordinator.cli import service_process
from coordinator.cli.commands import commands_entry
from coordinator.config import Settings


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LEASEKEEPER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Role, Settings]]:
    """What was to run; nothing does."""
    ran: list[tuple[Role, Settings]] = []

    def run(settings: Settings, *, role: Role, ready: object) -> None:
        ran.append((role, settings))

    monkeypatch.setattr(service_process, "run_role", run)
    monkeypatch.setattr(service_process, "configure_logging", lambda level, form: None)
    return ran


def run(*arguments: str) -> tuple[int, str]:
    """Exit code, and standard error."""
    result = CliRunner().invoke(commands_entry, arguments)
    return result.exit_code, result.stderr


def test_one_file_serves_a_coordinator_and_a_daemon_on_one_machine(
    run_as: list[tuple[Role, Settings]], tmp_path: Path
) -> None:
    path = tmp_path / "leasekeeper.toml"
    path.write_text('[server]\nlisten = "127.0.0.1:1"\nreuse_port = true\n[etcd]\nendpoints = "e:1"\n')

    assert [(0, ""), (0, "")] == [run(name, "-c", str(path)) for name in ("serve", "reconciler")]
    (served, coordinator), (repaired, daemon) = run_as
    assert (COORDINATOR, RECONCILER) == (served, repaired)
    assert ("127.0.0.1:1", True) == (coordinator.server.listen, coordinator.server.reuse_port)
    assert ("127.0.0.1:7421", False) == (daemon.server.listen, daemon.server.reuse_port)
    assert ("e:1", "e:1") == (coordinator.etcd.endpoints, daemon.etcd.endpoints)


def test_its_own_flag_names_its_own_address(run_as: list[tuple[Role, Settings]]) -> None:
    assert (0, "") == run("reconciler", "--listen", "127.0.0.1:7")
    [(_, settings)] = run_as
    assert "127.0.0.1:7" == settings.server.listen


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--listen", "here"), "reconciler.listen (here) must be host:port"),
        (("--set", "reconciler.sweep_every_s=0"), "reconciler.sweep_every_s (0) must be greater than 0"),
        (("--set", "reconciler.enable=false"), "reconciler.enable: there is no such setting"),
    ],
)
def test_settings_that_cannot_be_used_end_it_with_2(arguments: tuple[str, ...], says: str) -> None:
    code, err = run("reconciler", *arguments)

    assert code == 2
    assert err.startswith("leasekeeper reconciler: ")
    assert says in err


def test_an_address_in_use_ends_it_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_process, "configure_logging", lambda level, form: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, err = run("reconciler", "--listen", address)

    assert code == 2
    assert f"cannot listen at {address}" in err
