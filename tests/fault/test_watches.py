"""Watches that end, go quiet, lose events or history: what a coordinator knows is right again in seconds."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from tests.fault.support.calls import Calls, available
from tests.fault.support.court import Court
from tests.fault.support.health import SERVING, health
from tests.fault.support.holdings import process_holdings, watchers
from tests.fault.support.processes import SWEEP_OFTEN, Coordinator, PollProcess, WorkerProcess
from tests.fault.support.rpc_proxy import RpcProxy
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy


@pytest.fixture
async def healthy(own_etcd: EtcdProcess, tmp_path: Path) -> AsyncIterator[Coordinator]:
    """A coordinator with a sound path to etcd: what goes on while another one is deaf."""
    async with Coordinator(own_etcd.endpoints, tmp_path, name="healthy") as coordinator:
        yield coordinator


async def hears(calls: Calls, elsewhere: Calls, job_id: str, *, within: float) -> None:
    """A poll at *calls* gets a job that is submitted *elsewhere* while it waits."""
    session = await available(lambda: calls.open(ttl=60), timeout=within)
    polling = asyncio.create_task(calls.claim(session, wait=within, kinds=[job_id]))
    await asyncio.sleep(0.2)
    await elsewhere.submit(job_id, type=job_id)
    [claim] = await polling
    assert claim.job_id == job_id
    assert await calls.complete(claim) == "SUCCEEDED"


async def test_a_watch_that_missed_compacted_history_lists_again(
    own_etcd: EtcdProcess, own_court: Court, healthy: Coordinator, namespace: str, tmp_path: Path
) -> None:
    """Fault case 099: the path is cut, 100 changes come, history is compacted, the path is back."""
    kept, gone = [f"k{n:02}" for n in range(50)], [f"g{n:02}" for n in range(50)]
    async with (
        TcpProxy(own_etcd.endpoint) as path,
        Coordinator([path.endpoint], tmp_path, name="deaf") as deaf,
        Calls(deaf.endpoint, namespace) as calls,
        Calls(healthy.endpoint, namespace) as elsewhere,
        own_court.etcd() as etcd,
    ):
        await elsewhere.submit_many([calls.spec(job_id) for job_id in gone])
        await hears(calls, elsewhere, "before", within=10)
        path.set_mode(ProxyMode.DROP)
        for job_id in gone:
            await elsewhere.cancel(job_id)
        await elsewhere.submit_many([calls.spec(job_id) for job_id in kept])
        await etcd.compact(await own_court.keep(), timeout=5)
        path.set_mode(ProxyMode.PASS)

        session = await available(lambda: calls.open(ttl=60), timeout=15)
        begin = time.monotonic()
        got: list[str] = []
        while len(got) < len(kept) and time.monotonic() - begin < 15:
            for claim in await available(lambda: calls.claim(session, most=50, wait=1), timeout=10):
                got.append(claim.job_id)
                assert await calls.complete(claim) == "SUCCEEDED"
        assert sorted(got) == kept, "its view is not what etcd holds"
        await hears(calls, elsewhere, "after", within=10)
    await own_court.judge(submitted=[*kept, *gone, "before", "after"])


@pytest.mark.parametrize("how", ["the path swallows all", "etcd is frozen"])
@pytest.mark.parametrize(
    "span", [pytest.param(12.0, marks=pytest.mark.slow), pytest.param(60.0, marks=[pytest.mark.full])]
)
@pytest.mark.timeout(240)
async def test_a_watch_that_goes_quiet_makes_the_coordinator_unready_and_is_made_anew(
    how: str, span: float, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 101: no error, just silence. Unready within ten seconds, and hearing again soon after."""
    async with (
        TcpProxy(own_etcd.endpoint) as path,
        Coordinator([path.endpoint], tmp_path, name="deaf") as deaf,
        Calls(deaf.endpoint, namespace) as calls,
    ):
        await hears(calls, calls, "before", within=10)
        freezes = how == "etcd is frozen"
        begin = time.monotonic()
        if freezes:
            own_etcd.pause()
        else:
            path.set_mode(ProxyMode.DROP)

        async def unready() -> bool:
            return await health(deaf.endpoint, "leasekeeper.v1.WorkerService") != SERVING

        await eventually(unready, timeout=10, interval=0.1, what="not ready")
        await eventually(lambda: time.monotonic() - begin > span, timeout=span + 5, what="the silence")
        assert await unready()
        if freezes:
            own_etcd.resume()
        else:
            path.set_mode(ProxyMode.PASS)

        async def ready() -> bool:
            return not await unready()

        await eventually(ready, timeout=15, interval=0.1, what="ready again")
        await hears(calls, calls, "after", within=15)
    await own_court.judge(submitted=["before", "after"])


