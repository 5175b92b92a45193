"""Retention buckets, pressure, compaction, gauge, membership and leadership on a real etcd."""

from __future__ import annotations

from coordinator.core.job import JobState
from coordinator.embedded.etcd_process import EtcdOptions
from coordinator.etcd.compaction import CompactionConfig, Compactor
from coordinator.etcd.retention import RetentionConfig
from coordinator.etcd.retention_pressure import PressureConfig, RetentionPressure
from coordinator.etcd.storage_gauge import EtcdStorageGauge, GaugeConfig, StorageLevels
from tests.integration.store.conftest import Harness, HarnessFactory
from tests.support.polling import eventually
from tests.support.services import EtcdFactory


async def finish(harness: Harness, job_id: str) -> int:
    """Run a job to its end; the lease that its record lies on."""
    stored, token = await harness.claimed(job_id)
    done = await harness.complete(stored, token)
    assert done.won
    assert done.stored is not None
    assert done.stored.job.state is JobState.SUCCEEDED
    key = harness.store.space.namespace(harness.namespace).state(job_id)
    reply = await harness.store.client.range(key, timeout=5)
    return reply.kvs[0].lease


async def test_finished_jobs_share_a_lease_with_a_key_that_names_it(harness: Harness) -> None:
    leases = {await finish(harness, f"j{number}") for number in range(5)}
    assert len(leases) == 1
    buckets = await harness.store.pressure.list_buckets(deadline=harness.deadline())
    assert [(bucket.namespace, bucket.lease, bucket.keys) for bucket in buckets] == [
        (harness.namespace, leases.pop(), 5)
    ]


async def test_a_full_bucket_makes_room_for_the_next(make_harness: HarnessFactory) -> None:
    async with make_harness(retention=RetentionConfig(max_keys=4)) as harness:
        leases = [await finish(harness, f"j{number}") for number in range(10)]
    assert len(set(leases)) >= 3
    assert all(leases.count(lease) <= 4 for lease in leases)


async def test_a_dead_bucket_costs_no_settlement(harness: Harness) -> None:
    first = await finish(harness, "j1")
    stored = [await harness.claimed(f"k{number}") for number in range(8)]
    await harness.store.client.lease_revoke(first, timeout=5)
    under_way = [harness.complete(each, token) for each, token in stored]
    commits = [await pending for pending in under_way]
    assert all(commit.won for commit in commits)
    second = await finish(harness, "j2")
    assert second != first


async def test_a_retention_lease_takes_its_jobs_along(harness: Harness) -> None:
    lease = await finish(harness, "j1")
    await harness.store.client.lease_revoke(lease, timeout=5)
    found = await harness.store.jobs.read(harness.namespace, "j1", deadline=harness.deadline())
    assert found.stored is None


async def test_too_many_finished_jobs_lose_their_oldest_bucket(make_harness: HarnessFactory) -> None:
    async with make_harness(retention=RetentionConfig(max_keys=4)) as harness:
        for number in range(10):
            await finish(harness, f"j{number}")
        config = PressureConfig(max_finished=7, min_age=-1)
        pressure = RetentionPressure(
            harness.store.client,
            harness.store.space,
            harness.store.gauge,
            harness.store.set_aside,
            harness.clock,
            config,
        )
        young = RetentionPressure(
            harness.store.client,
            harness.store.space,
            harness.store.gauge,
            harness.store.set_aside,
            harness.clock,
            PressureConfig(max_finished=1, full_keys=4, full_age=-1),
        )
        assert (await young.enforce_retention_once(dry_run=True)).dropped_keys == 8, (
            "full ones, however young"
        )
        planned = await pressure.enforce_retention_once(dry_run=True)
        assert planned.dropped_keys == 4
        done = await pressure.enforce_retention_once()
        assert done == planned
        found = [
            await harness.store.jobs.read(harness.namespace, f"j{number}", deadline=harness.deadline())
            for number in range(10)
        ]
        assert [each.stored is not None for each in found] == [False] * 4 + [True] * 6
        assert (await pressure.enforce_retention_once()).dropped_buckets == 0


async def test_the_gauge_stops_submissions_and_lets_them_go_on_lower_down(
    etcd_factory: EtcdFactory, make_harness: HarnessFactory
) -> None:
    server = etcd_factory(EtcdOptions())
    async with make_harness(server.endpoint) as harness:
        levels = await harness.store.gauge.poll_once()
        assert levels.in_use > 0
        assert harness.store.gauge.accepts_submissions

        def gauge(quota: float) -> EtcdStorageGauge:
            config = GaugeConfig(quota=round(quota), allocated_stop=9, allocated_go=9)
            return EtcdStorageGauge(harness.store.client, config, harness.clock)

        full = gauge(levels.in_use / 0.81)
        await full.poll_once()
        assert not full.accepts_submissions
        full._config = GaugeConfig(quota=round(levels.in_use / 0.78), allocated_stop=9, allocated_go=9)
        await full.poll_once()
        assert not full.accepts_submissions
        full._config = GaugeConfig(quota=round(levels.in_use / 0.5), allocated_stop=9, allocated_go=9)
        await full.poll_once()
        assert full.accepts_submissions
        fresh = gauge(levels.in_use / 0.78)
        await fresh.poll_once()
        assert fresh.accepts_submissions


