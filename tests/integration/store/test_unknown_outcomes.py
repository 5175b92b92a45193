"""Replies lost after the commit: the outcome is found out, or called unknown, never guessed (case 006)."""

from __future__ import annotations

from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import OutcomeUnknown
from tests.integration.store.conftest import HarnessFactory
from tests.support.polling import eventually
from tests.support.tcp_proxy import ProxyMode, TcpProxy


async def test_a_claim_whose_reply_was_lost_is_recognised_by_its_nonce(
    etcd_server: EtcdProcess, make_harness: HarnessFactory
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        make_harness(proxy.endpoint, txn_timeout=0.2) as harness,
        make_harness() as other,
    ):
        stored = await harness.submitted("j1")
        await harness.open_session(ttl_ms=20_000)
        proxy.set_mode(ProxyMode.HALF_DROP)
        pending = harness.claim(stored, nonce=b"mine")

        async def held() -> object:
            found = await other.store.jobs.read(harness.namespace, "j1", deadline=other.deadline())
            return found.claim

        claim = await eventually(held)
        proxy.set_mode(ProxyMode.PASS)
        commit = await pending
        assert not commit.won
        assert commit.resent
        assert commit.claim == claim
        assert commit.claim is not None
        assert commit.claim.nonce == b"mine"
        assert commit.stored is not None
        done = await harness.complete(commit.stored, commit.claim.token)
        assert done.won


async def test_a_settlement_without_an_answer_is_unknown_and_then_found_done(
    etcd_server: EtcdProcess, make_harness: HarnessFactory
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        make_harness(proxy.endpoint, txn_timeout=0.2) as harness,
    ):
        stored, token = await harness.claimed("j1")
        # The retention lease is had before replies are lost.
        await harness.store.buckets.ensure(harness.namespace, deadline=harness.deadline())
        proxy.set_mode(ProxyMode.HALF_DROP)
        try:
            await harness.complete(stored, token, seconds=0.5)
        except OutcomeUnknown:
            pass
        else:
            raise AssertionError("nobody can know")
        proxy.set_mode(ProxyMode.PASS)
        again = await harness.complete(stored, token)
        assert not again.won
        assert again.stored is not None
        attempt = again.stored.job.attempt_with(token)
        assert attempt is not None
        assert attempt.digest == b"c"


async def test_a_session_whose_replies_were_lost_is_one_session(
    etcd_server: EtcdProcess, make_harness: HarnessFactory
) -> None:
    async with (
        TcpProxy(etcd_server.endpoint) as proxy,
        make_harness(proxy.endpoint) as harness,
        make_harness() as other,
    ):
        asked = harness.new_session(ttl_ms=20_000)
        proxy.set_mode(ProxyMode.HALF_DROP)
        try:
            await harness.store.sessions.open(asked, deadline=harness.deadline(0.4))
        except OutcomeUnknown:
            pass
        else:
            raise AssertionError("nobody can know")
        proxy.set_mode(ProxyMode.PASS)
        opened = await harness.store.sessions.open(asked, deadline=harness.deadline())
        seen = await other.store.sessions.list_sessions(harness.namespace, deadline=other.deadline())
        assert seen == [opened]
