"""Sessions in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coordinator.core.job import Claim

__all__ = [
    "Confirmation",
    "KeptAlive",
    "Session",
    "SessionStore",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A worker process's presence.

    ``command``: 0 none, 1 quiet, 2 terminate, as stored; ``terminate_ms``: when quiet becomes terminate, Unix
    milliseconds, 0 for never (``core.session_command``). ``revision``: its witness's create revision.
    """

    namespace: str
    session_id: str
    identity: str
    sdk: str
    labels: Mapping[str, str]
    opened_ms: int
    ttl_ms: int
    epoch: int = 0
    command: int = 0
    request_digest: bytes = b""
    revision: int = 0
    terminate_ms: int = 0


@dataclass(frozen=True, slots=True)
class KeptAlive:
    """A keepalive's answer: granted TTL (0: the lease is gone), and the raft term of the member that gave
    it."""

    ttl_ms: int
    raft_term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """A linearizable read of a session and of the claims that it says it holds."""

    session: Session | None
    claims: Mapping[str, Claim]
    cancelled: frozenset[str]
    position: int
    """Revision of the read on the token scale."""
    raft_term: int
    locks: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Tokens of the session's entries that stand, by lock and waiter."""


class SessionStore(Protocol):
    """Sessions: one lease each, and a witness key on it. The session id names the lease."""

    async def open(self, session: Session, *, deadline: float) -> Session:
        """Grant and put the witness; a repeat answers the session that is there.

        Raises:
            RequestError: REQUEST_ID_REUSED (another session's content under this id).
        """

    async def read(self, namespace: str, session_id: str, *, deadline: float) -> Session | None:
        """The session, None if it has ended."""

    async def keep_alive(self, session_id: str, *, deadline: float) -> KeptAlive:
        """Renew once. Raises OutcomeUnknown if no member answered in time."""

    async def confirm(
        self,
        namespace: str,
        session_id: str,
        job_ids: Sequence[str],
        *,
        locks: Sequence[tuple[str, str]] = (),
        deadline: float,
    ) -> Confirmation:
        """Read session, claims, cancel keys and the session's entries of ``locks`` (names and waiters).

        At one revision; in several flat reads for more than ~60 jobs or ~120 locks.
        """

    async def claims_of(self, namespace: str, session_id: str, *, deadline: float) -> list[tuple[str, Claim]]:
        """Claims attached to the session's lease."""

    async def shut(self, namespace: str, session_id: str, *, deadline: float) -> None:
        """Delete the witness: what the session holds stays, nothing more is claimed for it. Repeatable.

        Raises:
            OutcomeUnknown: it may be open still.
        """

    async def close(self, namespace: str, session_id: str, *, deadline: float) -> None:
        """Revoke the lease; no error if it is gone."""

    async def list_sessions(self, namespace: str, *, deadline: float) -> list[Session]:
        """Every open session, in pages."""
