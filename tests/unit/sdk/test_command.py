"""The console script.

`worker run` of the user's own code, and what it says where the service is not installed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.support.fake_worker_server import FakeCoordinator
from tests.support.polling import eventually
from worker_sdk import _command

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "from worker_sdk._command import main; main()"
TASKS = """
import threading
from worker_sdk import Worker, WorkerConfig, ConnectionConfig

config = WorkerConfig(drain_timeout=0.2, cancel_grace=0.1)
worker = Worker(ConnectionConfig.from_env(), queues=["q"], config=config)

@worker.handler("t")
async def quick(ctx):
    return b"ok"

@worker.handler("stuck")
def stuck(ctx):
    threading.Event().wait()

@worker.handler("deaf")
async def deaf(ctx):
    import asyncio
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

def make():
    return worker

number = 3
"""


def start(folder: Path, endpoint: str, target: str = "mytasks:worker") -> subprocess.Popen[str]:
    (folder / "mytasks.py").write_text(TASKS)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}",
        "LEASEKEEPER_ENDPOINTS": endpoint,
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "worker", "run", target],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("target", ["mytasks:worker", "mytasks:make"])
async def test_worker_run_works_until_sigterm_and_exits_0(
    server: FakeCoordinator, tmp_path: Path, target: str
) -> None:
    process = start(tmp_path, server.endpoint, target)
    try:
        server.add("j")
        await eventually(lambda: server.how("j") == ["complete"], timeout=10)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert len(server.calls["CloseSession"]) == 1


@pytest.mark.parametrize("kind", ["stuck", "deaf"])
async def test_worker_run_exits_though_a_handler_never_ends(
    server: FakeCoordinator, tmp_path: Path, kind: str
) -> None:
    process = start(tmp_path, server.endpoint)
    try:
        server.add("j", type=kind)
        await eventually(lambda: server.jobs["j"].held, timeout=10)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=5)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert server.how("j") == ["release"]


@pytest.mark.parametrize(
    "target", ["mytasks", "mytasks:", "mytasks:absent", "mytasks:number", "absent:worker"]
)
def test_a_wrong_target_is_named_and_exits_2(tmp_path: Path, target: str) -> None:
    process = start(tmp_path, "127.0.0.1:1", target)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert target.partition(":")[0] in errors
    assert "Traceback" not in errors


def run_main(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        _command.main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_without_the_service_other_commands_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_command, "entry_points", lambda group: [])
    assert run_main("serve") == 2
    assert "pip install 'leasekeeper[server]'" in capsys.readouterr().err
    assert run_main() == 0
    assert "worker run" in capsys.readouterr().out
    assert run_main("worker", "run") == 2
    assert run_main("worker", "run", "--help") == 0


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = EntryPoint("coordinator", "a_package_that_is_not_there:app", "leasekeeper.commands")
    monkeypatch.setattr(_command, "entry_points", lambda group: [entry])
    assert run_main("serve") == 2
    assert "a_package_that_is_not_there is not installed" in capsys.readouterr().err


def test_with_the_service_its_commands_get_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Entry:
        name = "coordinator"

        def load(self) -> object:
            def app(*, args: list[str], prog_name: str) -> int:
                seen.append((args, prog_name))
                return 0

            return app

    monkeypatch.setattr(_command, "entry_points", lambda group: [Entry()])
    assert run_main("serve", "--x") == 0
    assert seen == [(["serve", "--x"], "leasekeeper")]
