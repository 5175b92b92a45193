"""The console script.

`worker run` of the user's own code, and what it says where the service is not installed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.support.fake_worker_server import FakeCoordinator
from tests.support.polling import eventually
from worker_sdk import ConfigError, Worker, _command
from worker_sdk._reload import changed, snapshot

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
empty = Worker(ConnectionConfig.from_env(), queues=["q"])
"""


def start(
    folder: Path, endpoint: str, target: str = "mytasks:worker", *options: str
) -> subprocess.Popen[str]:
    (folder / "mytasks.py").write_text(TASKS)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}",
        "LEASEKEEPER_ENDPOINTS": endpoint,
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "worker", "run", target, *options],
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


async def test_queues_and_concurrency_take_the_place_of_the_workers_own(
    server: FakeCoordinator, tmp_path: Path
) -> None:
    process = start(
        tmp_path, server.endpoint, "mytasks:worker", "--queues", "a=2,b=1", "--drain-timeout", "0.1"
    )
    try:
        server.add("j", queue="b")
        await eventually(lambda: server.how("j") == ["complete"], timeout=10)
        await eventually(lambda: len(server.calls["ClaimJobs"]) >= 2)
    finally:
        process.kill()
        process.communicate()
    asked = {(call.queues[0].queue, call.max_jobs) for call in server.calls["ClaimJobs"]}
    assert {("a", 2), ("b", 1)} <= asked


def worker_with(*queues: str) -> Worker:
    return Worker("127.0.0.1:1", queues=queues)


@pytest.mark.parametrize(
    ("queues", "concurrency", "limits"),
    [
        (None, None, {("x", "y"): 16}),
        (None, 4, {("x", "y"): 4}),
        ("a, b", 4, {("a", "b"): 4}),
        ("a", None, {("a",): 16}),
        ("a=3,b=1", None, {("a",): 3, ("b",): 1}),
    ],
)
def test_queues_and_slots_of_the_command_line(
    queues: str | None, concurrency: int | None, limits: dict[tuple[str, ...], int]
) -> None:
    worker = worker_with("x", "y")
    _command._set_queues(worker, queues, concurrency)
    assert worker._limits == limits


@pytest.mark.parametrize(
    ("queues", "concurrency"),
    [
        ("", None),
        ("a=", None),
        ("a=x", None),
        ("a=0", None),
        ("a,b=2", None),
        ("a=1", 4),
        ("a", 0),
        ("a", 9999),
    ],
)
def test_queues_and_slots_that_cannot_work_are_refused_and_change_nothing(
    queues: str | None, concurrency: int | None
) -> None:
    worker = worker_with("x")
    with pytest.raises(ConfigError):
        _command._set_queues(worker, queues, concurrency)
    assert worker._limits == {("x",): 16}


@pytest.mark.parametrize("option", [("--queues", "a,b=2"), ("--drain-timeout", "-1"), ("--concurrency", "x")])
def test_a_wrong_option_exits_2(tmp_path: Path, option: tuple[str, str]) -> None:
    process = start(tmp_path, "127.0.0.1:1", "mytasks:worker", *option)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert option[0] in errors
    assert "Traceback" not in errors


def test_a_queue_without_a_handler_exits_2(tmp_path: Path) -> None:
    process = start(tmp_path, "127.0.0.1:1", "mytasks:empty")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "no handler" in errors


async def test_reload_starts_the_worker_again_with_changed_code_and_loses_nothing(
    server: FakeCoordinator, tmp_path: Path
) -> None:
    process = start(tmp_path, server.endpoint, "mytasks:worker", "--reload")
    try:
        server.add("old")
        await eventually(lambda: server.how("old") == ["complete"], timeout=10)
        (tmp_path / "mytasks.py").write_text("this is no Python")
        await eventually(lambda: len(server.calls["CloseSession"]) == 1, timeout=10)
        (tmp_path / "mytasks.py").write_text(TASKS.replace('b"ok"', 'b"new"'))
        server.add("new")
        await eventually(lambda: server.how("new") == ["complete"], timeout=10)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.to_thread(process.communicate, timeout=10)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "mytasks.py" in errors
    assert server.jobs["old"].settlements[0].complete.result == b"ok"
    assert server.jobs["new"].settlements[0].complete.result == b"new"
    assert len(server.calls["CloseSession"]) == 2


def test_a_change_is_a_file_that_is_new_gone_or_written(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.txt", ".hidden/d.py", "sub/e.py", "__pycache__/f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    before = snapshot(tmp_path)
    assert {Path(path).name for path in before} == {"a.py", "b.py", "e.py"}
    assert changed(before, snapshot(tmp_path)) == []
    (tmp_path / "a.py").unlink()
    (tmp_path / "sub/g.py").write_text("")
    os.utime(tmp_path / "b.py", ns=(1, 1))
    assert [Path(path).name for path in changed(before, snapshot(tmp_path))] == ["a.py", "b.py", "g.py"]


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
