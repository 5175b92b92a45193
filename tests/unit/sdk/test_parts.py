"""Small parts of the SDK: latches, handler threads, conversions."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_sdk import JobSpec, JobState, RetryPolicy
from worker_sdk._convert.jobs import _spec_from, spec_to
from worker_sdk._convert.times import duration, seconds, timestamp
from worker_sdk._latch import Latch
from worker_sdk._threads import HandlerThreads


async def test_a_latch_wakes_whoever_waits_on_loops_and_in_threads() -> None:
    latch = Latch()
    woken: list[str] = []

    async def waits() -> None:
        await latch.wait()
        woken.append("loop")

    def blocks() -> None:
        assert latch.wait_blocking(5)
        woken.append("thread")

    def other_loop() -> None:
        asyncio.run(waits())

    threads = [threading.Thread(target=target) for target in (blocks, blocks, other_loop)]
    for thread in threads:
        thread.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(waits())
        await asyncio.sleep(0.02)
        await asyncio.to_thread(latch.set)
    for thread in threads:
        await asyncio.to_thread(thread.join, 5)
    assert sorted(woken) == ["loop", "loop", "thread", "thread"]
    await latch.wait()
    assert latch.is_set()


def test_a_latch_that_stays_open_lets_a_bounded_wait_end() -> None:
    assert not Latch().wait_blocking(0.01)


def test_handlers_share_at_most_so_many_threads() -> None:
    pool = HandlerThreads(3)
    names: set[str] = set()
    done = threading.Semaphore(0)

    def work() -> None:
        names.add(threading.current_thread().name)
        done.release()

    for _ in range(50):
        pool.run(work)
    for _ in range(50):
        assert done.acquire(timeout=5)
    pool.close()
    assert 1 <= len(names) <= 3


def test_a_free_thread_is_used_before_a_new_one_is_made() -> None:
    pool = HandlerThreads(10)
    names: set[str] = set()
    for _ in range(5):
        done = threading.Event()

        def work(done: threading.Event = done) -> None:
            names.add(threading.current_thread().name)
            done.set()

        pool.run(work)
        assert done.wait(5)
        # The thread counts as free a moment after its function has ended.
        for _ in range(1000):
            if pool._idle:
                break
            threading.Event().wait(0.001)
    pool.close()
    assert len(names) == 1


@given(st.floats(-1e9, 1e9))
def test_spans_survive_the_wire(value: float) -> None:
    message = duration(value, "x")
    assert abs(message.nanos) < 10**9
    assert message.seconds * message.nanos >= 0
    assert seconds(message) == pytest.approx(value, abs=1e-6)


@given(st.datetimes(min_value=datetime(1900, 1, 1), max_value=datetime(2300, 1, 1)))  # noqa: DTZ001
def test_times_survive_the_wire(value: datetime) -> None:
    aware = value.replace(tzinfo=UTC)
    message = timestamp(aware, "x")
    back = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(
        seconds=message.seconds, microseconds=message.nanos // 1000
    )
    assert back == aware


_NAMES = st.text("abcdefg-._0", min_size=1, max_size=20)
_SPANS = st.none() | st.integers(0, 10**6).map(float)
_TIMES = st.none() | st.integers(0, 4 * 10**9).map(lambda second: datetime.fromtimestamp(second, UTC))
_POLICIES = st.none() | st.builds(
    RetryPolicy,
    max_retries=st.none() | st.integers(0, 1000),
    initial_delay=_SPANS,
    multiplier=st.none() | st.integers(1, 100).map(float),
    max_delay=_SPANS,
    jitter=st.none() | st.just(0.5) | st.just(0.0),
    non_retryable_types=st.lists(_NAMES, max_size=3).map(tuple),
    max_lease_losses=st.none() | st.integers(0, 1000),
)


@given(
    st.builds(
        JobSpec,
        queue=_NAMES,
        type=_NAMES,
        payload=st.binary(max_size=50),
        content_type=_NAMES,
        job_id=_NAMES,
        labels=st.dictionaries(_NAMES, _NAMES, max_size=3),
        priority=st.integers(0, 5),
        due_time=_TIMES,
        run_at=_TIMES,
        queue_timeout=_SPANS,
        run_timeout=_SPANS,
        total_timeout=_SPANS,
        heartbeat_timeout=_SPANS,
        retry=_POLICIES,
        unique_key=_NAMES,
    )
)
def test_a_spec_survives_the_wire(spec: JobSpec) -> None:
    assert _spec_from(spec_to(spec)) == spec


def test_a_state_of_a_later_version_is_unspecified_not_an_error() -> None:
    assert JobState(99) is JobState.UNSPECIFIED
    assert [state.name for state in JobState if state.terminal] == [
        "SUCCEEDED",
        "DEAD",
        "CANCELLED",
        "QUARANTINED",
    ]
