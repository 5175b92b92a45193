"""`running`: a worker at work while a test goes on, whatever that test runs on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager

from worker_sdk.errors import DeadlineExceeded
from worker_sdk.worker import Worker

__all__ = ["running"]


@contextmanager
def running(worker: Worker, *, timeout: float = 10.0) -> Iterator[Worker]:
    """Run *worker* in a thread with an event loop of its own until the block ends.

    The block begins once the worker has a session. At its end the worker is stopped and drains.

    Args:
        worker: one that does not run.
        timeout: seconds for its start, and again for its end.

    Raises:
        LeasekeeperError: the worker ended by itself, and why.
        DeadlineExceeded: it did not start, or did not end, in time.
    """
    started: Future[asyncio.AbstractEventLoop] = Future()
    ended: Future[None] = Future()

    async def work() -> None:
        run = asyncio.create_task(worker.run())
        ready = asyncio.create_task(worker.ready())
        await asyncio.wait({run, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not run.done():
            started.set_result(asyncio.get_running_loop())
        await run

    def main() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:  # noqa: BLE001  it is raised where the block ends
            ended.set_exception(error)
        else:
            ended.set_result(None)
        if not started.done():
            started.cancel()

    thread = threading.Thread(target=main, name="leasekeeper-worker", daemon=True)
    thread.start()
    loop = _started(started, ended, timeout)
    try:
        yield worker
    finally:
        if not ended.done():
            loop.call_soon_threadsafe(worker.stop)
    try:
        ended.result(timeout)
    except TimeoutError:
        raise DeadlineExceeded(f"the worker did not end within {timeout:g} s") from None


def _started(
    started: Future[asyncio.AbstractEventLoop], ended: Future[None], timeout: float
) -> asyncio.AbstractEventLoop:
    try:
        return started.result(timeout)
    except TimeoutError:
        raise DeadlineExceeded(f"the worker had no session after {timeout:g} s") from None
    except CancelledError:
        ended.result(0)
        raise DeadlineExceeded("the worker ended before it had a session") from None