async def test_one_of_two_compacts_and_the_kept_history_stays(
    etcd_factory: EtcdFactory, make_harness: HarnessFactory
) -> None:
    server = etcd_factory(EtcdOptions())
    async with make_harness(server.endpoint) as harness:
        store = harness.store
        # The record is that of the store's own compactor; these two look at it from the start.
        config = CompactionConfig(keep=0.0)
        await eventually(lambda: _compact_record_exists(harness))
        first, second = (
            Compactor(store.client, store.space, store.gauge, harness.clock, config) for _ in range(2)
        )
        marks = [(await harness.submitted(f"j{number}")).revision for number in range(3)]
        assert await first.compact_once() == 0
        seen = await first.compact_once(force=True)
        assert 0 < seen < marks[0]
        last = await second.compact_once(force=True)
        assert last > seen
        assert first.compactions == second.compactions == 1
        await store.client.range(b"x", revision=last, timeout=5)


async def _compact_record_exists(harness: Harness) -> bool:
    reply = await harness.store.client.range(harness.store.space.compact, timeout=5)
    return bool(reply.kvs)


async def test_a_compactor_keeps_half_a_minute(harness: Harness) -> None:
    await eventually(lambda: _compact_record_exists(harness))
    compactor = Compactor(
        harness.store.client, harness.store.space, harness.store.gauge, harness.clock, CompactionConfig()
    )
    assert await compactor.compact_once(force=True) == 0
    assert await compactor.compact_once(force=True) == 0


async def test_a_nearly_full_store_keeps_less_history(
    etcd_factory: EtcdFactory, make_harness: HarnessFactory
) -> None:
    """Else what half a minute of finishing jobs writes takes the room that was left for finishing them."""
    server = etcd_factory(EtcdOptions())
    async with make_harness(server.endpoint) as harness:
        store = harness.store
        await eventually(lambda: _compact_record_exists(harness))
        gauge = EtcdStorageGauge(store.client, GaugeConfig(), harness.clock)
        config = CompactionConfig(keep_critical=0.0)
        compactor = Compactor(store.client, store.space, gauge, harness.clock, config)
        gauge.levels = StorageLevels(in_use=79, quota=100)
        assert await compactor.compact_once() == 0
        gauge.levels = StorageLevels(in_use=80, quota=100)
        assert await compactor.compact_once() > 0


async def test_coordinators_know_each_other(make_harness: HarnessFactory) -> None:
    async with make_harness(coordinator_id="a") as one:
        async with make_harness(coordinator_id="b") as other:
            await eventually(lambda: tuple(one.store.membership.members()) == ("a", "b"))
            await eventually(lambda: tuple(other.store.membership.members()) == ("a", "b"))
        await eventually(lambda: tuple(one.store.membership.members()) == ("a",))


async def test_who_only_repairs_is_a_member_that_hands_out_nothing(make_harness: HarnessFactory) -> None:
    async with (
        make_harness(coordinator_id="a") as one,
        make_harness(coordinator_id="b", dispatches=False) as other,
    ):
        for each in (one, other):
            membership = each.store.membership
            await eventually(lambda m=membership: tuple(m.members()) == ("a", "b"))  # type: ignore[misc]
            assert ("a",) == tuple(membership.dispatchers())
        async with make_harness(coordinator_id="c") as late:
            await eventually(lambda: tuple(late.store.membership.members()) == ("a", "b", "c"))
            assert ("a", "c") == tuple(late.store.membership.dispatchers())


async def test_a_member_whose_record_cannot_be_read_counts_as_one_that_hands_out(
    make_harness: HarnessFactory,
) -> None:
    async with make_harness(coordinator_id="a") as one:
        store = one.store
        await store.client.put(store.space.coordinator("b"), b"\xff", timeout=5)
        await eventually(lambda: tuple(store.membership.members()) == ("a", "b"))
        assert ("a", "b") == tuple(store.membership.dispatchers())


async def test_a_lost_membership_is_taken_again(make_harness: HarnessFactory) -> None:
    async with make_harness(coordinator_id="a") as one, make_harness(coordinator_id="b") as other:
        await eventually(lambda: "a" in other.store.membership.members())
        lease = one.store.membership.lease
        await one.store.client.lease_revoke(lease, timeout=5)
        await eventually(lambda: one.store.membership.lease not in (0, lease), timeout=15)
        await eventually(lambda: "a" in other.store.membership.members())


async def test_a_role_has_one_leader_and_passes_on(make_harness: HarnessFactory) -> None:
    async with make_harness(coordinator_id="a") as one, make_harness(coordinator_id="b") as other:
        await one.store.membership.joined()
        await other.store.membership.joined()
        first, second = one.store.leadership("sweep"), other.store.leadership("sweep")
        assert await first.stand_once()
        assert not await second.stand_once()
        assert await first.stand_once()
        assert first.guard() is not None
        assert second.guard() is None
        await first.resign()
        assert await second.stand_once()
        assert not await first.stand_once()
        await other.store.client.lease_revoke(other.store.membership.lease, timeout=5)
        assert await first.stand_once()
        assert not await second.stand_once()


async def test_whoever_takes_a_role_hears_of_it_once(make_harness: HarnessFactory) -> None:
    async with make_harness(coordinator_id="a") as one, make_harness(coordinator_id="b") as other:
        await one.store.membership.joined()
        await other.store.membership.joined()
        first, second = one.store.leadership("sweep"), other.store.leadership("sweep")
        won: list[str] = []
        first.won, second.won = lambda: won.append("first"), lambda: won.append("second")
        for each in (first, second, first, second):
            await each.stand_once()
        assert won == ["first"]
        await first.resign()
        await second.stand_once()
        await first.stand_once()
        assert won == ["first", "second"]
