"""AcquireLock: try at once, or stand in line.

A call that finds its locks free puts its entries under the compare that nothing was added since they were
seen so: it owns by its own commit. Any other puts them to wait, and owns when the watch, or a read, says
that nobody is before it (``services.lock_lines``). Several names are put in one Txn, so two calls stand in
the same order at every lock, and no circle of them can wait for each other.

Whoever gives up takes its entries out of the line. An entry of an earlier send of the same call is adopted
first, so that the clean-up of that try leaves it alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator import failpoints
from coordinator.core.fencing import make_token
from coordinator.core.lock_order import MAX_WAITERS, Line, LockEntry, LockMode, line_of
from coordinator.errors import CodecError, Reason, RequestError, StorageError
from coordinator.ports import Clock, LockCommit, LockStore, NamespaceFeeds, Present, SessionStore
from coordinator.services.claiming import session_full, session_not_found
from coordinator.services.contention import Contention, Throttled, Try
from coordinator.services.fencing import check_present
from coordinator.services.holders import Holders
from coordinator.services.lock_call import LinesSeen, LockCall, adopted_by, call_of, own_of, put_by, resource
from coordinator.services.lock_cleanup import LockCleanup, put_at
from coordinator.services.lock_lines import LockLines, Standing
from coordinator.services.lock_refusals import (
    draining,
    line_full,
    lock_held,
    lock_lost,
    permits_mismatch,
    taken_out,
    throttled,
)
from coordinator.services.lock_values import LockWish
from coordinator.services.storage_errors import refused
from coordinator.services.waiting import wait_event

__all__ = ["LockAcquisition", "LockAcquisitionConfig"]

_ROUNDS: Final = 6
"""Commits of one call at most: each but the last lost to an addition that came in between."""

_FREE_ROUNDS: Final = 2
"""Commits under a compare. Where many share a lock they lose to each other's additions: from then on a call
stands in line first, and looks then."""

_WAKES: Final = 100_000
"""Rounds of one wait at most; each follows a change of its line, so this is never met in practice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockAcquisitionConfig:
    """Limits. Spans are seconds.

    Attributes:
        session_keys: claims and locks of one session.
        commit_timeout: of one commit.
        leave_timeout: how long a call that gives up waits for its entries to go.
    """

    session_keys: int = 500
    commit_timeout: float = 5.0
    leave_timeout: float = 1.0


