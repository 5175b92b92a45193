"""Locks once they are taken: give back, look at, check, revoke, observe."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from coordinator import failpoints
from coordinator.core.fencing import make_token, split_token
from coordinator.core.lock_order import LockEntry, line_of
from coordinator.errors import FieldViolation, Reason, RequestError, StorageError
from coordinator.ports import Clock, LockDeletion, LocksRead, LockStore, NamespaceFeeds, Present, SessionStore
from coordinator.services.claim_revocation import ClaimRevocation
from coordinator.services.contention import Contention, Resource
from coordinator.services.fencing import FutureTokens, check_present, check_token
from coordinator.services.lock_lines import LockLines
from coordinator.services.lock_refusals import draining, lock_lost
from coordinator.services.lock_values import LOCK, HeldName, LockListing, LockView
from coordinator.services.storage_errors import refused

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Locks", "LocksConfig"]

_log = logging.getLogger(__name__)

_LISTED_ENTRIES: Final = 5_000
"""Entries of one page of a listing; it ends with the read that goes beyond."""

_NAMES_PER_READ: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LocksConfig:
    """``observers``: streams at most. ``commit_timeout``: seconds of one deletion."""

    observers: int = 1_000
    commit_timeout: float = 5.0


class Locks:
    """All but taking.

    Args:
        store: where locks are.
        sessions: asked whether the session of a repeated release is open.
        feeds: makes sure that a namespace is watched.
        present: where the store's history stands.
        lines: what is known of locks.
        contention: told of clean releases.
        futures: told of tokens from a future that the store has lost.
        clock: time.
        claims: ends the claims of jobs whose locks are revoked; None: no job names a lock.
        config: limits.
    """

    def __init__(
        self,
        store: LockStore,
        sessions: SessionStore,
        feeds: NamespaceFeeds,
        present: Present,
        lines: LockLines,
        contention: Contention,
        futures: FutureTokens,
        clock: Clock,
        config: LocksConfig | None = None,
        *,
        claims: ClaimRevocation | None = None,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._feeds = feeds
        self._present = present
        self._lines = lines
        self._contention = contention
        self._futures = futures
        self._clock = clock
        self._claims = claims
        self._config = config or LocksConfig()
        self._observers = 0
        self._draining = False

    def drain(self) -> None:
        """No new observers; the streams themselves are ended by whoever serves them."""
        self._draining = True

    # -- release and revoke

    async def release(
        self, namespace: str, session_id: str, held: Sequence[HeldName], *, repeat: bool, deadline: float
    ) -> int:
        """Delete each lock's entry by its token; how many were there to delete.

        Each stands for itself: if one is lost, the others are given back nevertheless.

        Raises:
            RequestError: LOCK_LOST for the first that is not held by this session with this token; of a
                ``repeat`` not while the session is open. EPOCH_REGRESSED, ETCD_UNAVAILABLE, OUTCOME_UNKNOWN.
        """
        check_present(self._present)
        await self._feeds.ensure(namespace, deadline=deadline)
        await self._check_futures(namespace, held, deadline)
        found = await self._entries(namespace, session_id, held, deadline)
        there = [entry for entry in found if entry is not None]
        commit_by = min(deadline, self._clock.monotonic() + self._config.commit_timeout)
        await failpoints.reached("unlock.before-commit")
        results = iter(await self._store.delete(namespace, there, deadline=commit_by) if there else ())
        await failpoints.reached("unlock.after-commit")
        released, lost, failed = 0, list[HeldName](), list[RequestError]()
        open_: bool | None = None
        for one, entry in zip(held, found, strict=True):
            result = next(results) if entry is not None else None
            if result is None:
                lost.append(one)
            elif not isinstance(result, LockDeletion):
                failed.append(refused(result, {"name": one.name}))
            elif result.deleted or (result.resent and result.session_open):
                # After a send whose answer was lost the entry is gone by that send, or with it: given back.
                assert entry is not None
                released += 1
                self._lines.deleted(namespace, entry)
                self._contention.settled(session_id, Resource(LOCK, namespace, one.name))
            else:
                lost.append(one)
                open_ = result.session_open
        if failed:
            raise failed[0]
        forgiven = repeat and bool(lost) and await self._is_open(namespace, session_id, open_, deadline)
        for one in lost:
            if not (forgiven and await self._has_gone(namespace, one, deadline)):
                raise await self._lost(namespace, one, deadline)
        return released

    async def revoke(
        self, namespace: str, name: str, token: int, *, reason: str, deadline: float
    ) -> LockEntry:
        """Take a lock from its owner, or an entry out of the line; whose it was.

        The claim of a job is taken away with all its locks: half a hold is none.

        Raises:
            RequestError: LOCK_LOST, no entry has this token. EPOCH_REGRESSED, ETCD_UNAVAILABLE,
                OUTCOME_UNKNOWN.
        """
        check_present(self._present)
        await self._feeds.ensure(namespace, deadline=deadline)
        held = HeldName(name, token)
        await self._check_futures(namespace, [held], deadline)
        read = await self._read(namespace, [name], deadline)
        entry = self._with_token(read.entries[name], token)
        if entry is None:
            raise await self._lost(namespace, held, deadline)
        commit_by = min(deadline, self._clock.monotonic() + self._config.commit_timeout)
        if entry.job_id and self._claims is not None:
            why = f"its lock {name} was revoked" + (f": {reason}" if reason else "")
            if await self._claims.take(namespace, entry.job_id, token, reason=why, deadline=commit_by):
                self._lines.deleted(namespace, entry)
                _log.warning(
                    "a claim was taken away, for its lock was revoked",
                    extra={"namespace": namespace, "lock": name, "job": entry.job_id, "reason": reason},
                )
                return entry
        [result] = await self._store.delete(namespace, [entry], deadline=commit_by)
        if not isinstance(result, LockDeletion):
            raise refused(result, {"name": name})
        if not result.deleted and not result.resent:
            raise await self._lost(namespace, held, deadline)
        self._lines.deleted(namespace, entry)
        _log.warning(
            "a lock was revoked",
            extra={"namespace": namespace, "lock": name, "session": entry.session, "reason": reason},
        )
        return entry

    async def _check_futures(self, namespace: str, held: Sequence[HeldName], deadline: float) -> None:
        present = self._present.token()
        if all(one.token <= present for one in held):
            return
        highest = max(held, key=lambda one: one.token)
        error = await check_token(self._present, highest.token, highest.name, deadline=deadline, kind="name")
        if error is not None:
            self._futures.refused(namespace, "", highest.token, error)
            raise error

    async def _entries(
        self, namespace: str, session_id: str, held: Sequence[HeldName], deadline: float
    ) -> list[LockEntry | None]:
        """What the session holds by these tokens; the store is asked for what is not known here."""
        found: list[LockEntry | None] = []
        for one in held:
            epoch, revision = split_token(one.token)
            known = epoch == self._present.epoch
            found.append(
                self._lines.entry(namespace, one.name, session=session_id, revision=revision)
                if known
                else None
            )
        unknown = [one.name for one, entry in zip(held, found, strict=True) if entry is None]
        if unknown:
            read = await self._read(namespace, list(dict.fromkeys(unknown)), deadline)
            for at, one in enumerate(held):
                entry = self._with_token(read.entries.get(one.name, ()), one.token)
                if entry is not None and entry.session == session_id:
                    found[at] = entry
        # What a claim holds is given back by the claim's end alone.
        return [entry if entry is not None and not entry.job_id else None for entry in found]

    async def _is_open(self, namespace: str, session_id: str, known: bool | None, deadline: float) -> bool:
        if known is not None:
            return known
        try:
            return await self._sessions.read(namespace, session_id, deadline=deadline) is not None
        except StorageError as error:
            raise refused(error) from error

    async def _has_gone(self, namespace: str, held: HeldName, deadline: float) -> bool:
        """Whether no entry, of no session, has this token."""
        read = await self._read(namespace, [held.name], deadline)
        return self._with_token(read.entries[held.name], held.token) is None

    async def _lost(self, namespace: str, held: HeldName, deadline: float) -> RequestError:
        view = await self.get(namespace, held.name, deadline)
        current = max((self.token_of(entry) for entry in view.owners), default=0)
        return lock_lost(held.name, held.token, current, "the lock is not held with this token")

    def _with_token(self, entries: Sequence[LockEntry], token: int) -> LockEntry | None:
        return next((entry for entry in entries if self.token_of(entry) == token), None)

    # -- look

    def token_of(self, entry: LockEntry) -> int:
        """An entry's fencing token."""
        return make_token(self._present.epoch, entry.revision)

    def token_at(self, revision: int) -> int:
        """A revision on the scale of fencing tokens; 0 stays 0."""
        return make_token(self._present.epoch, revision) if revision else 0

    async def get(self, namespace: str, name: str, deadline: float) -> LockView:
        """A lock as it stands in the store; without entries, it is free.

        Raises:
            RequestError: ETCD_UNAVAILABLE.
        """
        read = await self._read(namespace, [name], deadline)
        return LockView(name, line_of(read.entries[name]), read.revision)

    async def check(self, namespace: str, name: str, token: int, deadline: float) -> tuple[bool, int]:
        """Whether a token is that of a present owner, and the largest that is, 0 for none.

        Raises:
            RequestError: ETCD_UNAVAILABLE, EPOCH_REGRESSED.
        """
        await self._check_futures(namespace, [HeldName(name, token)], deadline)
        owners = [self.token_of(entry) for entry in (await self.get(namespace, name, deadline)).owners]
        return token in owners, max(owners, default=0)

    async def list_locks(self, namespace: str, count: int, cursor: str, deadline: float) -> LockListing:
        """Locks that have entries, by name: names as the watch tells them, each read in its own tight range.

        Raises:
            RequestError: VALIDATION_FAILED (no cursor of ours), ETCD_UNAVAILABLE, NOT_READY.
        """
        await self._feeds.ensure(namespace, deadline=deadline)
        names = self._lines.names(namespace, _decode_cursor(cursor), count + 1)
        more = len(names) > count
        views: list[LockView] = []
        entries = 0
        last = ""
        for at in range(0, min(count, len(names)), _NAMES_PER_READ):
            chunk = names[at : min(at + _NAMES_PER_READ, count)]
            read = await self._read(namespace, chunk, deadline)
            for name in chunk:
                last = name
                entries += len(read.entries[name])
                if read.entries[name]:
                    views.append(LockView(name, line_of(read.entries[name]), read.revision))
            if entries >= _LISTED_ENTRIES and last != names[-1]:
                more = True
                break
        return LockListing(tuple(views), _encode_cursor(last) if more else "")

    async def _read(self, namespace: str, names: Sequence[str], deadline: float) -> LocksRead:
        try:
            return await self._store.read(namespace, names, deadline=deadline)
        except StorageError as error:
            raise refused(error) from error

    # -- observe

    async def observe(self, namespace: str, name: str) -> AsyncGenerator[LockView, None]:
        """The lock as it stands, then at every change of its owners; states in between may be left out.

        Raises:
            RequestError: TOO_MANY_REQUESTS (too many observe), DRAINING, NOT_READY (also when the epoch is
                raised), ETCD_UNAVAILABLE.
        """
        with self._observing(namespace, name) as moved:
            deadline = self._clock.monotonic() + self._config.commit_timeout
            await self._feeds.ensure(namespace, deadline=deadline)
            read = await self._read(namespace, [name], deadline)
            self._lines.looked(namespace, name, read.entries[name], read.revision)
            view, epoch = LockView(name, line_of(read.entries[name]), read.revision), self._present.epoch
            yield view
            while True:
                await moved.wait()
                moved.clear()
                if self._draining:
                    raise draining()
                if self._present.epoch != epoch:
                    # After a restore revisions begin again lower, and what follows looks like the past.
                    raise RequestError(Reason.NOT_READY, "the epoch was raised; observe again")
                line, revision = self._lines.told(namespace, name), self._lines.known_to(namespace, name)
                if revision >= view.revision and _owners(line.owners) != _owners(view.owners):
                    view = LockView(name, line, revision)
                    yield view

    @contextmanager
    def _observing(self, namespace: str, name: str) -> Iterator[asyncio.Event]:
        if self._draining:
            raise draining()
        if self._observers >= self._config.observers:
            raise RequestError(
                Reason.TOO_MANY_REQUESTS,
                f"{self._observers} streams observe locks already",
                retry_after_ms=1_000,
            )
        self._observers += 1
        moved = self._lines.observe(namespace, name)
        try:
            yield moved
        finally:
            self._lines.forget(namespace, name, moved)
            self._observers -= 1


def _owners(entries: Sequence[LockEntry]) -> list[int]:
    return [entry.revision for entry in entries]


def _encode_cursor(name: str) -> str:
    return base64.urlsafe_b64encode(b"1:" + name.encode()).decode().rstrip("=")


def _decode_cursor(cursor: str) -> str:
    if not cursor:
        return ""
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        version, _, name = raw.partition(b":")
        if version != b"1" or not name:
            raise ValueError("another form")
        return name.decode()
    except (ValueError, binascii.Error) as error:
        text = "is not a page token of ours"
        raise RequestError(
            Reason.VALIDATION_FAILED, f"page_token: {text}", fields=(FieldViolation("page_token", text),)
        ) from error
