"""Each operation of the Txn table on a real etcd: what a win writes, what a loss is told."""

from __future__ import annotations

from coordinator.core import commands as c
from coordinator.core.fencing import make_token, split_token
from coordinator.core.job import Claim, JobState, Rollback
from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.ports import Spec, Stored
from tests.integration.store.conftest import Harness
from tests.support.etcd_oracle import keys_in_etcd


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


async def test_a_second_submit_is_told_what_stands_there(harness: Harness) -> None:
    first = await harness.submitted("j1", unique_key="u")
    again = await harness.submit("j1", unique_key="u")
    assert not again.won
    assert again.stored == first
    duplicate = await harness.submit("j2", unique_key="u")
    assert not duplicate.won
    assert duplicate.stored is None
    assert duplicate.unique_owner == "j1"


async def test_a_unique_key_is_free_after_the_end(harness: Harness) -> None:
    stored, token = await harness.claimed("j1", unique_key="u")
    assert (await harness.complete(stored, token)).won
    assert (await harness.submit("j2", unique_key="u")).won


async def test_two_claims_of_one_job_in_one_breath_have_one_winner(harness: Harness) -> None:
    stored = await harness.submitted("j1")
    await harness.open_session()
    under_way = [harness.claim(stored, nonce=bytes([number])) for number in range(20)]
    commits = [await pending for pending in under_way]
    assert [commit.won for commit in commits] == [True] + [False] * 19
    assert {commit.claim.nonce for commit in commits if commit.claim is not None} == {b"\0"}


async def test_a_claim_on_an_outdated_record_is_lost(harness: Harness) -> None:
    stored = await harness.submitted("j1")
    await harness.open_session()
    changed = await harness.store.jobs.commit(harness.operation(stored, c.Update(priority=1)))
    assert changed.won
    lost = await harness.claim(stored)
    assert not lost.won
    assert lost.claim is None
    assert lost.stored == changed.stored


async def test_a_job_is_lost_only_once_its_claim_is_gone(harness: Harness) -> None:
    stored, token = await harness.claimed("j1")
    assert harness.session is not None
    lose = harness.operation(stored, c.Lose(token=token))
    refused = await harness.store.jobs.commit(lose)
    assert not refused.won
    assert refused.claim is not None
    await harness.store.sessions.close(
        harness.namespace, harness.session.session_id, deadline=harness.deadline()
    )
    lost = await harness.store.jobs.commit(harness.operation(stored, c.Lose(token=token)))
    assert lost.won
    assert lost.stored is not None
    assert lost.stored.job.state is JobState.PENDING
    assert lost.stored.job.lease_losses == 1
    late = await harness.complete(stored, token)
    assert not late.won


async def test_a_token_of_another_epoch_is_stale_everywhere(harness: Harness) -> None:
    stored, token = await harness.claimed("j1")
    foreign = make_token(harness.store.present.epoch + 1, split_token(token).revision)
    lost = await harness.complete(stored, foreign)
    assert not lost.won
    assert lost.claim is not None
    assert lost.claim.token == token


async def test_tokens_grow_over_deletion_and_resubmission(harness: Harness) -> None:
    tokens = []
    for _ in range(3):
        stored, token = await harness.claimed("j1")
        tokens.append(token)
        done = await harness.complete(stored, token)
        assert done.stored is not None
        assert (await harness.store.jobs.commit(harness.operation(done.stored, c.Delete()))).won
    assert tokens == sorted(set(tokens))


async def test_an_independent_client_sees_the_keys_of_the_table(
    harness: Harness, etcd_server: EtcdProcess
) -> None:
    stored, token = await harness.claimed("j1", unique_key="u")
    assert harness.session is not None
    keys = harness.store.space.namespace(harness.namespace)
    prefix = keys.state("j1").rpartition(b"/state/")[0] + b"/"
    seen = await keys_in_etcd(etcd_server.endpoint, prefix)
    assert set(seen) == {
        keys.spec("j1"),
        keys.state("j1"),
        keys.claim("j1"),
        keys.unique("q", "u"),
        keys.session(harness.session.session_id),
    }
    claim = seen[keys.claim("j1")]
    assert claim.create_revision == split_token(token).revision == seen[keys.state("j1")].mod_revision
    assert claim.lease == int(harness.session.session_id, 16)
    assert seen[keys.state("j1")].lease == 0
    assert stored.revision == claim.create_revision


async def test_observers_hear_of_a_rollback_job_as_of_a_submission(harness: Harness) -> None:
    stored, token = await harness.claimed("j1", rollback=Rollback(queue="undo", type="u", payload=b"p"))
    held = Claim(session="0" * 16, attempt=1, nonce=b"", start_ms=0, token=token)
    command = c.Fail(token=token, digest=b"f", no_retry=True)
    commit = await harness.store.jobs.commit(harness.operation(stored, command, held=held, token=token))

    (parent, told), (child, told_of_it) = harness.told.applied_commits[-2:]

    assert told == commit
    assert parent.also == (child,)
    assert (child.before, child.spec) == (None, Spec(payload=b"p"))
    assert told_of_it.stored == Stored(child.after, commit.revision)  # type: ignore[arg-type]
