"""Sessions as operators see them: listed from memory, read from the store, asked to drain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final, Protocol

from coordinator.core.session_command import SessionCommand, command_at
from coordinator.errors import (
    CodecError,
    Reason,
    RequestError,
    StorageError,
)
from coordinator.ports import Clock, HeldBySession, Session, SessionAdminStore, StoredSession
from coordinator.services.holders import Holders
from coordinator.services.page_cursor import page_cursor, position_in
from coordinator.services.queues import check_listed
from coordinator.services.storage_errors import refused

__all__ = ["SessionAdmin", "SessionDetails", "SessionPage", "SessionView"]

_ROUNDS: Final = 10
"""Swaps of one request at most; each that loses has read what another wrote."""

_MARK_DIGITS: Final = 12


class _Namespaces(Protocol):
    @property
    def listed(self) -> bool:
        """Whether all namespaces are known, and each is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session and what is known of it here. ``beat_ms``: of the last beat seen here, 0 for none."""

    session: Session
    command: int
    beat_ms: int
    claims: int
    locks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDetails:
    """A session and what it holds, as the store says."""

    view: SessionView
    held: HeldBySession


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Sessions by id; an empty cursor ends the listing."""

    sessions: tuple[SessionView, ...]
    cursor: str


class SessionAdmin:
    """ListSessions, GetSession, DrainSession.

    Args:
        store: the records.
        holders: what the watch and the beats told.
        namespaces: whether all of them are known; asking for one does not make it.
        ready: whether a namespace is listed, and its watch alive.
        clock: when QUIET becomes TERMINATE.
    """

    def __init__(
        self,
        store: SessionAdminStore,
        holders: Holders,
        namespaces: _Namespaces,
        clock: Clock,
        *,
        ready: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._holders = holders
        self._namespaces = namespaces
        self._clock = clock
        self._ready = ready

    def list(self, namespace: str, labels: Mapping[str, str], page_size: int, cursor: str) -> SessionPage:
        """The next page of open sessions that have all ``labels``, as this coordinator knows them.

        Raises:
            RequestError: VALIDATION_FAILED (a cursor of another query), NOT_READY.
        """
        mark = _mark(namespace, labels)
        after = position_in(cursor, mark)
        open_here = self._holders.sessions(namespace)
        check_listed(namespace, self._namespaces.listed, not open_here or self._ready(namespace))
        found = sorted(
            (
                session
                for session in open_here
                if session.session_id > after
                and all(session.labels.get(key) == value for key, value in labels.items())
            ),
            key=lambda session: session.session_id,
        )
        page = tuple(map(self._view, found[:page_size]))
        return SessionPage(
            page, page_cursor(mark, page[-1].session.session_id) if len(found) > page_size else ""
        )

    async def get(self, namespace: str, session_id: str, deadline: float) -> SessionDetails:
        """The session with what lies on its lease. It may have ended since, or hold something else.

        Raises:
            RequestError: SESSION_NOT_FOUND, ETCD_UNAVAILABLE.
        """
        try:
            stored = await self._store.read(namespace, session_id, deadline=deadline)
            if stored is None:
                raise _not_found(session_id)
            held = await self._store.held(namespace, session_id, deadline=deadline)
        except (StorageError, CodecError) as error:
            raise refused(error, {"session_id": session_id}) from error
        view = replace(self._view(stored.session), claims=len(held.claims), locks=len(held.locks))
        return SessionDetails(view=view, held=held)

    async def drain(
        self, namespace: str, session_id: str, terminate_after_ms: int | None, deadline: float
    ) -> SessionView:
        """Ask the worker to claim nothing more; it hears of it with its next beat. Nothing is taken away.

        Args:
            namespace, session_id: which.
            terminate_after_ms: until it is to finish and exit; 0 at once, None never. A repeat sets it anew.
            deadline: for all of it.

        Raises:
            RequestError: SESSION_NOT_FOUND, ETCD_UNAVAILABLE, OUTCOME_UNKNOWN, TOO_MANY_REQUESTS.
        """
        now_ms = self._clock.now_ms()
        command, terminate_ms = SessionCommand.QUIET, 0
        if terminate_after_ms == 0:
            command = SessionCommand.TERMINATE
        elif terminate_after_ms is not None:
            terminate_ms = now_ms + terminate_after_ms
        return await self._ask(namespace, session_id, command, terminate_ms, deadline)

    async def resume(self, namespace: str, session_id: str, deadline: float) -> SessionView:
        """Take the request back. A worker that has acted on it does not come back by that.

        Raises:
            RequestError: SESSION_NOT_FOUND, ETCD_UNAVAILABLE, OUTCOME_UNKNOWN, TOO_MANY_REQUESTS.
        """
        return await self._ask(namespace, session_id, SessionCommand.NONE, 0, deadline)

    async def _ask(
        self,
        namespace: str,
        session_id: str,
        command: SessionCommand,
        terminate_ms: int,
        deadline: float,
    ) -> SessionView:
        try:
            stands: StoredSession | None = await self._store.read(namespace, session_id, deadline=deadline)
            for _ in range(_ROUNDS):
                if stands is None:
                    raise _not_found(session_id)
                wanted = replace(stands.session, command=int(command), terminate_ms=terminate_ms)
                if wanted == stands.session:
                    return self._view(wanted)
                won, stands = await self._store.swap(stands, wanted, deadline=deadline)
                if won:
                    return self._view(wanted)
        except (StorageError, CodecError) as error:
            raise refused(error, {"session_id": session_id}) from error
        raise RequestError(
            Reason.TOO_MANY_REQUESTS, "others change this session too fast", retry_after_ms=200
        )

    def _view(self, session: Session) -> SessionView:
        where = (session.namespace, session.session_id)
        return SessionView(
            session=session,
            command=command_at(session.command, session.terminate_ms, self._clock.now_ms()),
            beat_ms=self._holders.session_beat_ms(*where),
            claims=self._holders.claims_of(*where),
            locks=self._holders.locks_held_by(*where),
        )


def _not_found(session_id: str) -> RequestError:
    return RequestError(
        Reason.SESSION_NOT_FOUND, "there is no such session", metadata={"session_id": session_id}
    )


def _mark(namespace: str, labels: Mapping[str, str]) -> str:
    said = repr(("sessions", namespace, sorted(labels.items())))
    return sha256(said.encode()).hexdigest()[:_MARK_DIGITS]
