"""Handlers that child processes import, for the tests of ``pool="process"``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from worker_sdk import ClaimLost, JobSpec, ProcessContext, Retry


class Picky(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


def square(ctx: ProcessContext, numbers: list[int]) -> dict[str, object]:
    return {"pid": os.getpid(), "squares": [n * n for n in numbers]}


def facts(ctx: ProcessContext) -> list[object]:
    return [ctx.job_id, ctx.queue, ctx.type, ctx.attempt, dict(ctx.labels), ctx.checkpoint.decode()]


def report(ctx: ProcessContext) -> None:
    ctx.progress(0.5, "half")
    ctx.save_checkpoint(b"here")
    ctx.check()


def report_lost(ctx: ProcessContext) -> str:
    try:
        ctx.save_checkpoint(b"late")
    except ClaimLost as error:
        return f"{type(error).__name__} {error.held}"
    return "stored"


def end(ctx: ProcessContext) -> None:
    """End in the way that the payload names."""
    how = ctx.payload.decode()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "exit":
        os._exit(3)
    if how == "SystemExit":
        sys.exit("done")
    if how == "Picky":
        raise Picky("a", "b")
    if how == "Retry":
        raise Retry("busy", delay=7)
    if how == "fork":
        pid = os.fork()
        if pid == 0:
            return  # comes back out of the handler in a process that nobody asked for
        os.waitpid(pid, 0)
    if how == "grandchild":
        # Holds copies of the child's pipes, so that its death alone closes nothing.
        if os.fork() == 0:
            threading.Event().wait(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def hang(ctx: ProcessContext) -> None:
    """Hang in C code that never gives the interpreter back, with a program beside it."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(ctx.payload.decode()).write_text(f"{os.getpid()} {program.pid}")
    ctypes.PyDLL(None).usleep(60_000_000)


def wait(ctx: ProcessContext) -> None:
    Path(ctx.payload.decode()).write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def follow(ctx: ProcessContext) -> None:
    ctx.submit(JobSpec(queue="next", type="t", job_id=f"after-{ctx.job_id}", payload=ctx.payload))
