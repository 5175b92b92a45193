"""A reconciler without dispatch knows who holds what, from lists, the watch and its own commits."""

from __future__ import annotations

import pytest

from coordinator.core.commands import TakeAway, Taken
from coordinator.core.machine import Decision, decide
from coordinator.errors import EtcdUnavailable
from coordinator.services.claim_watch import ClaimWatch
from coordinator.services.commits import operation_of
from coordinator.services.holders import Holders, Suspect
from tests.support.builders import FAR, a_session
from tests.support.fake_ports import RecordedNotices
from tests.unit.services.conftest import World

NS = "default"
SESSION = a_session().session_id


class Watching:
    """A watch over the world's store, with what it suspects."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.suspects: list[Suspect] = []
        self.holders = Holders(self.suspects.append, notices=RecordedNotices())
        self.watch = ClaimWatch(world.store, world.sessions, self.holders, world.clock)

    def held(self) -> int:
        return self.holders.held_by(NS, SESSION)

    def suspected(self) -> list[str]:
        return [one.job_id for one in self.suspects]


@pytest.fixture
def watching(world: World) -> Watching:
    return Watching(world)


async def test_it_is_ready_once_listed_and_fresh(watching: Watching) -> None:
    watch = watching.watch
    watch.freshness(NS, True)
    assert not watch.ready(NS)
    await watch.relist(NS, 1)
    assert watch.ready(NS)
    watch.freshness(NS, False)
    assert not watch.ready(NS)


async def test_a_list_that_fails_leaves_it_not_ready(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: object, **named: object) -> None:
        raise EtcdUnavailable("no member answers")

    watching.watch.freshness(NS, True)
    await watching.watch.relist(NS, 1)
    monkeypatch.setattr(watching.world.sessions, "list_sessions", fail)
    with pytest.raises(EtcdUnavailable):
        await watching.watch.relist(NS, 2)
    assert not watching.watch.ready(NS)


async def test_a_claim_of_the_list_that_goes_with_its_session_is_suspected(watching: Watching) -> None:
    await watching.world.running("j1")
    await watching.watch.relist(NS, 1)
    assert 1 == watching.held()

    revision = watching.world.etcd.revision + 1
    watching.watch.claim_deleted(NS, "j1", revision)
    watching.watch.session_deleted(NS, SESSION, revision)

    assert ["j1"] == watching.suspected()
    assert 0 == watching.held()


async def test_a_claim_of_the_watch_that_is_settled_is_not_suspected(watching: Watching) -> None:
    await watching.watch.relist(NS, 1)
    commit = await watching.world.running("j1")
    assert commit.claim is not None
    watching.watch.session_put(a_session(), commit.revision)
    watching.watch.claim_put(NS, "j1", commit.claim, commit.revision)
    assert 1 == watching.held()

    watching.watch.claim_deleted(NS, "j1", commit.revision + 1)
    watching.watch.session_deleted(NS, SESSION, commit.revision + 2)

    assert [] == watching.suspected()
    assert 0 == watching.held()


async def test_a_claim_that_was_ended_here_is_forgotten_though_no_echo_comes(watching: Watching) -> None:
    claimed = await watching.world.running("j1")
    await watching.watch.relist(NS, 1)
    assert claimed.stored is not None
    assert claimed.claim is not None
    command = TakeAway(
        token=claimed.claim.token, why=Taken.TIMED_OUT, hold_ms=0, reason="overdue", jitter_number=0.5
    )
    outcome = decide(claimed.stored.job, claimed.claim, command, watching.world.clock.now_ms())
    assert isinstance(outcome, Decision)
    operation = operation_of(claimed.stored, outcome, FAR, token=claimed.claim.token)
    commit = await watching.world.store.commit(operation)
    assert commit.won
    watching.watch.applied(operation, commit)

    assert 0 == watching.held()
    watching.watch.session_deleted(NS, SESSION, commit.revision + 1)
    assert [] == watching.suspected()


async def test_claims_that_vanished_while_nobody_watched_are_suspected(watching: Watching) -> None:
    await watching.world.running("j1")
    await watching.watch.relist(NS, 1)
    await watching.world.sessions.close(NS, SESSION, deadline=FAR)

    await watching.watch.relist(NS, watching.world.etcd.revision)

    assert ["j1"] == watching.suspected()
