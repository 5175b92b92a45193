"""`SyncJobClient`: the engine of `JobClient` from threads; where it cannot be used it says so at once."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from worker_sdk import (
    ClientClosed,
    ConnectionConfig,
    DeadlineExceeded,
    ForkedProcess,
    JobClient,
    JobExists,
    JobNotFound,
    JobSpec,
    JobState,
    JobTerminal,
    LeasekeeperError,
    RetryConfig,
    SyncJobClient,
    SyncLockClient,
    Timeouts,
    Unavailable,
    WrongEventLoop,
)
from worker_sdk.testing import FakeCoordinator


@pytest.fixture
def fake() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as running:
        yield running


@pytest.fixture
def client(fake: FakeCoordinator) -> Iterator[SyncJobClient]:
    with SyncJobClient(fake.endpoint) as made:
        yield made


def spec(job_id: str = "", **fields: object) -> JobSpec:
    return JobSpec(queue="q", type="t", job_id=job_id, **fields)  # type: ignore[arg-type]


def until(probe: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not probe():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_jobs_life_without_an_event_loop(client: SyncJobClient) -> None:
    assert client.submit(spec("a", payload=b"p")).created
    assert client.get("a").spec.payload == b"p"
    assert client.update("a", priority=1).spec.priority == 1
    assert [one.created for one in client.submit_many(spec(f"m{n}") for n in range(250))] == [True] * 250
    assert len({job.job_id for job in client.list(queue="q", page_size=100)}) == 251
    assert client.cancel("a", reason="enough").state is JobState.CANCELLED
    assert client.wait("a", timeout=5).end_reason == "enough"
    assert client.attempts("a").total == 0
    client.delete("a")
    with pytest.raises(JobNotFound):
        client.get("a")


def test_errors_are_those_of_the_asynchronous_client(client: SyncJobClient) -> None:
    client.submit(spec("a"))
    with pytest.raises(JobExists):
        client.submit(spec("a", payload=b"other"))
    with pytest.raises(DeadlineExceeded):
        client.wait("a", timeout=0.05)
    client.cancel("a")
    with pytest.raises(JobTerminal):
        client.update("a", priority=1)


def test_an_iteration_that_is_left_early_leaves_the_client_of_use(client: SyncJobClient) -> None:
    client.submit_many(spec(f"m{n}") for n in range(20))
    for _ in client.list(page_size=5):
        break
    assert len(list(client.list(page_size=5))) == 20


def test_many_threads_use_one_client(client: SyncJobClient) -> None:
    with ThreadPoolExecutor(16) as pool:
        stored = list(pool.map(lambda n: client.submit(spec(f"t{n}")).job_id, range(200)))
    assert len(set(stored)) == len(list(client.list())) == 200
    assert [thread.name for thread in threading.enumerate()].count("leasekeeper-jobs") == 1


def test_a_watch_tells_changes_and_ends_when_another_thread_closes_it(client: SyncJobClient) -> None:
    watch = client.watch(queue="q")
    assert watch.ready() > 0
    seen: list[str] = []

    def follow() -> None:
        for change in watch:
            seen.append(change.job_id)  # noqa: PERF401  each is to be seen as it comes

    follower = threading.Thread(target=follow)
    follower.start()
    client.submit(spec("a"))
    client.submit(spec("b"))
    until(lambda: len(seen) == 2)
    watch.close()
    follower.join(5)
    assert not follower.is_alive()
    assert seen == ["a", "b"]
    assert client.get("a").state is JobState.PENDING


async def test_where_an_event_loop_runs_it_refuses_at_once(fake: FakeCoordinator) -> None:
    client = SyncJobClient(fake.endpoint)
    uses: list[Callable[[], object]] = [
        lambda: client.get("a"),
        lambda: client.list(),
        lambda: client.watch(),
        client.__enter__,
    ]
    for use in uses:
        with pytest.raises(WrongEventLoop, match="use the asynchronous one"):
            use()
    assert "leasekeeper-jobs" not in {thread.name for thread in threading.enumerate()}


async def test_the_blocking_lock_client_refuses_likewise() -> None:
    client = SyncLockClient("127.0.0.1:9")
    uses: list[Callable[[], object]] = [
        lambda: client.check_token("a", 1),
        lambda: client.observe("a"),
        client.lock("a").__enter__,
        client.__enter__,
    ]
    for use in uses:
        with pytest.raises(WrongEventLoop, match="use the asynchronous one"):
            use()


def test_in_a_forked_child_it_refuses_and_can_be_left(fake: FakeCoordinator) -> None:
    client = SyncJobClient(fake.endpoint)
    client.submit(spec("a"))
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        told = b"?"
        try:
            client.get("a")
        except ForkedProcess:
            client.close()
            told = b"refused"
        finally:
            os.write(writer, told)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"refused"
    os.waitpid(child, 0)
    assert client.get("a").job_id == "a"
    client.close()


def test_closing_ends_calls_under_way_and_the_thread(fake: FakeCoordinator) -> None:
    client = SyncJobClient(fake.endpoint)
    client.submit(spec("a"))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.wait("a", timeout=60)
        except LeasekeeperError as error:
            errors.append(error)

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    loop = client._thread._loop
    assert loop is not None
    until(lambda: len(asyncio.all_tasks(loop)) > len(waiting))
    client.close()
    for thread in waiting:
        thread.join(5)
    assert [type(error) for error in errors] == [ClientClosed] * 3
    assert "leasekeeper-jobs" not in {thread.name for thread in threading.enumerate()}
    client.close()
    with pytest.raises(ClientClosed):
        client.get("a")


def test_without_a_coordinator_it_gives_up_at_its_deadline() -> None:
    config = ConnectionConfig(
        endpoints="127.0.0.1:9",
        timeouts=Timeouts(attempt=0.2, call=0.5, close=0.5),
        retry=RetryConfig(initial=0.01, maximum=0.1),
    )
    began = time.monotonic()
    with SyncJobClient(config) as client, pytest.raises((Unavailable, DeadlineExceeded)):
        client.get("a")
    assert time.monotonic() - began < 5


def test_a_program_that_forgets_to_close_it_ends(fake: FakeCoordinator) -> None:
    program = (
        "import sys; from worker_sdk import JobSpec, SyncJobClient;"
        "c = SyncJobClient(sys.argv[1]); print(c.submit(JobSpec(queue='q', type='t')).created)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, fake.endpoint], capture_output=True, text=True, timeout=30
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


def test_every_method_of_the_asynchronous_client_has_its_like() -> None:
    own = {name for name, _ in inspect.getmembers(SyncJobClient) if not name.startswith("_")}
    for name, method in inspect.getmembers(JobClient, inspect.isfunction):
        if name.startswith("_"):
            continue
        assert name in own
        like = getattr(SyncJobClient, name)
        assert like.__doc__
        assert list(inspect.signature(like).parameters) == list(inspect.signature(method).parameters)
