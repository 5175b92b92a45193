"""Claims that nobody will ever end: a hung handler that is kept alive, a key on a foreign lease."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.core.job import JobState
from coordinator.embedded.etcd_process import EtcdProcess
from tests.fault.support.calls import Calls, refusal, seconds
from tests.fault.support.court import Court
from tests.fault.support.lapse import lapse
from tests.fault.support.processes import SWEEP_OFTEN, Coordinator, WorkerProcess
from tests.support.polling import eventually

TTL = 3.0


@pytest.mark.slow
async def test_a_handler_that_hangs_loses_its_claim_though_its_session_beats(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 029: the renewer outlives the work; the run timeout ends the claim."""
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, plan=SWEEP_OFTEN) as coordinator,
        Calls(coordinator.endpoint, namespace) as calls,
    ):
        await calls.submit("hung", run_timeout=seconds(2))
        await calls.submit("sound", run_timeout=seconds(300))
        session = await calls.open(ttl=TTL)
        hung, sound = await calls.claim_one(session, "hung"), await calls.claim_one(session, "sound")
        async with calls.beating(session, [hung, sound]):

            async def lost() -> bool:
                return await calls.verdict(session, hung) == "LOST"

            await eventually(lost, timeout=30, interval=0.3, what="the claim is taken away")
            late = await refusal(calls.complete(hung))
            again = await calls.claim_one(session, "hung", wait=30)
            assert again.fencing_token > hung.fencing_token
            assert await calls.complete(again) == "SUCCEEDED"
            assert await calls.verdict(session, sound) == "HELD"
            assert await calls.complete(sound) == "SUCCEEDED"
    judgement = await own_court.judge(submitted=["hung", "sound"])
    assert late.reason == "CLAIM_LOST"
    assert judgement.outcomes == {"TIMED_OUT": 1, "SUCCEEDED": 2}


@pytest.mark.parametrize("kind", ["effect", "effect-sync"])
async def test_a_worker_whose_handler_hangs_gets_its_slot_back(
    kind: str, own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 029: with the SDK, awaiting for ever or in a thread that asks nothing; one slot."""
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, plan=SWEEP_OFTEN) as coordinator,
        WorkerProcess(
            coordinator.endpoint, namespace, tmp_path, name="w1", sink=own_court.sink.path, gates=tmp_path,
            queues={"work": 1}, ttl=TTL,
        ),
        Calls(coordinator.endpoint, namespace) as calls,
    ):  # fmt: skip
        hangs = {"gate": "never{attempt}", "deaf": kind == "effect-sync"}
        (tmp_path / "never2").touch()
        await calls.submit("hung", hangs, type=kind, run_timeout=seconds(2))
        await eventually(lambda: len(own_court.read().starts) == 1, timeout=15, what="it hangs")
        await calls.submit("next")
        # A thread cannot be ended from outside: its slot comes back when it returns.
        if kind == "effect-sync":
            await lapse(6)
            (tmp_path / "never1").touch()
        await own_court.ended(["hung", "next"], timeout=40)
    judgement = await own_court.judge(submitted=["hung", "next"])
    assert judgement.jobs["hung"].attempt == 2
    assert judgement.states == {"SUCCEEDED": 2}


@pytest.mark.slow
async def test_a_claim_on_a_lease_that_is_not_its_sessions_is_told_and_freed(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 025: a claim put by hand on a lease that lives for an hour; a live holder is left alone."""
    async with (
        Coordinator(own_etcd.endpoints, tmp_path, plan=SWEEP_OFTEN) as coordinator,
        Calls(coordinator.endpoint, namespace, timeout=20) as calls,
        own_court.etcd() as etcd,
    ):
        await calls.submit("stuck")
        await calls.submit("sound")
        dead, alive = await calls.open(ttl=TTL), await calls.open(ttl=600)
        await calls.claim_one(dead, "stuck")
        sound = await calls.claim_one(alive, "sound")
        key = own_court.keys.claim("stuck")
        held = (await etcd.range(key, timeout=5)).kvs[0]
        lease = (await etcd.lease_grant(3600, timeout=5)).id
        await etcd.put(key, held.value, lease=lease, timeout=5)

        again = await calls.claim_one(await calls.open(ttl=600), "stuck", wait=30)

        assert await calls.complete(again) == "SUCCEEDED"
        assert await calls.verdict(alive, sound) == "HELD"
        assert await calls.complete(sound) == "SUCCEEDED"
        jobs = await own_court.jobs(etcd)
        log = coordinator.log
    assert f"{lease:x}" in log, "the foreign lease is not named"
    # The judge knows of no claim that was put by hand; the records tell.
    assert (jobs["stuck"].state, jobs["stuck"].attempt) == (JobState.SUCCEEDED, 2)
    assert (jobs["sound"].state, jobs["sound"].attempt) == (JobState.SUCCEEDED, 1)
