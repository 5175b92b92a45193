"""Locks under concurrent callers that die, give up and are cut off, judged by the history in etcd."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.core.lock_order import LockEntry, LockMode
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdClient, EtcdConfig
from tests.fault.support.history import read_history
from tests.fault.support.lapse import lapse
from tests.fault.support.lock_judge import LockHistory, Sink, Told, judge
from tests.fault.support.lock_play import LockPlay, entries_in
from tests.fault.support.lock_sink import FencedSink, LockProcess
from tests.fault.support.processes import Coordinator
from tests.fault.test_cluster import leader_of
from tests.support.polling import eventually
from tests.support.services import EtcdClusterFactory


async def played(
    etcd: Sequence[str], namespace: str, folder: Path, *, rounds: int, seed: int, faults: bool
) -> LockPlay:
    """Play against two coordinators, frozen and killed in turns with ``faults``; nothing may be wrong."""
    async with (
        Coordinator(etcd, folder, name="c1") as one,
        Coordinator(etcd, folder, name="c2") as two,
        EtcdClient(EtcdConfig(endpoints=tuple(etcd))) as client,
    ):
        play = LockPlay([one.endpoint, two.endpoint], namespace, client, seed)
        hurting = asyncio.create_task(hurt([one, two], seed)) if faults else None
        try:
            await play.run(rounds)
        finally:
            if hurting is not None:
                hurting.cancel()
                await asyncio.gather(hurting, return_exceptions=True)
                one.resume()
                two.resume()

        async def left_over() -> list[str]:
            return judge(entries_in(await read_history(etcd, namespace)), play.told)

        found: list[str] = []

        async def clean() -> bool:
            found[:] = await left_over()
            return not any("left behind" in one for one in found)

        def ask() -> object:
            return clean()

        try:
            await eventually(ask, timeout=20, interval=0.5, what="entries of sessions that have ended to go")
        finally:
            assert [] == [one for one in found if "left behind" not in one]
    assert play.sink.wrong == []
    return play


async def hurt(coordinators: Sequence[Coordinator], seed: int) -> None:
    """Freeze or kill one at a time."""
    chance = random.Random(seed)
    while True:
        await asyncio.sleep(0.3)
        victim = chance.choice(coordinators)
        if chance.random() < 0.5:
            victim.pause()
            try:
                for _ in range(chance.randrange(2, 12)):
                    await asyncio.sleep(0.3)
            finally:
                victim.resume()
        else:
            await victim.kill()
            await victim.start()


async def test_histories_of_locks_are_sound(
    uncompacted_etcd_server: EtcdProcess, namespace: str, tmp_path: Path
) -> None:
    """Mutual exclusion by token order, permits, first in first out, no lost wake-up, nothing left behind."""
    play = await played(
        uncompacted_etcd_server.endpoints, namespace, tmp_path, rounds=150, seed=4, faults=False
    )
    assert play.owned >= 75, play.refusals


@pytest.mark.etcd36
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_histories_of_locks_are_sound_while_coordinators_freeze_and_die(
    seed: int, etcd_cluster_factory: EtcdClusterFactory, namespace: str, tmp_path: Path
) -> None:
    """500 rounds, two coordinators, three members of etcd."""
    cluster = etcd_cluster_factory()
    play = await played(cluster.endpoints, namespace, tmp_path, rounds=500, seed=seed, faults=True)
    assert play.owned >= 150, play.refusals


async def hurt_holders(holders: Sequence[LockProcess], seed: int, hurt: set[int]) -> None:
    """Kill or freeze one at a time; a frozen one sleeps past its TTL of 2 s. *hurt*: pids of the frozen."""
    chance = random.Random(seed)
    while True:
        await lapse(0.5)
        victim = chance.choice(holders)
        if chance.random() < 0.5:
            hurt.add(victim.pid)
            victim.pause()
            try:
                await lapse(2.5 + chance.random() * 2)
            finally:
                victim.resume()
        else:
            await victim.kill()
            await victim.start()


async def with_holders(
    etcd: Sequence[str], namespace: str, folder: Path, *, rounds: int, count: int, seed: int
) -> tuple[LockPlay, FencedSink]:
    """Callers in this process beside processes that are killed and frozen, on the same locks."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(Coordinator(etcd, folder, name="c1"))
        two = await stack.enter_async_context(Coordinator(etcd, folder, name="c2"))
        client = await stack.enter_async_context(EtcdClient(EtcdConfig(endpoints=tuple(etcd))))
        play = LockPlay([one.endpoint, two.endpoint], namespace, client, seed)
        sink = await stack.enter_async_context(FencedSink(play.sink))
        holders = [
            LockProcess(
                f"{one.endpoint},{two.endpoint}",
                namespace,
                folder,
                name=f"holder{number}",
                names=("one", "two"),
                sink=sink.port,
                seed=seed * 100 + number,
            )
            for number in range(count)
        ]
        for holder in holders:
            await stack.enter_async_context(holder)
        hurt: set[int] = set()
        hurting = asyncio.create_task(hurt_holders(holders, seed, hurt))
        try:
            await play.run(rounds, clients=2)
        finally:
            hurting.cancel()
            await asyncio.gather(hurting, return_exceptions=True)
        for holder in holders:
            holder.resume()
            await holder.kill()

        async def gone() -> bool:
            return not judge(entries_in(await read_history(etcd, namespace)), play.told)

        def ask() -> object:
            return gone()

        await eventually(ask, timeout=25, interval=0.5, what="entries of the dead to go")
    assert play.sink.wrong == []
    assert [pid for pid in sink.refused if pid not in hurt] == [], "refused, and never frozen"
    return play, sink


