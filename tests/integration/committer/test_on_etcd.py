"""The committer's rules hold on a real etcd."""

from __future__ import annotations

import asyncio
import time

import pytest

from coordinator.embedded.etcd_process import EtcdOptions, EtcdProcess
from coordinator.errors import (
    EtcdUnavailable,
    LeaseNotFound,
    NotApplied,
    OutcomeUnknown,
    RequestTooLarge,
    StorageError,
)
from coordinator.etcd import wire
from coordinator.etcd.committer import CommitterConfig, GroupLimits, GuardedOp, OpResult
from tests.integration.committer.conftest import TIMEOUT, SiteFactory, open_site
from tests.support.polling import eventually
from tests.support.services import EtcdFactory
from tests.support.tcp_proxy import ProxyMode, TcpProxy


def results(outcomes: list[OpResult | StorageError]) -> list[OpResult]:
    for outcome in outcomes:
        if isinstance(outcome, StorageError):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, OpResult)]


async def test_a_group_of_100_wins_and_loses_one_by_one_in_one_revision(site_factory: SiteFactory) -> None:
    config = CommitterConfig(limits=GroupLimits(max_ops=100))
    async with site_factory(config=config) as site:
        for n in range(0, 100, 3):
            await site.direct.put(site.key(f"k{n:03}"), b"taken", timeout=TIMEOUT)
        outcomes = results(await site.committer.commit_all([site.create(f"k{n:03}") for n in range(100)]))
        assert site.committer.stats.txns == 1
        assert site.committer.stats.group_sizes[100] == 1
        assert [outcome.won for outcome in outcomes] == [n % 3 != 0 for n in range(100)]
        assert len({outcome.revision for outcome in outcomes}) == 1
        assert site.own_revisions == [outcomes[0].revision]
        assert outcomes[0].responses[0].response_range.kvs[0].value == b"taken"
        reply = await site.direct.range(site.key("k001"), timeout=TIMEOUT)
        assert reply.kvs[0].create_revision == outcomes[0].revision


async def test_of_many_creations_of_one_key_exactly_one_wins(site_factory: SiteFactory) -> None:
    async with site_factory() as site:
        ops = [site.create("one", value=b"%d" % n) for n in range(30)]
        other = [site.create(f"other{n}") for n in range(30)]
        outcomes = results(await site.committer.commit_all([*ops, *other]))
        assert [outcome.won for outcome in outcomes] == [True] + [False] * 29 + [True] * 30
        assert (await site.stored())[b"one"] == b"0"  # first come, first served


async def test_a_dead_lease_costs_only_its_own_operation(site_factory: SiteFactory) -> None:
    async with site_factory() as site:
        ops = [site.create(f"k{n:02}", lease=0x5EADBEEF if n == 41 else 0) for n in range(60)]
        outcomes = await site.committer.commit_all(ops)
        assert isinstance(outcomes[41], LeaseNotFound)
        assert all(isinstance(one, OpResult) and one.won for n, one in enumerate(outcomes) if n != 41)
        assert set(await site.stored()) == {b"k%02d" % n for n in range(60) if n != 41}


async def test_a_witness_compare_keeps_a_dead_session_from_refusing_the_group(
    site_factory: SiteFactory,
) -> None:
    async with site_factory() as site:
        lease = (await site.direct.lease_grant(60, timeout=TIMEOUT)).id
        await site.direct.put(site.key("session"), b"", lease=lease, timeout=TIMEOUT)
        await site.direct.lease_revoke(lease, timeout=TIMEOUT)
        ops = [site.create(f"k{n}", lease=lease if n == 1 else 0) for n in range(3)]
        ops[1].compares += (wire.lease_eq(site.key("session"), lease),)
        outcomes = results(await site.committer.commit_all(ops))
        assert [outcome.won for outcome in outcomes] == [True, False, True]
        assert site.committer.stats.txns == 1


