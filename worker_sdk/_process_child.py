"""The child's side of ``pool="process"``: takes one job after the other from its worker and runs it.

Only values of this module and of `worker_sdk._work` cross the line, made of bytes, texts and numbers; the
worker never unpickles anything of the handler's own. A child lives in a process group of its own, so that
the terminal's Ctrl-C does not reach it and a kill takes along what its handler has started.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from worker_sdk import errors
from worker_sdk._handlers import bind_process
from worker_sdk._outcome import from_exception, from_result, with_follow_ups
from worker_sdk._work import ClaimedJob, Outcome
from worker_sdk.process_context import ProcessContext

__all__ = ["Checkpoint", "ChildTask", "Done", "SaveError", "Saved", "Sign", "rebuild", "serve"]


@dataclass(frozen=True, slots=True)
class ChildTask:
    """One run: ``target`` is ``module:qualified.name``, ``run_until`` a time of the SDK's clock."""

    target: str
    job: ClaimedJob
    run_until: float | None


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life, with (ratio, note) if the handler told its progress."""

    progress: tuple[float, str] | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A wish to store a checkpoint; `Saved` answers it."""

    data: bytes
    timeout: float | None


@dataclass(frozen=True, slots=True)
class SaveError:
    """Why a checkpoint was not stored, as plain values: errors themselves do not pickle."""

    name: str
    message: str
    reason: str
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class Saved:
    """The answer to `Checkpoint`."""

    error: SaveError | None


@dataclass(frozen=True, slots=True)
class Done:
    """How the handler ended; ``trace`` is the text of its traceback, or empty."""

    outcome: Outcome
    trace: str


def rebuild(error: SaveError) -> errors.LeasekeeperError:
    """Return the error as the worker's side raised it."""
    found: type = getattr(errors, error.name, errors.LeasekeeperError)
    if issubclass(found, errors.RequestError):
        return found(error.message, reason=error.reason, metadata=error.metadata)
    return (
        found(error.message)
        if issubclass(found, errors.LeasekeeperError)
        else errors.LeasekeeperError(error.message)
    )


def serve(connection: Connection) -> None:
    """Run jobs until the worker closes the line or ends."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    # Not SIG_IGN, which the programs that a handler starts would inherit. A service manager may signal the
    # whole group of a service: the worker drains then, and its children must go on meanwhile.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _nothing)
    threading.Thread(target=_end_with_parent, name="leasekeeper-parent", daemon=True).start()
    line = _Line(connection)
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        done = _run(task, line)
        try:
            connection.send(done)
        except OSError:
            return


def _nothing(number: int, frame: FrameType | None) -> None:
    return


def _end_with_parent() -> None:
    """End this process with its worker: it must not go on with a job that somebody else will get."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


class _Line:
    """What a handler's calls send to the worker, from any of its threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def tell(self, progress: tuple[float, str] | None) -> None:
        """Send a sign of life."""
        self._here()
        with self._lock:
            self._connection.send(Sign(progress))

    def save(self, data: bytes, timeout: float | None) -> None:
        """Have a checkpoint stored."""
        self._here()
        with self._lock:
            self._connection.send(Checkpoint(data, timeout))
            # Its end is the worker's deadline for the call; a worker that dies closes the line.
            answer: Saved = self._connection.recv()
        if answer.error is not None:
            raise rebuild(answer.error)

    def _here(self) -> None:
        if os.getpid() != self._pid:
            raise errors.ForkedProcess("a forked child holds no claim: only its parent may act for the job")


_bound: dict[str, Callable[[ProcessContext], object]] = {}


def _run(task: ChildTask, line: _Line) -> Done:
    job, pid = task.job, os.getpid()
    try:
        function = _bound.get(task.target)
        if function is None:
            function = _bound[task.target] = bind_process(task.target)
        context = _context(task, job, line)
        return Done(with_follow_ups(from_result(function(context)), context.follow_ups), "")
    except BaseException as error:  # noqa: BLE001  see the table of `_outcome`: nothing escapes a handler
        if os.getpid() != pid:
            # A fork of the handler's that came back out of it: its parent speaks for the job.
            os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 70)
        outcome = from_exception(error, None)
        assert outcome is not None
        return Done(outcome, "".join(traceback.format_exception(error)))
    finally:
        if os.getpid() != pid:
            os._exit(70)


def _context(task: ChildTask, job: ClaimedJob, line: _Line) -> ProcessContext:
    facts: dict[str, Any] = {
        name: getattr(job, name)
        for name in (
            "job_id",
            "fencing_token",
            "queue",
            "type",
            "attempt",
            "payload",
            "content_type",
            "labels",
            "checkpoint",
            "failures",
            "max_retries",
        )
    }
    return ProcessContext(**facts, run_until=task.run_until, tell=line.tell, save=line.save)
