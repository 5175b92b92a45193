"""The worker's side of ``pool="process"``: children by spawn, one job at a time in each, killed on a stop.

By spawn and never by fork: gRPC's threads do not survive a fork. A child that dies takes its own attempt
along and nothing else; the next job gets another child.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from worker_sdk._process_child import Checkpoint, ChildTask, Done, Saved, SaveError, Sign, serve
from worker_sdk.errors import LeasekeeperError, RequestError

__all__ = ["Child", "HandlerProcesses", "ProcessCrashed"]

_log = logging.getLogger("worker_sdk.processes")
# The end of a child is seen at once by its pipes, unless a grandchild holds copies of them: then by this.
_LOOK_SECONDS = 0.5
_REAP_SECONDS = 5.0


class ProcessCrashed(Exception):
    """The child ended before its handler did: it was killed, it crashed, or it could not start."""


class Child:
    """One child process. One thread at a time uses it, except for `kill`."""

    def __init__(self, process: SpawnProcess, connection: Connection) -> None:
        self._process = process
        self._connection = connection
        self._killed = False
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether it can take a job."""
        return not self._killed and self._process.exitcode is None

    def kill(self) -> None:
        """Kill it, with what its handler has started; from any thread, at once."""
        with self._lock:
            if self._killed or self._process.exitcode is not None or self._process.pid is None:
                return
            self._killed = True
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()  # so young that it has no group yet

    def run(
        self,
        task: ChildTask,
        sign: Callable[[tuple[float, str] | None], None],
        save: Callable[[bytes, float | None], None],
    ) -> Done:
        """Run one job; blocks until its handler ends.

        Args:
            sign: told of signs of life, with the progress if there is one.
            save: stores a checkpoint.

        Raises:
            ProcessCrashed: the child ended first.
        """
        try:
            self._connection.send(task)
            while True:
                message = self._receive()
                if isinstance(message, Done):
                    return message
                if isinstance(message, Sign):
                    sign(message.progress)
                elif isinstance(message, Checkpoint):
                    self._connection.send(Saved(_save(save, message)))
        except (EOFError, OSError) as error:
            raise ProcessCrashed(self._end()) from error

    def _receive(self) -> object:
        while not self._connection.poll(0):
            if self._process.exitcode is not None and not self._connection.poll(0):
                raise EOFError
            wait([self._connection, self._process.sentinel], timeout=_LOOK_SECONDS)
        return self._connection.recv()

    def _end(self) -> str:
        self._process.join(_LOOK_SECONDS)
        code = self._process.exitcode
        if code is None:
            self.kill()
            return "the child process has closed its line"
        if code >= 0:
            return f"the child process ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the child process was ended by {name}"

    def close(self) -> None:
        """Kill it and free what it holds."""
        self.kill()
        self._process.join(_REAP_SECONDS)
        self._connection.close()


def _save(save: Callable[[bytes, float | None], None], wish: Checkpoint) -> SaveError | None:
    try:
        save(wish.data, wish.timeout)
    except LeasekeeperError as error:
        if isinstance(error, RequestError):
            return SaveError(type(error).__name__, str(error), error.reason, dict(error.metadata))
        return SaveError(type(error).__name__, str(error), "", {})
    return None


class HandlerProcesses:
    """Owner of a worker's children. There are never more of them than jobs that ran at one time."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._closed = False

    def take(self) -> Child:
        """Return a child that waits for a job, a new one if there is none.

        Raises:
            ProcessCrashed: no process can be started, or the worker has ended.
        """
        while True:
            with self._lock:
                if not self._idle:
                    break
                child = self._idle.pop()
            if child.alive:
                return child
            self._drop(child)
        try:
            return self._start()
        except OSError as error:
            raise ProcessCrashed(f"no child process can be started: {error}") from error

    def _start(self) -> Child:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs,), name="leasekeeper-handler")
        # multiprocessing keeps a set of its children that is not made for threads.
        with self._lock:
            if self._closed:
                ours.close()
                theirs.close()
                raise ProcessCrashed("the worker has ended")
            if not self._all:
                # Before the interpreter waits for its children, which end only when they are told to.
                atexit.register(self.close)
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            child = Child(process, ours)
            self._all.add(child)
        return child

    def give_back(self, child: Child) -> None:
        """Take back a child after its job."""
        if child.alive:
            with self._lock:
                if not self._closed:
                    self._idle.append(child)
                    return
        self._drop(child)

    def _drop(self, child: Child) -> None:
        with self._lock:
            self._all.discard(child)
        child.close()

    def close(self) -> None:
        """Kill all children, also those that still run a job."""
        with self._lock:
            self._closed = True
            children, self._all, self._idle = self._all, set(), []
        for child in children:
            child.kill()
        if children:
            atexit.unregister(self.close)
