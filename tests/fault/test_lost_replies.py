"""Replies that never arrive: of a claim, of a Txn, of a submission. Asked again, the answer is the same."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from tests.fault.support.calls import Calls, available, refusal
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy
from worker_sdk import JobClient, JobSpec


@pytest.fixture
async def to_coordinator(shared: Coordinator) -> AsyncIterator[TcpProxy]:
    """A path to the shared coordinator that can be hurt."""
    async with TcpProxy(shared.endpoint) as proxy:
        yield proxy


@pytest.fixture
async def cut_calls(to_coordinator: TcpProxy, namespace: str) -> AsyncIterator[Calls]:
    """Raw calls over that path."""
    async with Calls(to_coordinator.endpoint, namespace) as made:
        yield made


async def test_a_claim_whose_reply_was_lost_is_given_again_for_the_same_request_id(
    calls: Calls, cut_calls: Calls, to_coordinator: TcpProxy, court: Court
) -> None:
    """Fault case 001, first variant."""
    await calls.submit("j1")
    session = await cut_calls.open(ttl=10)
    to_coordinator.set_mode(ProxyMode.HALF_DROP)

    lost = await refusal(cut_calls.claim(session, request_id="r1", timeout=1.0))
    held = await court.claim_revision("j1")
    to_coordinator.set_mode(ProxyMode.PASS)
    # The path resets its connections as it comes back.
    [again] = await available(lambda: cut_calls.claim(session, request_id="r1", repeat=True))
    [and_again] = await cut_calls.claim(session, request_id="r1", repeat=True)

    assert lost.code == "DEADLINE_EXCEEDED"
    assert held > 0
    assert again.job_id == "j1"
    assert again.attempt == 1
    assert again.fencing_token == and_again.fencing_token
    assert await court.claim_revision("j1") == held
    assert await cut_calls.complete(again) == "SUCCEEDED"
    judgement = await court.judge(submitted=["j1"])
    assert judgement.claims == 1


async def test_a_claim_that_nobody_fetched_goes_back_uncharged_within_two_ttls(
    calls: Calls, cut_calls: Calls, to_coordinator: TcpProxy, court: Court
) -> None:
    """Fault case 001, second variant: the worker lives and beats, but never asks again.

    The bank asks for one T. Design P8 wins: a job taken away from a live session waits one TTL more, so that
    a holder that did receive it hears of the loss first; so it is back within about 2 x TTL.
    """
    ttl = 2.0
    await calls.submit("j1")
    first, second = await cut_calls.open(ttl=ttl), await calls.open(ttl=ttl)
    to_coordinator.set_mode(ProxyMode.HALF_DROP)
    await refusal(cut_calls.claim(first, request_id="r1", timeout=0.5))
    claimed_at = time.monotonic()

    async with calls.beating(first), calls.beating(second):
        [got] = await calls.claim(second, wait=10)
        waited = time.monotonic() - claimed_at
        job = await calls.get("j1")
        async with calls.beating(second, [got], every=0.3):
            assert await calls.complete(got) == "SUCCEEDED"

    assert ttl < waited < 2 * ttl + 2.0
    assert (job.uncharged, job.failures, job.lease_losses) == (1, 0, 0)
    judgement = await court.judge(submitted=["j1"])
    assert judgement.outcomes == {"UNDELIVERED": 1, "SUCCEEDED": 1}


@pytest.fixture
async def cut_from_etcd(own_etcd: EtcdProcess, tmp_path: Path) -> AsyncIterator[tuple[Coordinator, TcpProxy]]:
    """A coordinator whose every byte to and from etcd goes through a proxy."""
    async with (
        TcpProxy(own_etcd.endpoint) as proxy,
        Coordinator([proxy.endpoint], tmp_path, settings={"ETCD__REQUEST_TIMEOUT_S": "2"}) as coordinator,
    ):
        yield coordinator, proxy


async def test_a_claim_whose_txn_was_not_answered_is_recognised_and_handed_out_once(
    cut_from_etcd: tuple[Coordinator, TcpProxy], own_court: Court, namespace: str
) -> None:
    """Fault case 006: never two tokens for one claim, never a lock-out of oneself."""
    coordinator, proxy = cut_from_etcd
    async with Calls(coordinator.endpoint, namespace) as calls:
        await calls.submit("j1")
        session = await calls.open(ttl=20)
        proxy.set_mode(ProxyMode.HALF_DROP)
        claiming = asyncio.create_task(calls.claim(session, request_id="r1", timeout=15))
        held = await eventually(lambda: own_court.claim_revision("j1"), what="the Txn committed", timeout=5)
        proxy.set_mode(ProxyMode.PASS)

        [claim] = await claiming

        assert claim.fencing_token % 2**44 == held
        assert await own_court.claim_revision("j1") == held
        assert await calls.verdict(session, claim) == "HELD"
        assert await calls.complete(claim) == "SUCCEEDED"
        assert calls.late == []
    assert (await own_court.judge(submitted=["j1"])).claims == 1


async def test_a_claim_of_unknown_outcome_is_called_unknown_and_found_by_its_request_id(
    cut_from_etcd: tuple[Coordinator, TcpProxy], own_court: Court, namespace: str
) -> None:
    """Fault case 006: etcd stays away longer than the call may take."""
    coordinator, proxy = cut_from_etcd
    async with Calls(coordinator.endpoint, namespace) as calls:
        await calls.submit("j1")
        session = await calls.open(ttl=30)
        proxy.set_mode(ProxyMode.HALF_DROP)
        begin = time.monotonic()
        first = await refusal(calls.claim(session, request_id="r1", timeout=8))
        took = time.monotonic() - begin
        held = await own_court.claim_revision("j1")
        proxy.set_mode(ProxyMode.PASS)

        [claim] = await available(lambda: calls.claim(session, request_id="r1", repeat=True))

        assert (first.code, first.reason) in {("UNAVAILABLE", "OUTCOME_UNKNOWN"), ("DEADLINE_EXCEEDED", "")}
        assert took < 8.5
        assert claim.fencing_token % 2**44 == held
        assert await calls.complete(claim) == "SUCCEEDED"
    assert (await own_court.judge(submitted=["j1"])).claims == 1


@pytest.mark.parametrize("job_id", ["mine", ""])
async def test_a_submission_that_the_sdk_repeats_makes_one_job(
    job_id: str, shared: Coordinator, to_coordinator: TcpProxy, court: Court, namespace: str
) -> None:
    """Fault case 007, with the caller's id and with one that the SDK fixed before its first try."""
    async with JobClient(to_coordinator.endpoint, namespace=namespace) as client, court.etcd() as etcd:
        await client.submit(JobSpec(queue="work", type="effect", job_id=f"first-{uuid.uuid4().hex}"))
        before = set(await court.jobs(etcd))
        to_coordinator.set_mode(ProxyMode.HALF_DROP)
        submitting = asyncio.create_task(
            client.submit(JobSpec(queue="work", type="effect", payload=b"x", job_id=job_id))
        )

        async def made() -> set[str]:
            return set(await court.jobs(etcd)) - before

        await eventually(made, what="the submission committed")
        to_coordinator.set_mode(ProxyMode.PASS)
        submitted = await submitting

        assert await made() == {submitted.job_id}
        assert not submitted.created
        assert not job_id or submitted.job_id == job_id
        # The SDK's own word for what it is asked twice, too:
        again = await client.get(submitted.job_id)
        assert again.spec.payload == b"x"
    await court.judge()
