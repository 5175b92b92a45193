"""What every ``JobStore`` does with an operation that submits other jobs under guards of their own."""

from __future__ import annotations

from coordinator.core import commands as c
from coordinator.core.job import Claim
from coordinator.core.machine import Decision, decide
from coordinator.ports import Operation, Spec, Stored
from coordinator.services.commits import operation_of
from tests.conformance.actor import Actor
from tests.conformance.test_job_store import snapshot


def child(actor: Actor, job_id: str, **terms: object) -> Operation:
    command = c.Submit(namespace=actor.namespace, job_id=job_id, terms=actor.terms(**terms))
    return actor.operation(None, command, spec=Spec(payload=b"p"))


def completion(actor: Actor, stored: Stored, token: int, *children: Operation) -> Operation:
    held = Claim(session="0" * 16, attempt=1, nonce=b"", start_ms=0, token=token)
    decision = decide(stored.job, held, c.Complete(token=token, digest=b"c"), actor.clock.now_ms())
    assert isinstance(decision, Decision)
    return operation_of(stored, decision, actor.deadline(5), token=token, follow_ups=children)


async def test_follow_ups_stand_at_the_revision_of_their_parent(actor: Actor) -> None:
    stored, token = await actor.claimed("j1", unique_key="u")
    operation = completion(actor, stored, token, child(actor, "a", unique_key="u"), child(actor, "b"))
    commit = await actor.jobs.commit(operation)
    assert commit.won
    for job_id in ("a", "b"):
        found = await snapshot(actor, job_id, spec=True)
        assert found.stored is not None
        assert found.stored.revision == commit.revision
        assert found.spec == Spec(payload=b"p")
    taken = await actor.submit("x", unique_key="u")
    assert (taken.won, taken.unique_owner) == (False, "a")


async def test_one_that_stands_refuses_all_and_a_loser_is_told_what_stands(actor: Actor) -> None:
    there = await actor.submitted("a")
    await actor.submitted("owner", unique_key="v")
    stored, token = await actor.claimed("j1", unique_key="u")
    children = (
        child(actor, "b", unique_key="u"),
        child(actor, "a"),
        child(actor, "d", unique_key="v"),
        child(actor, "e"),
    )
    commit = await actor.jobs.commit(completion(actor, stored, token, *children))
    assert not commit.won
    assert commit.stored == stored
    assert commit.claim is not None
    assert [(one.job, one.unique_owner) for one in commit.also] == [
        (None, "j1"),
        (there.job, ""),
        (None, "owner"),
        (None, ""),
    ]
    for job_id in ("b", "d", "e"):
        assert (await snapshot(actor, job_id)).stored is None
    assert (await actor.jobs.commit(completion(actor, stored, token, children[0], children[3]))).won


async def test_a_lost_claim_submits_nothing(actor: Actor) -> None:
    stored, token = await actor.claimed("j1")
    assert (await actor.jobs.commit(completion(actor, stored, token))).won
    lost = await actor.jobs.commit(completion(actor, stored, token, child(actor, "a")))
    assert not lost.won
    assert (await snapshot(actor, "a")).stored is None