async def test_a_dead_retention_bucket_means_the_same_writes_under_a_living_one(
    site_factory: SiteFactory,
) -> None:
    async with site_factory() as site:
        dead = (await site.direct.lease_grant(60, timeout=TIMEOUT)).id
        await site.direct.lease_revoke(dead, timeout=TIMEOUT)
        living = (await site.direct.lease_grant(60, timeout=TIMEOUT)).id

        def settle(name: str, lease: int) -> GuardedOp:
            op = site.create(name, lease=lease)
            op.retention = lease
            op.rebuild = lambda: settle(name, living)
            return op

        outcomes = results(await site.committer.commit_all([settle(f"k{n:02}", dead) for n in range(60)]))
        assert all(outcome.won for outcome in outcomes)
        assert site.committer.stats.txns <= 14
        kept = await site.direct.lease_time_to_live(living, keys=True, timeout=TIMEOUT)
        assert len(kept.keys) == 60
        await site.direct.lease_revoke(living, timeout=TIMEOUT)


async def test_two_operations_that_write_one_key_are_split_not_lost(site_factory: SiteFactory) -> None:
    # Lanes that do not cover the key: the caller's bug must not cost a sibling anything.
    async with site_factory() as site:
        ops = [site.create(f"k{n}") for n in range(8)]
        twin = site.create("k3", value=b"twin")
        twin.lanes = (b"another lane",)
        outcomes = results(await site.committer.commit_all([*ops, twin]))
        assert [outcome.won for outcome in outcomes] == [True] * 8 + [False]


async def test_another_epoch_stops_every_write_until_it_is_known(site_factory: SiteFactory) -> None:
    async with site_factory() as site:
        await site.direct.put(site.key("epoch"), b"2", timeout=TIMEOUT)
        outcome = await site.committer.commit(site.create("a"))
        assert outcome.won
        assert site.epoch == b"2"
        assert site.committer.stats.epoch_mismatches == 1


async def test_a_range_compare_lets_deletions_pass_and_additions_fail(site_factory: SiteFactory) -> None:
    async with site_factory() as site:
        start, end = site.key("lock/"), site.key("lock0")
        await site.direct.put(site.key("lock/a"), b"", timeout=TIMEOUT)
        seen = (await site.direct.put(site.key("lock/b"), b"", timeout=TIMEOUT)).header.revision

        def add(name: str) -> GuardedOp:
            op = site.create(f"lock/{name}")
            op.adds = (b"lock",)
            op.compares += (wire.range_mod_less(start, end, seen + 1),)
            return op

        await site.direct.delete_range(site.key("lock/a"), timeout=TIMEOUT)
        outcomes = results(await site.committer.commit_all([add("c"), add("d")]))
        assert [outcome.won for outcome in outcomes] == [True, False]
        assert site.committer.stats.txns == 2  # never two additions to one lock under way together


async def test_an_unknown_outcome_is_recognised_by_its_own_nonce(
    etcd_server: EtcdProcess, etcd_prefix: bytes
) -> None:
    config = CommitterConfig(txn_timeout=0.25)
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        open_site(etcd_server, etcd_prefix, config=config, endpoint=proxy.endpoint) as site,
    ):
        await site.committer.commit(site.create("warm"))
        proxy.set_mode(ProxyMode.HALF_DROP)
        claims = [site.create(f"claim{n}", value=b"nonce-%d" % n, lasts=10.0) for n in range(5)]
        waiting = asyncio.ensure_future(site.committer.commit_all(claims))
        await eventually(lambda: site.committer.stats.unknown, what="the reply to be missed")
        proxy.set_mode(ProxyMode.PASS)
        outcomes = results(await waiting)
        stored = await site.direct.range(site.key("claim0"), timeout=TIMEOUT)
        for n, outcome in enumerate(outcomes):
            assert (outcome.won, outcome.resent) == (False, True)
            holder = outcome.responses[0].response_range.kvs[0]
            assert holder.value == b"nonce-%d" % n  # ours: the first try won
            assert holder.version == 1  # and was not applied twice
        assert stored.kvs[0].create_revision not in site.own_revisions