@pytest.mark.parametrize("how", ["ok", "cancelled"])
async def test_a_watch_that_ends_politely_is_taken_for_lost(
    how: str, own_etcd: EtcdProcess, own_court: Court, healthy: Coordinator, namespace: str, tmp_path: Path
) -> None:
    """Fault case 102: the stream ends with status OK, or the server cancels the watch: listed anew."""
    async with (
        RpcProxy(own_etcd.endpoint) as path,
        Coordinator([path.endpoint], tmp_path, name="deaf") as deaf,
        Calls(deaf.endpoint, namespace) as calls,
        Calls(healthy.endpoint, namespace) as elsewhere,
    ):
        await hears(calls, elsewhere, "before", within=10)
        opened = path.watches
        ended = path.end_watches(how)
        assert ended >= 2
        await eventually(lambda: path.watches >= opened + ended, timeout=10, what="the watches are made anew")
        await hears(calls, elsewhere, "after", within=10)
    await own_court.judge(submitted=["before", "after"])


@pytest.mark.parametrize(
    ("seconds", "loss"),
    [
        pytest.param(8, 0.05, marks=pytest.mark.slow),
        pytest.param(180, 0.01, marks=[pytest.mark.full, pytest.mark.timeout(420)]),
    ],
)
async def test_events_that_the_server_loses_leave_no_job_behind(
    seconds: int, loss: float, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 103: a share of all watch events never arrives, of two coordinators, and workers die.

    The comparison of the index with the store and the sweep find what no event told.
    """
    chance = random.Random(103)
    ids: list[str] = []
    async with AsyncExitStack() as stack:
        paths = [await stack.enter_async_context(RpcProxy(own_etcd.endpoint, seed=n)) for n in range(2)]
        pair = [
            await stack.enter_async_context(
                Coordinator([path.endpoint], tmp_path, name=f"c{n}", plan=SWEEP_OFTEN)
            )
            for n, path in enumerate(paths)
        ]
        ends = ",".join(coordinator.endpoint for coordinator in pair)
        told = {"sink": own_court.sink.path, "ttl": 3.0}
        for path in paths:
            path.loss = loss
        await stack.enter_async_context(WorkerProcess(ends, namespace, tmp_path, name="w1", **told))
        dying = await stack.enter_async_context(WorkerProcess(ends, namespace, tmp_path, name="w2", **told))
        both = [await stack.enter_async_context(Calls(one.endpoint, namespace)) for one in pair]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            job_id = f"j{len(ids):05}"
            await chance.choice(both).submit(job_id, {"work": chance.choice((0.0, 0.1))})
            ids.append(job_id)
            await asyncio.sleep(0.02)
            if dying.running and time.monotonic() > until - seconds / 2:
                await dying.kill()
        await own_court.ended(ids, timeout=90)
        assert sum(path.lost for path in paths) > 10, "nothing was lost: prove nothing"
    judgement = await own_court.judge(submitted=ids)
    assert judgement.states == {"SUCCEEDED": len(ids)}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    "span", [pytest.param(15.0, marks=pytest.mark.slow), pytest.param(60.0, marks=pytest.mark.full)]
)
@pytest.mark.timeout(240)
async def test_an_outage_is_waited_out_without_spinning_or_flooding_the_log(
    span: float, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 106: etcd is killed. A tenth of a core at most, few log lines, no growth, back by itself."""
    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
    ):
        await hears(calls, calls, "before", within=10)
        before = process_holdings(coordinator.pid)
        lines = len(coordinator.log.splitlines())
        await asyncio.to_thread(own_etcd.kill)
        cpu, begin = cpu_seconds(coordinator.pid), time.monotonic()
        await eventually(lambda: time.monotonic() - begin > span, timeout=span + 5, what="the outage")
        burnt = (cpu_seconds(coordinator.pid) - cpu) / (time.monotonic() - begin)
        said = coordinator.log.splitlines()[lines:]
        now = process_holdings(coordinator.pid)
        await asyncio.to_thread(own_etcd.restart)
        await hears(calls, calls, "after", within=15)
    assert burnt < 0.10
    assert len(said) <= 30 * max(1.0, span / 60), "\n".join(said)
    assert now.near(before)
    await own_court.judge(submitted=["before", "after"])


@pytest.mark.parametrize(
    ("each", "rounds"),
    [(25, 1), pytest.param(500, 3, marks=[pytest.mark.full, pytest.mark.timeout(400)])],
)
async def test_clients_that_were_killed_leave_no_watcher_and_no_file(
    each: int, rounds: int, own_etcd: EtcdProcess, namespace: str, tmp_path: Path
) -> None:
    """Fault case 107: processes with many polls and streams are killed; nothing of them stays."""

    async with (
        Coordinator(own_etcd.endpoints, tmp_path) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
    ):
        session = await calls.open(ttl=600)
        await calls.claim(session)
        before, watching = process_holdings(coordinator.pid), watchers(own_etcd)
        for number in range(rounds):
            async with PollProcess(
                coordinator.endpoint, namespace, tmp_path, name=f"p{number}", ttl=60, wait=30, many=each
            ) as client:
                await client.said("all under way")
                assert watchers(own_etcd) > watching, "no stream ever watched: prove nothing"
                await client.kill()

            def back() -> bool:
                now = process_holdings(coordinator.pid)
                return watchers(own_etcd) <= watching and now.near(before, files=3)

            await eventually(back, timeout=10, interval=0.1, what=f"back to {before}")
        await hears(calls, calls, "after", within=10)