class LockAcquisition:
    """Takes locks.

    Args:
        store: where locks are.
        sessions: asked whether a session whose entry has gone is open.
        feeds: makes sure that a namespace is watched.
        present: where the store's history stands.
        lines: what is known of locks.
        holders: counts the keys on a session's lease.
        contention: who may try.
        cleanup: takes out what calls leave behind.
        clock: time.
        config: limits.
    """

    def __init__(
        self,
        store: LockStore,
        sessions: SessionStore,
        feeds: NamespaceFeeds,
        present: Present,
        lines: LockLines,
        holders: Holders,
        contention: Contention,
        cleanup: LockCleanup,
        clock: Clock,
        config: LockAcquisitionConfig | None = None,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._feeds = feeds
        self._present = present
        self._lines = lines
        self._holders = holders
        self._contention = contention
        self._cleanup = cleanup
        self._clock = clock
        self._config = config or LockAcquisitionConfig()
        self._draining = False

    def drain(self) -> None:
        """Answer whoever waits, and refuse new calls. Entries stay: a repeat elsewhere keeps its place."""
        self._draining = True
        self._lines.wake_all()

    async def acquire(self, namespace: str, wish: LockWish, deadline: float) -> list[LockEntry]:
        """The entries that own, in the order of the names; waits up to ``wait_ms`` for them.

        Raises:
            RequestError: LOCK_HELD, PERMITS_MISMATCH, RELOCK_THROTTLED (the store was not asked),
                TOO_MANY_REQUESTS (too many wait), LOCK_LOST (revoked in the wait), REQUEST_ID_REUSED,
                SESSION_NOT_FOUND, SESSION_FULL, DRAINING, NOT_READY, ETCD_UNAVAILABLE, OUTCOME_UNKNOWN.
        """
        if self._draining:
            raise draining()
        check_present(self._present)
        await self._feeds.ensure(namespace, deadline=deadline)
        call = call_of(namespace, wish, now_ms=self._clock.now_ms(), deadline=deadline)
        self._check_room(call)
        if wish.wait_ms <= 0:
            entries = await self._at_once(call)
        else:
            until = min(deadline, self._clock.monotonic() + wish.wait_ms / 1000)
            entries, own = await self._put(call, waits=True)
            if not own:
                entries = await self._in_line(call, entries, until)
        if not entries[0].version and entries[0].repeats == wish.repeats:
            return await self._secured(call, entries)
        return entries

    def _check_room(self, call: LockCall) -> None:
        namespace, session, limit = call.namespace, call.session_id, self._config.session_keys
        held = self._holders.held_by(namespace, session)
        if held + len(call.entries) > limit:
            own = {(entry.name, entry.waiter) for entry in self._lines.of_session(namespace, session)}
            if held + sum((entry.name, entry.waiter) not in own for entry in call.entries) > limit:
                raise session_full(limit)

    # -- without waiting

    async def _at_once(self, call: LockCall) -> list[LockEntry]:
        tries = self._begin_tries(call)
        held = ""
        won = False
        try:
            entries, _ = await self._put(call, waits=False)
            won = True
        except RequestError as error:
            if error.reason is not Reason.LOCK_HELD:
                raise
            held = error.metadata["name"]
            delay = self._contention.charged(call.session_id, resource(call, held))
            raise RequestError(
                error.reason, error.message, metadata=error.metadata, retry_after_ms=delay
            ) from error
        finally:
            for one in tries:
                self._contention.end(one, won=won or bool(held and one.resource.name != held))
        return entries

    def _begin_tries(self, call: LockCall) -> list[Try]:
        """Tries that may be made. Where several may own, one that seems to have room needs no place: those
        who come together do not get in each other's way."""
        tries: list[Try] = []
        for entry in call.entries:
            shared = entry.mode is not LockMode.EXCLUSIVE
            if shared and self._lines.line(call.namespace, entry.name).admits(entry):
                continue
            one = self._contention.begin(call.session_id, resource(call, entry.name))
            if isinstance(one, Throttled):
                for begun in tries:
                    self._contention.end(begun, won=True)
                raise throttled(entry.name, one)
            tries.append(one)
        return tries

    # -- putting entries

    async def _put(self, call: LockCall, *, waits: bool) -> tuple[list[LockEntry], bool]:
        """Put the entries, or find them: as they stand, and whether they own by that very commit or read."""
        seen = self._known(call)
        for number in range(_ROUNDS):
            own = own_of(call, seen)
            if own:
                found = await self._found(call, own, waits=waits)
                if found is not None:
                    return found
                seen = await self._read(call)
                continue
            refusal = self._refusal(call, seen, waits=waits)
            if refusal is not None:
                # Who is refused is refused by the store, but a full line is not read again and again.
                if seen.stored or refusal.reason is Reason.TOO_MANY_REQUESTS:
                    raise refusal
                seen = await self._read(call)
                continue
            free = all(seen.lines[entry.name].admits(entry) for entry in call.entries)
            at_once = free and number < _FREE_ROUNDS
            await failpoints.reached("lock.before-commit")
            commit = await self._commit(call, seen.revision if at_once else None)
            await failpoints.reached("lock.after-commit")
            if commit.won:
                entries = put_at(call.entries, commit.revision)
                self._lines.put(call.namespace, entries, complete=at_once)
                return (
                    (entries, at_once) if at_once or waits else await self._judged(call, entries, waits=False)
                )
            if commit.session_gone:
                raise session_not_found(call.session_id)
            seen = await self._read(call)
        raise RequestError(Reason.TOO_MANY_REQUESTS, "the lock changes hands too fast", retry_after_ms=100)

    def _known(self, call: LockCall) -> LinesSeen:
        """What the watch has told. Nothing known of any of them: they are compared to have no entry."""
        lines = {entry.name: self._lines.line(call.namespace, entry.name) for entry in call.entries}
        if not any(line.owners or line.misfits for line in lines.values()):
            return LinesSeen(lines, 0, stored=False)
        revision = min(self._lines.compared_to(call.namespace, name) for name in lines)
        return LinesSeen(lines, revision, stored=False)

    async def _read(self, call: LockCall) -> LinesSeen:
        names = [entry.name for entry in call.entries]
        try:
            read = await self._store.read(call.namespace, names, deadline=call.deadline)
        except StorageError as error:
            raise refused(error) from error
        return self._seen(call, read.entries, read.revision)

    def _seen(self, call: LockCall, entries: Mapping[str, Sequence[LockEntry]], revision: int) -> LinesSeen:
        for name, standing in entries.items():
            self._lines.looked(call.namespace, name, standing, revision)
        return LinesSeen({name: line_of(one) for name, one in entries.items()}, revision, stored=True)

    def _refusal(self, call: LockCall, seen: LinesSeen, *, waits: bool) -> RequestError | None:
        for entry in call.entries:
            line = seen.lines[entry.name]
            other = line.disagrees(entry)
            if other is not None:
                return permits_mismatch(entry, other)
            if waits and len(line.waiters) >= MAX_WAITERS:
                return line_full(entry.name)
            if not waits and not line.admits(entry):
                return self._held(entry.name, line)
        return None

    async def _commit(self, call: LockCall, after: int | None) -> LockCommit:
        commit_by = min(call.deadline, self._clock.monotonic() + self._config.commit_timeout)

        def orphaned(pending: Awaitable[LockCommit]) -> None:
            # The caller is gone, the commit is not: what it puts is taken out again.
            self._cleanup.later(call.namespace, put_by(pending, call.entries))

        try:
            return await self._store.acquire(
                call.namespace, call.entries, after=after, deadline=commit_by, orphaned=orphaned
            )
        except StorageError as error:
            raise refused(error) from error

    # -- entries of an earlier try

    async def _found(
        self, call: LockCall, own: Sequence[LockEntry], *, waits: bool
    ) -> tuple[list[LockEntry], bool] | None:
        """Go on with the entries of an earlier try of this call; None: look again."""
        if any(entry.nonce != call.nonce for entry in own):
            raise RequestError(
                Reason.REQUEST_ID_REUSED,
                "this request_id asked for other locks before",
                metadata={"session_id": call.session_id},
            )
        repeats = call.entries[0].repeats
        if any(entry.repeats >= repeats for entry in own):
            # This call is the repeat's elder, still under way, or its twin, sent twice with one number: it
            # may answer, and takes nothing out, for the other one's caller may hold it already.
            return await self._judged(call, [replace(entry, version=0) for entry in own], waits=waits)
        if len(own) < len(call.entries):
            # One of them was revoked: the others are worth nothing to a call that wants all.
            await self._cleanup.remove(call.namespace, own, seconds=self._config.leave_timeout)
            return None
        adopted = await self._adopt(call, own)
        return await self._judged(call, adopted, waits=waits) if adopted is not None else None

    async def _judged(
        self, call: LockCall, entries: list[LockEntry], *, waits: bool
    ) -> tuple[list[LockEntry], bool]:
        """Whether entries that stand own, by a read; those that may not wait leave if they do not."""
        try:
            seen = await self._read(call)
        except BaseException:
            self._cleanup.later(call.namespace, entries)
            raise
        behind = [
            entry.name
            for entry in entries
            if all(owner.revision != entry.revision for owner in seen.lines[entry.name].owners)
        ]
        if waits or not behind:
            return entries, not behind
        await self._cleanup.remove(call.namespace, entries, seconds=self._config.leave_timeout)
        raise self._held(behind[0], seen.lines[behind[0]])

    async def _adopt(self, call: LockCall, own: Sequence[LockEntry]) -> list[LockEntry] | None:
        commit_by = min(call.deadline, self._clock.monotonic() + self._config.commit_timeout)
        own = [replace(entry, repeats=call.entries[0].repeats) for entry in own]
        pending = asyncio.ensure_future(self._store.adopt(call.namespace, own, deadline=commit_by))
        try:
            version = await asyncio.shield(pending)
        except asyncio.CancelledError:
            self._cleanup.later(call.namespace, adopted_by(pending, own))
            raise
        except StorageError as error:
            raise refused(error) from error
        return [replace(entry, version=version) for entry in own] if version else None

    async def _secured(self, call: LockCall, entries: Sequence[LockEntry]) -> list[LockEntry]:
        """Owned by what a twin has put: taken over before it is answered, for the twin may just be giving up.

        A caller that goes away meanwhile takes nothing out: the twin's may have its answer.
        """
        for _ in range(_ROUNDS):
            own = own_of(call, await self._read(call))
            if [one.revision for one in own] != [one.revision for one in entries]:
                raise taken_out()
            if own[0].repeats > entries[0].repeats:
                return list(entries)  # a later send has it, and is the one whose answer counts
            commit_by = min(call.deadline, self._clock.monotonic() + self._config.commit_timeout)
            try:
                if await self._store.adopt(call.namespace, own, deadline=commit_by):
                    return list(entries)
            except StorageError as error:
                raise refused(error) from error
        raise taken_out()

    # -- waiting

    async def _in_line(self, call: LockCall, entries: list[LockEntry], until: float) -> list[LockEntry]:
        place = self._lines.join(call.namespace, entries)
        try:
            await failpoints.reached("lock.in-line")
            for _ in range(_WAKES):
                place.moved.clear()
                standings = [self._lines.standing(call.namespace, entry) for entry in entries]
                if all(one is Standing.OWNS for one in standings):
                    return entries
                refusal = await self._turned_away(call, entries, standings)
                left = until - self._clock.monotonic()
                if refusal is None and left <= 0:
                    refusal = self._in_vain(call, entries, standings)
                if refusal is not None:
                    await self._leave(call, entries)
                    raise refusal
                if self._draining:
                    raise draining()
                await wait_event(self._clock, place.moved, left)
        except asyncio.CancelledError:
            self._cleanup.later(call.namespace, entries)
            raise
        finally:
            self._lines.leave(place)
        raise RequestError(Reason.TOO_MANY_REQUESTS, "the lock changes hands too fast", retry_after_ms=100)

    async def _turned_away(
        self, call: LockCall, entries: Sequence[LockEntry], standings: Sequence[Standing]
    ) -> RequestError | None:
        """Why the call can never own, if so."""
        for entry, standing in zip(entries, standings, strict=True):
            if standing is Standing.GONE:
                return await self._gone(call, entry)
            if standing is Standing.MISFIT:
                other = self._lines.line(call.namespace, entry.name).disagrees(entry)
                return permits_mismatch(entry, other)
            if standing is Standing.SURPLUS:
                return line_full(entry.name)
        return None

    async def _gone(self, call: LockCall, entry: LockEntry) -> RequestError:
        try:
            session = await self._sessions.read(call.namespace, call.session_id, deadline=call.deadline)
        except StorageError as error:
            return refused(error)
        except CodecError:
            session = None
        if session is None:
            return session_not_found(call.session_id)
        if not entry.version:
            return taken_out()
        return lock_lost(entry.name, self._token(entry), 0, "the place in the line was revoked")

    def _in_vain(
        self, call: LockCall, entries: Sequence[LockEntry], standings: Sequence[Standing]
    ) -> RequestError:
        """Its wait is over. It was no burden, so it is not charged."""
        name = next(
            entry.name
            for entry, standing in zip(entries, standings, strict=True)
            if standing is not Standing.OWNS
        )
        error = self._held(name, self._lines.line(call.namespace, name))
        delay = self._contention.next_delay_ms(call.session_id, resource(call, name))
        return RequestError(error.reason, error.message, metadata=error.metadata, retry_after_ms=delay)

    async def _leave(self, call: LockCall, entries: Sequence[LockEntry]) -> None:
        left = max(0.0, call.deadline - self._clock.monotonic())
        seconds = min(self._config.leave_timeout, left)
        await self._cleanup.remove(call.namespace, entries, seconds=seconds)

    def _held(self, name: str, line: Line) -> RequestError:
        return lock_held(name, line, self._token)

    def _token(self, entry: LockEntry) -> int:
        return make_token(self._present.epoch, entry.revision)