async def test_past_the_deadline_what_was_sent_is_unknown_and_the_rest_is_certain(
    etcd_factory: EtcdFactory, etcd_prefix: bytes
) -> None:
    server = etcd_factory()
    async with open_site(server, etcd_prefix, config=CommitterConfig(txn_timeout=0.3)) as site:
        await site.committer.commit(site.create("warm"))
        server.pause()
        try:
            sent = site.committer.enqueue(site.create("a", lasts=0.6))
            await eventually(lambda: site.committer.stats.txns == 2)
            waiting = site.create("a", lasts=0.6)
            behind = site.committer.enqueue(waiting)
            await asyncio.wait([sent, behind])
        finally:
            server.resume()
        assert type(sent.exception()) is OutcomeUnknown
        assert isinstance(behind.exception(), NotApplied)
        await eventually(lambda: site.committer.outstanding == 0)
        outcome = await site.committer.commit(site.create("b"))
        assert outcome.won


async def test_an_etcd_that_is_away_is_reported_and_work_goes_on_when_it_is_back(
    etcd_factory: EtcdFactory, etcd_prefix: bytes
) -> None:
    server = etcd_factory()
    async with open_site(server, etcd_prefix) as site:
        await site.committer.commit(site.create("warm"))
        server.stop()
        refused = (await site.committer.commit_all([site.create("a", lasts=0.5)]))[0]
        # The first call on a connection that has just died may be unknown; a certain refusal is the usual
        # case.
        assert isinstance(refused, (EtcdUnavailable, NotApplied, OutcomeUnknown))
        waiting = asyncio.ensure_future(site.committer.commit(site.create("b", lasts=20.0)))
        await asyncio.to_thread(server.restart)
        assert (await waiting).won


async def test_an_etcd_that_takes_fewer_operations_than_configured_is_learnt(
    etcd_factory: EtcdFactory, etcd_prefix: bytes
) -> None:
    server = etcd_factory(EtcdOptions(max_txn_ops=32))
    async with open_site(server, etcd_prefix) as site:
        outcomes = results(await site.committer.commit_all([site.create(f"k{n:03}") for n in range(600)]))
        assert all(outcome.won for outcome in outcomes)
        assert len(await site.stored()) == 600
        assert site.committer.stats.refused <= 14


@pytest.mark.parametrize("width", [60, 100, 127])
async def test_wide_operations_travel_in_groups_that_etcd_takes(
    site_factory: SiteFactory, width: int
) -> None:
    async with site_factory() as site:
        ops = []
        for n in range(40):
            op = site.create(f"k{n:02}")
            if n % 10 == 5:
                op.thens += tuple(wire.put(site.key(f"k{n:02}/{m:03}"), b"v") for m in range(width - 1))
            ops.append(op)
        outcomes = results(await site.committer.commit_all(ops))
        assert all(outcome.won for outcome in outcomes)
        assert site.committer.stats.refused == 0
        assert len(await site.stored()) == 36 + 4 * width


async def test_large_operations_travel_alone_and_too_large_ones_not_at_all(site_factory: SiteFactory) -> None:
    async with site_factory() as site:
        sizes = [100, 300_000, 300_000, 1_400_000, 1_569_000, 100]
        ops = [site.create(f"k{n}", value=b"x" * size) for n, size in enumerate(sizes)]
        outcomes = await site.committer.commit_all(ops)
        assert isinstance(outcomes[4], RequestTooLarge)
        assert [isinstance(one, OpResult) and one.won for one in outcomes] == [True] * 4 + [False, True]
        assert site.committer.stats.refused == 0  # refused here, not by etcd


async def test_the_floor_runs_the_same_writes_and_leaves_nothing(
    etcd_server: EtcdProcess, etcd_prefix: bytes
) -> None:
    from coordinator.cli.bench_floor import etcd_floor
    from coordinator.etcd.client import EtcdClient, EtcdConfig

    async with EtcdClient(EtcdConfig(endpoints=etcd_server.endpoints)) as client:
        start = time.perf_counter()
        rate = await etcd_floor(client, 130, prefix=etcd_prefix)
        assert rate > 130 / (time.perf_counter() - start)
        end = etcd_prefix[:-1] + bytes((etcd_prefix[-1] + 1,))
        assert (await client.range(etcd_prefix, end, timeout=TIMEOUT)).count == 0
