"""Everything at once: processes die, freeze and come back while jobs run; at the end the judge decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from tests.fault.support.court import Court
from tests.fault.support.storm import Storm
from tests.support.services import EtcdClusterFactory

FAILED_BEFORE: tuple[int, ...] = ()
"""Seeds of `make soak` that once failed, so that they are run for good."""
SEEDS = [0, *FAILED_BEFORE, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))]


async def weather(storm: Storm, seconds: float) -> None:
    """The storm, and its judgement."""
    await storm.rage(seconds)
    judgement = await storm.court.judge(submitted=storm.ids)
    assert set(judgement.states) <= {"SUCCEEDED", "CANCELLED"}, judgement.states
    assert {job.failures for job in judgement.jobs.values()} == {0}
    assert judgement.claims > 100
    assert judgement.outcomes["LOST"] > 0, "a storm that hurt nobody proves nothing"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
async def test_no_storm_breaks_a_promise(
    seed: int, own_etcd: EtcdProcess, own_court: Court, tmp_path: Path
) -> None:
    """O1 to O3 over 40 s of faults: P1 to P5 and P7, and every job ends."""
    await weather(Storm([own_etcd], own_court, tmp_path, seed), 40.0)


@pytest.mark.slow
@pytest.mark.etcd36
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
async def test_no_storm_over_a_cluster_breaks_a_promise(
    seed: int, etcd_cluster_factory: EtcdClusterFactory, namespace: str, tmp_path: Path
) -> None:
    """The same with three members, of which one at a time is killed or frozen."""
    cluster = etcd_cluster_factory()
    court = Court(cluster.endpoints, namespace, tmp_path / "sink.sqlite")
    await weather(Storm(cluster.members, court, tmp_path, seed), 40.0)


async def test_a_seed_tells_the_same_story_again(own_court: Court, tmp_path: Path) -> None:
    """So that a failure can be replayed: who is hit how and how long depends on the seed alone."""

    async def story(seed: int) -> list[str]:
        storm = Storm([], own_court, tmp_path, seed)
        storm._faults = lambda: dict.fromkeys(FAULTS, _nothing)  # type: ignore[method-assign]
        for _ in range(50):
            await storm._next_fault()
        return storm.story

    FAULTS = Storm([], own_court, tmp_path, 0)._faults()  # noqa: N806

    assert await story(7) == await story(7)
    assert await story(7) != await story(8)


async def _nothing(*told: object) -> None:
    """Hurt nobody."""