async def test_holders_that_are_killed_and_frozen_never_write_beside_the_next_one(
    uncompacted_etcd_server: EtcdProcess, namespace: str, tmp_path: Path
) -> None:
    """Fault case 085: places come back from the dead, by the end of their sessions and by nothing else."""
    play, sink = await with_holders(
        uncompacted_etcd_server.endpoints, namespace, tmp_path, rounds=60, count=2, seed=5
    )
    assert play.owned >= 30, play.refusals
    assert {name for name, tokens in sink.accepted.items() if len(set(tokens)) > 2} == {"one", "two"}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_holders_that_are_killed_and_frozen_on_three_members(
    etcd_cluster_factory: EtcdClusterFactory, namespace: str, tmp_path: Path
) -> None:
    """Fault case 085, on a cluster, with more of all."""
    cluster = etcd_cluster_factory()
    play, _ = await with_holders(cluster.endpoints, namespace, tmp_path, rounds=300, count=4, seed=6)
    assert play.owned >= 100, play.refusals


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_locks_are_sound_while_leaders_of_etcd_freeze(
    etcd_cluster_factory: EtcdClusterFactory, namespace: str, tmp_path: Path
) -> None:
    """Fault case 021: the leader sleeps 0.8 to 2 TTLs, another one takes over, and it wakes."""
    cluster = etcd_cluster_factory()

    async def freeze() -> None:
        for share in (0.8, 1.2, 2.0) * 20:
            await lapse(1.0)
            victim = await leader_of(cluster.members)
            victim.pause()
            try:
                await lapse(share * 2.0)
            finally:
                victim.resume()

    freezing = asyncio.create_task(freeze())
    try:
        play = await played(cluster.endpoints, namespace, tmp_path, rounds=200, seed=7, faults=False)
    finally:
        freezing.cancel()
        await asyncio.gather(freezing, return_exceptions=True)
    assert play.owned >= 50, play.refusals


# The judge itself: what it must name.


def entry(waiter: str, revision: int, mode: LockMode = LockMode.EXCLUSIVE) -> LockEntry:
    """An entry of lock ``a``."""
    return LockEntry(name="a", waiter=waiter, session="s", mode=mode, revision=revision, version=revision)


SOUND = [(5, "a", "x", entry("x", 5)), (6, "a", "y", entry("y", 6)), (8, "a", "x", None), (9, "a", "y", None)]


def test_the_judge_passes_a_sound_history() -> None:
    assert judge(LockHistory(SOUND), [Told("a", 5, 5), Told("a", 6, 8), Told("a", 6, 20)]) == []


@pytest.mark.parametrize(
    ("changes", "told", "words"),
    [
        (SOUND, Told("a", 6, 7), "waits"),
        (SOUND, Told("a", 7, 8), "never stood"),
        (SOUND[:3], Told("a", 5, 5), "left behind"),
    ],
)
def test_the_judge_names_what_is_wrong(
    changes: list[tuple[int, str, str, LockEntry | None]], told: Told, words: str
) -> None:
    [wrong] = judge(LockHistory(changes), [told])
    assert words in wrong


def older_token(sink: Sink) -> None:
    sink.enter("a", 6, LockMode.EXCLUSIVE, 1)
    sink.leave("a", 6, LockMode.EXCLUSIVE, 1)
    sink.enter("a", 5, LockMode.EXCLUSIVE, 1)


def two_at_once(sink: Sink) -> None:
    sink.enter("a", 5, LockMode.EXCLUSIVE, 1)
    sink.enter("a", 6, LockMode.EXCLUSIVE, 1)


def too_many(sink: Sink) -> None:
    for token in (5, 6, 7):
        sink.enter("a", token, LockMode.SEMAPHORE, 2)


def reader_beside_writer(sink: Sink) -> None:
    sink.enter("a", 5, LockMode.EXCLUSIVE, 1)
    sink.enter("a", 6, LockMode.SHARED, 1)


@pytest.mark.parametrize("plant", [older_token, two_at_once, too_many, reader_beside_writer])
def test_the_sink_names_what_is_wrong(plant: Callable[[Sink], None]) -> None:
    sink = Sink()
    plant(sink)
    assert sink.wrong
