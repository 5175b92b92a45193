"""What every ``JobStore`` does with jobs that have failed for good: rollback jobs, retries by hand."""

from __future__ import annotations

from coordinator.core import commands as c
from coordinator.core.job import Claim, Rollback
from coordinator.ports import Spec, Stored
from tests.conformance.actor import Actor
from tests.conformance.test_job_store import LAST, ready, snapshot

UNDO = Rollback(queue="undo", type="u", payload=b"undo", content_type="text/plain")


async def dead(actor: Actor, job_id: str = "j1", **terms: object) -> Stored:
    """A job that has used up its retries, as it lies there."""
    stored, token = await actor.claimed(job_id, **terms)
    held = Claim(session="0" * 16, attempt=1, nonce=b"", start_ms=0, token=token)
    command = c.Fail(token=token, digest=b"f", no_retry=True)
    commit = await actor.jobs.commit(actor.operation(stored, command, held=held, token=token))
    assert commit.won
    assert commit.stored is not None
    return commit.stored


async def test_a_job_that_dies_enqueues_its_rollback_job_at_the_same_revision(actor: Actor) -> None:
    parent = await dead(actor, rollback=UNDO)
    child = await snapshot(actor, parent.job.rollback_job, spec=True)
    assert child.stored is not None
    assert child.stored.revision == parent.revision
    assert child.stored.job.terms.labels["leasekeeper.rollback-of"] == "j1"
    assert child.spec == Spec(payload=b"undo", content_type="text/plain")
    page = await actor.jobs.list_ready(
        actor.namespace, "undo", "u", after=None, until=LAST, limit=9, deadline=actor.deadline()
    )
    assert page.jobs == (child.stored,)
    assert (await snapshot(actor)).stored == parent


async def test_a_death_that_loses_its_guard_enqueues_no_rollback_job(actor: Actor) -> None:
    stored, token = await actor.claimed("j1", rollback=UNDO)
    held = Claim(session="0" * 16, attempt=1, nonce=b"", start_ms=0, token=token)
    fails = actor.operation(stored, c.Fail(token=token, digest=b"f", no_retry=True), held=held, token=token)
    assert (await actor.jobs.commit(actor.operation(stored, c.Cancel()))).won
    assert not (await actor.jobs.commit(fails)).won
    [child] = fails.also
    assert child.after is not None
    assert (await snapshot(actor, child.after.job_id)).stored is None


async def test_a_dead_job_is_retried_in_its_place_in_line_with_its_spec(actor: Actor) -> None:
    stored = await dead(actor, unique_key="u")
    commit = await actor.jobs.commit(actor.operation(stored, c.Retry()))
    assert commit.won
    assert await ready(actor) == ["j1"]
    taken = await actor.submit("j2", unique_key="u")
    assert (taken.won, taken.unique_owner) == (False, "j1")
    assert commit.stored is not None
    claimed = await actor.claim(commit.stored)
    assert claimed.spec is not None
    assert claimed.spec.payload == b"payload"
    again = await actor.jobs.commit(actor.operation(stored, c.Retry()))
    assert (again.won, again.stored) == (False, claimed.stored)


async def test_a_retry_loses_against_the_job_that_has_its_unique_key(actor: Actor) -> None:
    stored = await dead(actor, unique_key="u")
    await actor.submitted("j2", unique_key="u")
    lost = await actor.jobs.commit(actor.operation(stored, c.Retry()))
    assert (lost.won, lost.stored, lost.unique_owner) == (False, stored, "j2")
    assert await ready(actor) == ["j2"]
