"""Each operation of the Txn table on a real etcd: what a win writes, what a loss is told."""

from __future__ import annotations

from coordinator.core import commands as c
from coordinator.core.fencing import split_token
from coordinator.core.job import JobState
from tests.integration.store.conftest import Harness


async def test_a_submitted_job_is_stored_whole_and_waits(harness: Harness) -> None:
    commit = await harness.submit("j1", b"payload", unique_key="u")
    assert commit.won
    assert commit.stored is not None
    found = await harness.store.jobs.read(harness.namespace, "j1", deadline=harness.deadline(), spec=True)
    assert found.stored == commit.stored
    assert found.stored.revision == commit.revision
    assert found.spec is not None
    assert found.spec.payload == b"payload"
    assert found.claim is None
    ready = await harness.store.jobs.list_ready(
        harness.namespace,
        "q",
        "t",
        after=None,
        until=commit.stored.job.rank,
        limit=10,
        deadline=harness.deadline(),
    )
    assert ready.jobs == (commit.stored,)
    assert ready.complete
    assert harness.told.applied_commits[0][1] == commit


async def test_a_whole_life_leaves_only_the_record(harness: Harness) -> None:
    stored, token = await harness.claimed("j1")
    done = await harness.complete(stored, token, result=b"r")
    assert done.won
    assert done.stored is not None
    assert done.stored.job.state is JobState.SUCCEEDED
    assert done.stored.job.attempts[0].token == token
    keys = harness.store.space.namespace(harness.namespace)
    present = {key for key in await harness.keys() if keys.namespace.encode() in key}
    assert {key for key in present if b"/session/" not in key} == {keys.state("j1")} | {
        key for key in present if b"_system" in key
    }
    lease = (await harness.keys())[keys.state("j1")].lease  # type: ignore[attr-defined]
    assert lease


async def test_a_claim_brings_spec_and_token(harness: Harness) -> None:
    stored = await harness.submitted("j1")
    await harness.open_session()
    commit = await harness.claim(stored)
    assert commit.won
    assert commit.spec is not None
    assert commit.spec.payload == b"payload"
    assert commit.checkpoint is None
    position = split_token(commit.token)
    assert position == (harness.store.present.epoch, commit.revision)
    found = await harness.store.jobs.read(harness.namespace, "j1", deadline=harness.deadline())
    assert found.claim is not None
    assert found.claim.token == commit.token
    assert found.stored == commit.stored


async def test_a_lost_claim_is_told_the_holder(harness: Harness) -> None:
    stored = await harness.submitted("j1")
    session = await harness.open_session()
    first = await harness.claim(stored, nonce=b"1")
    second = await harness.claim(stored, nonce=b"2")
    assert not second.won
    assert second.claim is not None
    assert second.claim.nonce == b"1"
    assert second.claim.token == first.token
    assert second.claim.session == session.session_id
    assert second.stored == first.stored
    assert not second.session_gone


async def test_a_stale_token_settles_nothing(harness: Harness) -> None:
    stored, token = await harness.claimed("j1")
    lost = await harness.complete(stored, token - 1)
    assert not lost.won
    assert lost.claim is not None
    assert lost.claim.token == token
    assert (await harness.complete(stored, token)).won
    again = await harness.complete(stored, token)
    assert not again.won
    assert again.claim is None
    assert again.stored is not None
    assert again.stored.job.attempt_with(token) is not None


async def test_cancel_of_a_running_job_puts_a_cancel_key(harness: Harness) -> None:
    stored, token = await harness.claimed("j1")
    asked = await harness.store.jobs.commit(harness.operation(stored, c.Cancel(reason="no")))
    assert asked.won
    assert asked.stored is not None
    keys = harness.store.space.namespace(harness.namespace)
    assert keys.cancel("j1") in await harness.keys()
    done = await harness.complete(asked.stored, token)
    assert done.won
    assert keys.cancel("j1") not in await harness.keys()
