"""`pool="process"`: work in child processes, their deaths, and how a stop ends them."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_worker_server import FakeCoordinator
from tests.support.polling import eventually
from tests.unit.sdk import process_handlers as handlers
from tests.unit.sdk.conftest import Working, make
from worker_sdk import ConfigError, Context, ProcessContext, SyncContext, Worker, WorkerConfig

ROOT = Path(__file__).resolve().parents[3]


def with_handler(server: FakeCoordinator, function: object, *, slots: int = 1) -> Worker:
    worker = make(server, slots=slots, config=WorkerConfig(drain_timeout=0.2, cancel_grace=1.0))
    worker.handler("t", pool="process")(function)  # type: ignore[type-var]
    return worker


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def noted(path: Path) -> list[int]:
    return [int(text) for text in path.read_text().split()] if path.exists() else []


async def pids_in(path: Path) -> list[int]:
    await eventually(lambda: noted(path), timeout=20)
    return noted(path)


async def test_jobs_run_in_children_that_are_used_again(server: FakeCoordinator, working: Working) -> None:
    worker = with_handler(server, handlers.square, slots=2)
    for n in range(8):
        server.add(f"j{n}", payload=json.dumps([n]).encode())
    async with working(worker):
        await eventually(lambda: worker.stats.completed == 8, timeout=20)
    results = [json.loads(server.jobs[f"j{n}"].settlements[0].complete.result) for n in range(8)]
    assert [result["squares"] for result in results] == [[n * n] for n in range(8)]
    pids = {result["pid"] for result in results}
    assert os.getpid() not in pids
    assert len(pids) <= 2
    await eventually(lambda: not any(map(alive, pids)), what="the children to end with their worker")


async def test_a_child_knows_its_job_and_reports_through_its_worker(
    server: FakeCoordinator, working: Working
) -> None:
    server.interval = 0.05
    worker = make(server, slots=1)
    worker.handler("facts", pool="process")(handlers.facts)
    worker.handler("report", pool="process")(handlers.report)
    record = server.add("f", type="facts", labels={"a": "b"})
    record.checkpoint = b"before"
    async with working(worker):
        await eventually(lambda: server.how("f") == ["complete"], timeout=20)
        server.add("r", type="report")
        await eventually(lambda: server.how("r") == ["complete"], timeout=20)
    assert json.loads(record.settlements[0].complete.result) == ["f", "q", "facts", 1, {"a": "b"}, "before"]
    assert server.jobs["r"].checkpoint == b"here"


async def test_a_bad_payload_is_refused_in_the_child(server: FakeCoordinator, working: Working) -> None:
    worker = with_handler(server, handlers.square)
    server.add("j", payload=b'["x"]')
    async with working(worker):
        await eventually(lambda: server.how("j") == ["fail"], timeout=20)
    fail = server.jobs["j"].settlements[0].fail
    assert (fail.no_retry, fail.failure.type) == (True, "BadPayload")
    assert fail.failure.message == "payload[0]: must be int, is a text"


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("kill", "ProcessCrashed", "ended by SIGKILL"),
        ("segfault", "ProcessCrashed", "ended by SIGSEGV"),
        ("exit", "ProcessCrashed", "exit code 3"),
        ("grandchild", "ProcessCrashed", "ended by SIGKILL"),
        ("SystemExit", "SystemExit", "done"),
        ("Picky", "Picky", "('a', 'b')"),
        ("Retry", "Retry", "busy"),
    ],
)
async def test_049_a_child_that_fails_or_dies_costs_its_own_attempt_alone(
    server: FakeCoordinator, working: Working, how: str, kind: str, message: str
) -> None:
    worker = with_handler(server, handlers.end)
    server.add("bad", payload=how.encode())
    async with working(worker):
        await eventually(lambda: server.how("bad") == ["fail"], timeout=20)
        server.add("good", payload=b"well")
        await eventually(lambda: server.how("good") == ["complete"], timeout=20)
        assert worker.stats.sessions == 1
    fail = server.jobs["bad"].settlements[0].fail
    assert (fail.no_retry, fail.failure.type) == (False, kind)
    assert message in fail.failure.message


async def test_139_a_fork_that_comes_back_out_of_a_handler_reports_nothing(
    server: FakeCoordinator, working: Working
) -> None:
    worker = with_handler(server, handlers.end)
    server.add("j", payload=b"fork")
    async with working(worker):
        await eventually(lambda: server.how("j") == ["complete"], timeout=20)
    assert worker.stats.completed == 1


@pytest.mark.parametrize("how", ["cancelled", "lost", "run_timeout", "shutdown"])
async def test_a_job_that_is_to_stop_ends_with_its_process_and_what_that_started(
    server: FakeCoordinator, tmp_path: Path, how: str
) -> None:
    server.interval = 0.05
    worker = with_handler(server, handlers.hang)
    record = server.add("j", payload=str(tmp_path / "pids").encode())
    if how == "run_timeout":
        record.spec.run_timeout.seconds = 3
    run = asyncio.create_task(worker.run())
    pids = await pids_in(tmp_path / "pids")
    assert all(map(alive, pids))
    if how == "cancelled":
        record.cancel = True
    elif how == "lost":
        # Away for good: it must not come back to this worker.
        with server._changed:
            record.held = None
    elif how == "shutdown":
        worker.stop()
    await eventually(lambda: not any(map(alive, pids)), timeout=10)
    worker.stop()
    async with asyncio.timeout(10):
        await run
    wanted = {"cancelled": ["release"], "lost": [], "run_timeout": ["fail"], "shutdown": ["release"]}[how]
    assert server.how("j") == wanted
    if how == "run_timeout":
        assert record.settlements[0].fail.failure.type == "RunTimeout"
    assert worker.stats.abandoned == 0


async def test_a_checkpoint_of_a_lost_claim_raises_in_the_child(
    server: FakeCoordinator, working: Working
) -> None:
    server.interval = 60.0
    worker = with_handler(server, handlers.report_lost)
    record = server.add("j")
    server.always("SaveCheckpoint", None)
    async with working(worker):
        await eventually(lambda: record.held is not None)
        with server._changed:
            record.held = None
        await eventually(lambda: worker.stats.lost == 1, timeout=20)
    # The answer kills the child, which has perhaps seen the error before.
    assert server.how("j") == []


async def test_children_end_with_a_worker_that_is_killed(server: FakeCoordinator, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(
        "import asyncio\n"
        "from tests.unit.sdk import process_handlers\n"
        "from worker_sdk import ConnectionConfig, Worker\n"
        "if __name__ == '__main__':\n"
        "    worker = Worker(ConnectionConfig.from_env(), queues=['q'])\n"
        "    worker.handler('t', pool='process')(process_handlers.wait)\n"
        "    asyncio.run(worker.run())\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}",
        "LEASEKEEPER_ENDPOINTS": server.endpoint,
    }
    process = subprocess.Popen(  # noqa: ASYNC220  the test's own, and at once
        [sys.executable, str(tmp_path / "killed.py")], env=environment
    )
    try:
        server.add("j", payload=str(tmp_path / "pids").encode())
        [pid] = await pids_in(tmp_path / "pids")
        # What a service manager does to the whole group of a service: the child goes on, the worker drains.
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        await asyncio.sleep(0.1)
        assert alive(pid)
    finally:
        process.kill()
        process.wait(10)
    await eventually(lambda: not alive(pid), timeout=10)


def test_what_a_child_cannot_import_is_refused_at_registration(server: FakeCoordinator) -> None:
    worker = make(server)

    def inner(ctx: ProcessContext) -> None: ...

    async def coroutine(ctx: Context) -> None: ...

    class Callable_:  # noqa: N801
        def __call__(self, ctx: ProcessContext) -> None: ...

    def register(function: object, pool: str = "process") -> None:
        worker.handler("t", pool=pool)(function)  # type: ignore[arg-type, type-var]

    refused = [
        (inner, "made inside a function"),
        (lambda ctx: None, "made inside a function"),
        (functools.partial(handlers.facts), "no function that a child process could import"),
        (Callable_(), "no function that a child process could import"),
        (coroutine, "async def runs on the event loop"),
    ]
    for function, message in refused:
        with pytest.raises(ConfigError, match=message):
            register(function)
    with pytest.raises(ConfigError, match="not in a thread"):
        register(coroutine, "thread")
    with pytest.raises(ConfigError, match="would block the event loop"):
        register(inner, "loop")
    with pytest.raises(ConfigError, match="must be 'loop'"):
        register(inner, "fork")


async def test_a_name_that_leads_to_another_function_is_refused_before_the_worker_claims(
    server: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make(server)
    worker.handler("t", pool="process")(handlers.facts)

    def other(ctx: SyncContext) -> None: ...

    monkeypatch.setattr(handlers, "facts", other)
    with pytest.raises(ConfigError, match="a child process would not find it"):
        await worker.run()
    assert not server.calls["OpenSession"]
