"""A drain is one swap on the session's own lease; what it meets there is told as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core.session_command import SessionCommand, command_at
from coordinator.errors import LeasekeeperError, OutcomeUnknown, Reason, RequestError
from coordinator.ports import HeldBySession, Session, StoredSession
from coordinator.services.api import Beat
from coordinator.services.session_admin import SessionAdmin
from tests.support.builders import FAR, a_session
from tests.unit.services.workbench import NS, Coordinator, S, bench_with


class Witness:
    """``ports.SessionAdminStore`` of one session."""

    def __init__(self, session: Session | None) -> None:
        self.stands = StoredSession(session, 5) if session is not None else None
        self.meanwhile: list[StoredSession | LeasekeeperError | None] = []

    async def read(self, namespace: str, session_id: str, *, deadline: float) -> StoredSession | None:
        return self.stands

    async def held(self, namespace: str, session_id: str, *, deadline: float) -> HeldBySession:
        return HeldBySession()

    async def swap(
        self, before: StoredSession, after: Session, *, deadline: float
    ) -> tuple[bool, StoredSession | None]:
        if self.meanwhile:
            now = self.meanwhile.pop(0)
            if isinstance(now, LeasekeeperError):
                raise now
            self.stands = now
            return False, now
        assert before == self.stands
        self.stands = StoredSession(after, before.version + 1)
        return True, self.stands


class Known:
    listed = True


async def admin(witness: Witness) -> tuple[Coordinator, SessionAdmin]:
    c = await bench_with()
    return c, SessionAdmin(witness, c.holders, Known(), c.clock, ready=lambda namespace: True)


@pytest.mark.parametrize(
    ("after_ms", "command", "in_ms"),
    [(None, SessionCommand.QUIET, 0), (0, SessionCommand.TERMINATE, 0), (500, SessionCommand.QUIET, 500)],
)
async def test_a_drain_says_what_is_asked_and_when(
    after_ms: int | None, command: SessionCommand, in_ms: int
) -> None:
    witness = Witness(a_session())
    c, use = await admin(witness)
    view = await use.drain(NS, S, after_ms, FAR)
    assert witness.stands is not None
    asked = witness.stands.session
    assert (asked.command, asked.terminate_ms) == (command, c.clock.now_ms() + in_ms if in_ms else 0)
    assert view.command == command
    assert replace(asked, command=0, terminate_ms=0) == a_session()


async def test_what_others_wrote_meanwhile_is_kept() -> None:
    witness = Witness(a_session())
    _, use = await admin(witness)
    other = replace(a_session(), labels={"new": "label"})
    witness.meanwhile = [StoredSession(other, 9)]
    view = await use.drain(NS, S, None, FAR)
    assert dict(view.session.labels) == {"new": "label"}
    assert view.command == SessionCommand.QUIET


async def test_a_session_that_ends_meanwhile_is_not_found() -> None:
    witness = Witness(a_session())
    _, use = await admin(witness)
    witness.meanwhile = [None]
    with pytest.raises(RequestError) as caught:
        await use.drain(NS, S, None, FAR)
    assert caught.value.reason is Reason.SESSION_NOT_FOUND


async def test_an_unknown_outcome_is_told_as_unknown() -> None:
    witness = Witness(a_session())
    _, use = await admin(witness)
    witness.meanwhile = [OutcomeUnknown("?")]
    with pytest.raises(RequestError) as caught:
        await use.drain(NS, S, None, FAR)
    assert caught.value.reason is Reason.OUTCOME_UNKNOWN


async def test_asking_for_what_is_asked_already_writes_nothing() -> None:
    witness = Witness(a_session())
    _, use = await admin(witness)
    await use.resume(NS, S, FAR)
    assert witness.stands is not None
    assert witness.stands.version == 5


async def test_the_last_beat_is_known_also_if_it_came_before_the_watch_told_of_the_session() -> None:
    c, use = await admin(Witness(a_session()))
    early = replace(a_session(), session_id="00000000000000b2")
    beat = Beat(session_id=early.session_id, number=1, sent_ms=1, claims=(), locks=())
    c.holders.beaten(NS, beat, ttl_ms=10_000, now=0.0, now_ms=77)
    c.holders.session_seen(early)
    beats = {one.session.session_id: one.beat_ms for one in use.list(NS, {}, 10, "").sessions}
    assert beats == {S: 0, early.session_id: 77}
    c.holders.session_deleted(NS, early.session_id, 9)
    assert c.holders.session_beat_ms(NS, early.session_id) == 0


def test_quiet_becomes_terminate_at_its_time_and_nothing_else_does() -> None:
    quiet, terminate = SessionCommand.QUIET, SessionCommand.TERMINATE
    assert command_at(quiet, 0, 10**15) == quiet
    assert command_at(quiet, 100, 99) == quiet
    assert command_at(quiet, 100, 100) == terminate
    assert command_at(terminate, 0, 1) == terminate
    assert command_at(SessionCommand.NONE, 100, 200) == SessionCommand.NONE
