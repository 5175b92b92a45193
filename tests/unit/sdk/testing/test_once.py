"""One run of a handler without any coordinator ends as a worker would end it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from worker_sdk import (
    ClaimLost,
    ConfigError,
    Context,
    JobCancelled,
    JobSpec,
    NoRetry,
    ProcessContext,
    Progress,
    Result,
    Retry,
    SyncContext,
)
from worker_sdk.testing import Outcome, run_once, run_once_async


@dataclass
class Mail:
    to: str
    copies: int = 1


async def send(ctx: Context, mail: Mail) -> dict[str, Any]:
    ctx.progress(0.5, "half")
    await ctx.save_checkpoint(b"one")
    await ctx.save_checkpoint(b"two")
    ctx.progress(1.0)
    ctx.submit(JobSpec(job_id="next", queue="q", type="t", payload=b"p"))
    return {"to": mail.to, "attempt": ctx.attempt, "before": ctx.checkpoint.decode()}


def count(ctx: ProcessContext) -> int:
    ctx.progress(0.1)
    ctx.save_checkpoint(b"c")
    ctx.submit(JobSpec(queue="q", type="t"))
    return len(ctx.payload)


def test_a_success_tells_all_that_was_asked_for() -> None:
    outcome = run_once(send, {"to": "a@b.c"}, attempt=2, checkpoint=b"zero")

    assert outcome.kind == "succeeded"
    assert outcome.json() == {"to": "a@b.c", "attempt": 2, "before": "zero"}
    assert outcome.content_type == "application/json"
    assert outcome.checkpoints == (b"one", b"two")
    assert outcome.progress == (Progress(0.5, "half"), Progress(1.0, ""))
    [follow_up] = outcome.follow_ups
    assert (follow_up.job_id, follow_up.payload, outcome.error) == ("next", b"p", None)


def test_a_plain_function_runs_in_a_thread_and_may_store_checkpoints() -> None:
    def handle(ctx: SyncContext) -> Result:
        ctx.save_checkpoint(ctx.payload.upper())
        return Result(b"{}", "application/json")

    outcome = run_once(handle, "text")

    assert (outcome.result, outcome.content_type, outcome.checkpoints) == (
        b"{}",
        "application/json",
        (b"TEXT",),
    )


def test_a_process_handler_gets_its_own_context() -> None:
    outcome = run_once(count, b"abc", pool="process")

    assert (outcome.result, outcome.checkpoints, len(outcome.progress)) == (b"3", (b"c",), 1)
    assert len(outcome.follow_ups) == 1


@pytest.mark.parametrize(
    ("error", "delay", "no_retry", "type_"),
    [
        (ValueError("x"), None, False, "ValueError"),
        (Retry("x", delay=7), 7, False, "Retry"),
        (NoRetry("x"), None, True, "NoRetry"),
    ],
)
def test_a_failure_says_what_it_asks_for(
    error: Exception, delay: float | None, no_retry: bool, type_: str
) -> None:
    async def handle(ctx: Context) -> None:
        ctx.submit(JobSpec(queue="q", type="t"))
        raise error

    outcome = run_once(handle)

    assert outcome.kind == "failed"
    assert (outcome.failure_type, outcome.failure_message) == (type_, "x")
    assert (outcome.retry_delay, outcome.no_retry, outcome.error) == (delay, no_retry, error)
    assert outcome.follow_ups == ()


def test_a_payload_of_another_shape_is_the_end_of_the_job() -> None:
    outcome = run_once(send, {"for": "a@b.c"})

    assert (outcome.kind, outcome.failure_type, outcome.no_retry) == ("failed", "BadPayload", True)


@pytest.mark.parametrize(
    ("stop", "kind", "told"),
    [
        ("cancelled", "released", "cancelled"),
        ("worker_shutdown", "released", "worker_shutdown"),
        ("run_timeout", "failed", "RunTimeout"),
        ("lost", "lost", ""),
    ],
)
def test_a_handler_that_is_told_to_stop(stop: str, kind: str, told: str) -> None:
    seen = []

    async def handle(ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(ctx.stop_reason)
            with pytest.raises(ClaimLost if stop == "lost" else JobCancelled):
                ctx.check()

    outcome = run_once(handle, stop=stop)

    assert (outcome.kind, outcome.reason or outcome.failure_type, seen) == (kind, told, [stop])


def test_a_plain_function_hears_of_a_stop_where_it_looks() -> None:
    def handle(ctx: SyncContext) -> None:
        ctx.sleep(30)

    assert run_once(handle, stop="cancelled").reason == "cancelled"


def test_a_run_timeout_ends_it() -> None:
    async def handle(ctx: Context) -> None:
        assert ctx.remaining() is not None
        await asyncio.Event().wait()

    assert run_once(handle, run_timeout=0.05).failure_type == "RunTimeout"


async def test_on_a_running_loop_it_is_awaited() -> None:
    async def handle(ctx: Context) -> str:
        return ctx.job_id

    outcome: Outcome = await run_once_async(handle, job_id="j")
    with pytest.raises(ConfigError, match="run_once_async"):
        run_once(handle)

    assert outcome.result == b"j"


async def test_who_awaits_it_may_be_cancelled() -> None:
    ended = asyncio.Event()

    async def handle(ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await run_once_async(handle)
    await ended.wait()


def test_what_a_worker_would_not_take_is_refused() -> None:
    async def handle(ctx: Context) -> None: ...

    with pytest.raises(ConfigError, match="not in a thread"):
        run_once(handle, pool="thread")
    with pytest.raises(ConfigError, match="one of lost, cancelled"):
        run_once(handle, stop="soon")


BLOCK = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {names!r} or name in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


def python(code: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    script = BLOCK.format(names=blocked) + code
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def test_it_needs_nothing_that_the_sdk_does_not_need() -> None:
    server = ("redis", "typer", "rich", "structlog", "prometheus_client", "pydantic", "pydantic_settings")
    more = ("uvloop", "grpc_health", "grpc_reflection", "pytest", "msgspec")
    code = "from worker_sdk.testing import FakeCoordinator\nwith FakeCoordinator() as f: print(f.endpoint)"
    done = python(code, *server, *more)

    assert done.stdout.startswith("127.0.0.1:"), done.stderr


def test_without_the_coordinators_rules_it_says_what_is_missing() -> None:
    done = python("import worker_sdk.testing", "coordinator")

    assert "ImportError: worker_sdk.testing runs the coordinator's own rules" in done.stderr
