"""Epochs, high water, and a store that goes back (promise P3)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from coordinator.core.fencing import Position, make_token
from coordinator.errors import Reason, RequestError
from coordinator.etcd.epoch_bump import bump_epoch
from coordinator.etcd.high_water import HighWaterFile
from tests.integration.store.conftest import Harness, HarnessFactory
from tests.support.polling import eventually
from tests.support.services import EtcdFactory
from tests.support.tcp_proxy import TcpProxy


async def test_a_new_store_begins_with_epoch_one(harness: Harness) -> None:
    assert harness.store.present.epoch == 1
    assert not harness.store.present.regressed
    before = harness.store.present.token()
    stored = await harness.submitted("j1")
    assert harness.store.present.token() >= make_token(1, stored.revision) > before
    assert await harness.store.present.refresh(deadline=harness.deadline()) >= make_token(1, stored.revision)


async def test_a_raised_epoch_ends_every_session_and_every_token(harness: Harness) -> None:
    await harness.store.namespaces.ensure(harness.namespace, deadline=harness.deadline())
    stored, token = await harness.claimed("j1")
    done = await bump_epoch(
        harness.store.client, harness.store.space, clock=harness.clock, deadline=harness.deadline()
    )
    assert (done.before, done.after, done.revoked) == (1, 2, 1)
    late = await harness.complete(stored, token)
    assert not late.won
    assert late.claim is None
    await eventually(lambda: harness.store.present.epoch == 2)
    fresh = await harness.submitted("j2")
    session = await harness.open_session()
    assert session.epoch == 2
    commit = await harness.claim(fresh)
    assert commit.won
    assert commit.token == make_token(2, commit.revision)
    again = await bump_epoch(
        harness.store.client, harness.store.space, clock=harness.clock, deadline=harness.deadline()
    )
    assert (again.after, again.revoked) == (3, 1)


async def test_operations_under_way_follow_a_raised_epoch(harness: Harness) -> None:
    await bump_epoch(
        harness.store.client, harness.store.space, clock=harness.clock, deadline=harness.deadline()
    )
    commits = [await pending for pending in [harness.submit(f"j{number}") for number in range(5)]]
    assert all(commit.won for commit in commits)
    assert harness.store.present.epoch == 2


async def test_a_restored_store_grants_and_settles_nothing_until_the_epoch_is_raised(
    etcd_factory: EtcdFactory, make_harness: HarnessFactory, tmp_path: Path
) -> None:
    """The data folder is put back to an earlier state, which keeps the cluster id."""
    server = etcd_factory()
    async with make_harness(server.endpoint) as harness:
        await harness.store.namespaces.ensure(harness.namespace, deadline=harness.deadline())
        early = await harness.submitted("early")
        await harness.open_session(ttl_ms=60_000)
        server.stop()
        backup = tmp_path / "backup"
        shutil.copytree(server.data_dir, backup)
        server.restart()
        tokens = []
        for number in range(30):
            _, token = await harness.claimed(f"j{number}")
            tokens.append(token)
        server.stop()
        shutil.rmtree(server.data_dir)
        shutil.copytree(backup, server.data_dir)
        server.restart()
        await eventually(lambda: harness.store.present.regressed, timeout=15)
        with pytest.raises(RequestError) as refused:
            await harness.claim(early)
        assert refused.value.reason is Reason.EPOCH_REGRESSED
        await eventually(lambda: bump(harness), timeout=10, what="the epoch raised")
        await eventually(lambda: not harness.store.present.regressed, timeout=10)
        harness.session = None
        _, token = await harness.claimed("after")
        assert token > max(tokens)


async def test_another_cluster_at_the_address_stops_work_only_while_it_answers(
    etcd_factory: EtcdFactory, make_harness: HarnessFactory
) -> None:
    """A wrong route for a moment is no restore: our own history has not gone back."""
    ours, other = etcd_factory(), etcd_factory()
    async with TcpProxy(ours.endpoint) as proxy, make_harness(proxy.endpoint) as harness:
        stored, token = await harness.claimed("j1")
        waiting = await harness.submitted("j2")
        proxy.lead_to(other.endpoint)
        await eventually(lambda: harness.store.present.regressed, timeout=15)
        with pytest.raises(RequestError) as refused:
            await harness.claim(waiting)
        assert refused.value.reason is Reason.EPOCH_REGRESSED
        proxy.lead_to(ours.endpoint)
        await eventually(lambda: not harness.store.present.regressed, timeout=15)
        assert (await harness.complete(stored, token)).won
        assert (await harness.claim(waiting)).won


async def bump(harness: Harness) -> bool:
    done = await bump_epoch(
        harness.store.client, harness.store.space, clock=harness.clock, deadline=harness.deadline()
    )
    return done.after > done.before


async def test_a_restart_remembers_how_far_history_had_come(
    make_harness: HarnessFactory, tmp_path: Path
) -> None:
    file = HighWaterFile(tmp_path / "state")
    async with make_harness(state_dir=tmp_path / "state") as harness:
        stored = await harness.submitted("j1")
    seen = file.read()
    assert seen is not None
    assert seen >= Position(1, stored.revision)
    file.write(Position(1, seen.revision + 1_000_000))
    async with make_harness(state_dir=tmp_path / "state") as harness:
        assert harness.store.present.regressed
        await harness.open_session()
        with pytest.raises(RequestError) as refused:
            await harness.claim(stored)
        assert refused.value.reason is Reason.EPOCH_REGRESSED
        # What grants no token goes on.
        assert (await harness.submit("j2")).won
        await bump_epoch(
            harness.store.client, harness.store.space, clock=harness.clock, deadline=harness.deadline()
        )
        await eventually(lambda: not harness.store.present.regressed)
        assert harness.store.present.epoch == 2


async def test_an_emptied_store_gets_an_epoch_above_the_remembered_one(
    make_harness: HarnessFactory, tmp_path: Path
) -> None:
    HighWaterFile(tmp_path / "state").write(Position(7, 10**9))
    async with make_harness(state_dir=tmp_path / "state") as harness:
        assert harness.store.present.epoch == 8
        assert not harness.store.present.regressed
        assert harness.store.present.token() > make_token(7, 10**9)


def test_an_unreadable_high_water_file_is_set_aside(tmp_path: Path) -> None:
    file = HighWaterFile(tmp_path)
    assert file.read() is None
    (tmp_path / "high-water").write_text("{broken")
    assert file.read() is None
    file.write(Position(2, 3))
    assert file.read() == Position(2, 3)
