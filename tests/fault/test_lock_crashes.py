"""Locks when a coordinator dies or drains in the middle of a call, and when a holder comes late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.core.fencing import split_token
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.failpoints import EXIT_CODE
from tests.fault.support.calls import refusal
from tests.fault.support.lapse import lapse
from tests.fault.support.lock_calls import LockHand, standing
from tests.fault.support.processes import Coordinator
from tests.support.polling import eventually
from worker_sdk import LockClient
from worker_sdk._seams import Seams

TTL = 30.0
"""Of the sessions here: whatever is given back within seconds was not given back by its end."""


@asynccontextmanager
async def two(
    etcd: EtcdProcess, folder: Path, failpoints: str
) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """Two coordinators; the first one has *failpoints*."""
    async with (
        Coordinator(etcd.endpoints, folder, name="c1", failpoints=failpoints) as one,
        Coordinator(etcd.endpoints, folder, name="c2") as other,
    ):
        yield one, other


def through(first: Coordinator, second: Coordinator, namespace: str, *, ttl: float = TTL) -> LockClient:
    """A client that asks *first*, not one by chance, and *second* when that fails."""
    return LockClient(
        f"{first.endpoint},{second.endpoint}", namespace=namespace, ttl=ttl, seams=Seams(fraction=lambda: 0.0)
    )


async def hold(client: LockClient, name: str, order: list[str], who: str, wait: float | None = 20.0) -> None:
    """Take it once, and note that."""
    async with client.lock(name, wait=wait) as lock:
        lock.check()
        order.append(who)


async def waiters(etcd: EtcdProcess, namespace: str, count: int) -> None:
    """Wait until so many entries stand."""

    async def there() -> bool:
        return len(await standing(etcd.endpoints, namespace, "a")) == count

    await eventually(there, timeout=5, interval=0.02, what=f"{count} entries")


async def test_a_coordinator_that_dies_between_the_entry_and_the_answer_costs_no_second_entry(
    etcd_server: EtcdProcess, namespace: str, tmp_path: Path
) -> None:
    async with (
        two(etcd_server, tmp_path, "lock.after-commit=exit") as (one, other),
        through(one, other, namespace) as client,
    ):
        async with client.lock("a", wait=15) as lock:
            [entry] = await standing(etcd_server.endpoints, namespace, "a")
            assert split_token(lock.token).revision == entry.revision
            assert entry.version > entry.revision, "the repeat took over what the dead coordinator had put"
            assert await one.wait(5) == EXIT_CODE
        assert await standing(etcd_server.endpoints, namespace, "a") == []


@pytest.mark.parametrize("end", ["killed", "drained"])
async def test_a_coordinator_that_goes_during_a_wait_costs_nobody_his_place(
    end: str, etcd_server: EtcdProcess, namespace: str, tmp_path: Path
) -> None:
    """The waiter goes on at the other coordinator, before one who came later."""
    order: list[str] = []
    async with (
        two(etcd_server, tmp_path, "") as (one, other),
        through(one, other, namespace) as first,
        through(other, one, namespace) as second,
    ):
        async with second.lock("a"):
            early = asyncio.create_task(hold(first, "a", order, "early"))
            await waiters(etcd_server, namespace, 2)
            late = asyncio.create_task(hold(second, "a", order, "late"))
            await waiters(etcd_server, namespace, 3)
            if end == "killed":
                await one.kill()
            else:
                assert await one.terminate(15) == 0

            async def taken_over() -> bool:
                return any(one.repeats for one in await standing(etcd_server.endpoints, namespace, "a"))

            await eventually(taken_over, timeout=10, interval=0.05, what="the repeat elsewhere")
        await asyncio.gather(early, late)
        assert order == ["early", "late"]
        assert await standing(etcd_server.endpoints, namespace, "a") == []


async def test_a_coordinator_that_is_killed_in_a_wait_leaves_nothing_of_a_caller_that_is_gone_too(
    etcd_server: EtcdProcess, namespace: str, tmp_path: Path
) -> None:
    async with (
        two(etcd_server, tmp_path, f"lock.in-line=pause:{tmp_path / 'go'}") as (one, other),
        through(one, other, namespace) as first,
        through(other, one, namespace) as second,
        second.lock("a"),
    ):
        waiting = asyncio.create_task(hold(first, "a", [], "gone"))
        await eventually((tmp_path / "go.reached").exists, timeout=5, what="the wait")
        await one.kill()
        waiting.cancel()
        begun = time.monotonic()
        await waiters(etcd_server, namespace, 1)
        assert time.monotonic() - begun < 5.0, "not by the end of a session"
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("point", ["unlock.before-commit", "unlock.after-commit"])
async def test_a_release_that_is_not_answered_is_repeated_and_the_lock_is_free_at_once(
    point: str, etcd_server: EtcdProcess, namespace: str, tmp_path: Path
) -> None:
    """Fault case 042: TTL 30 s, the coordinator dies in the release; nobody is told of a loss."""
    async with (
        two(etcd_server, tmp_path, f"{point}=exit") as (one, other),
        through(one, other, namespace) as first,
        LockHand(other.endpoint, namespace) as next_one,
    ):
        async with first.lock("a"):
            begun = time.monotonic()
        assert await one.wait(5) == EXIT_CODE
        await next_one.take("a", wait=5)
        assert time.monotonic() - begun < 5.0


async def test_a_holder_that_comes_late_releases_nothing_of_the_next_one(
    etcd_server: EtcdProcess, namespace: str, tmp_path: Path
) -> None:
    """Fault cases 041 and 086: whoever slept past his lease gives back twice, ten times over."""
    async with (
        Coordinator(etcd_server.endpoints, tmp_path) as one,
        LockHand(one.endpoint, namespace) as other,
    ):
        for _ in range(3):
            async with LockHand(one.endpoint, namespace, ttl=2) as late:
                slept = await late.take("g", permits=1)
                mine = await other.take("g", permits=1, wait=15)
                before = await standing(etcd_server.endpoints, namespace, "g")
                for _ in range(2):
                    assert (await refusal(late.give("g", slept))).reason == "LOCK_LOST"
                    assert (await refusal(other.give("g", slept))).reason == "LOCK_LOST"
                # Its session is over: nothing of it can stand, but what it names is not forgiven blindly.
                assert (await refusal(late.give("g", slept, repeat=True))).reason == "LOCK_LOST"
                assert await standing(etcd_server.endpoints, namespace, "g") == before
                assert mine > slept
                await other.give("g", mine)


async def test_a_restart_of_all_coordinators_opens_no_second_place(
    etcd_server: EtcdProcess, namespace: str, tmp_path: Path
) -> None:
    """Fault case 086: one holds, five wait, every coordinator is killed and started again."""
    order: list[str] = []
    async with two(etcd_server, tmp_path, "") as (one, other), through(one, other, namespace) as client:
        async with client.lock("a") as lock:
            tasks = [
                asyncio.create_task(hold(client, "a", order, f"{number}", wait=None)) for number in range(5)
            ]
            await waiters(etcd_server, namespace, 6)
            await asyncio.gather(one.kill(), other.kill())
            await asyncio.gather(one.start(), other.start())
            await lapse(1.0)
            assert order == []
            lock.check()
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)
    assert len(order) == 5


async def test_a_contender_s_ttl_says_nothing_of_the_leader_s(
    etcd_server: EtcdProcess, namespace: str, tmp_path: Path
) -> None:
    """Fault case 030: a leader with TTL 2 s dies, contenders have 60 s and 2 s: its own lease decides."""
    async with (
        Coordinator(etcd_server.endpoints, tmp_path) as one,
        LockHand(one.endpoint, namespace, ttl=60) as long,
    ):
        async with LockHand(one.endpoint, namespace, ttl=2) as dead:
            await dead.take("leader")
            begun = time.monotonic()
            token = await long.take("leader", wait=15)
            assert 1.0 < time.monotonic() - begun < 2 * 2 + 3 + 1
        async with LockClient(one.endpoint, namespace=namespace, ttl=2) as short:
            contending = asyncio.create_task(hold(short, "leader", [], "short"))
            await lapse(5.0)
            assert not contending.done(), "it went by its own TTL"
            await long.give("leader", token)
            await asyncio.wait_for(contending, 5)
