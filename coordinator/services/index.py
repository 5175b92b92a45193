"""The coordinator's picture of what waits and who holds what. It only proposes; the Txn decides.

It hears of every change twice: of own commits at once and per Txn (``applied``), of all commits by the watch
(``Changes``). Both meet here by revision:

* an own effect is dropped if the watch has already passed its revision: the watch brought it, or something
later;
* the watch's echo of an own revision is skipped before it comes here (the feed knows own revisions);
* a change of the watch that is older than what is known of its key is dropped.

A periodic comparison with ranges proves it, because a lost entry raises no error anywhere: the job just
waits.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coordinator.core.effects import Slot
from coordinator.core.job import Claim, JobState
from coordinator.core.rank import Rank
from coordinator.errors import LeasekeeperError
from coordinator.ports import Clock, Commit, JobStore, Operation, Session, SessionStore, Spec, Stored
from coordinator.services.holders import Holders
from coordinator.services.waiters import Pair
from coordinator.services.window import Entry, Window

__all__ = ["Index", "IndexConfig"]

# Looked up once: a member of an enum costs thirty times what a global costs.
_READY: Final = Slot.READY
_RUNNING: Final = JobState.RUNNING
_KINDS: Final = ("ready", "claim", "session", "cancel")
_END: Final = Rank(10**14 - 1, 10**14 - 1)
"""Behind every rank: as much as a key has room for."""
_NEWEST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Sizes and times of the index. Spans are seconds, sizes bytes.

    A refill asks for ``window_capacity`` jobs. A window keeps as many, and more while there are few windows:
    all of them together ``spare_places``, each at most ``largest_window``. What is kept was stored or seen
    here; a job that is dropped costs a second read of its record and of its payload.
    """

    window_capacity: int = 2_000
    largest_window: int = 10_000
    spare_places: int = 40_000
    kept_spec_bytes: int = 64 * 1024 * 1024
    kept_spec_limit: int = 16 * 1024
    call_timeout: float = 5.0
    compare_interval: float = 30.0
    retry_delay: float = 0.5


class Index:
    """Implements ``ports.Changes`` and ``ports.CommitObserver``.

    Args:
        jobs: the store, for lists and refills.
        sessions: the store of sessions, for lists.
        holders: what is known of claims.
        arrived: called with (pair, job id) for each job that begins to wait and is in a window.
        cancelled: called with (namespace, job id) where the watch sees that a running job is asked to stop.
    """

    def __init__(
        self,
        jobs: JobStore,
        sessions: SessionStore,
        holders: Holders,
        clock: Clock,
        config: IndexConfig,
        *,
        arrived: Callable[[Pair, str], None],
        cancelled: Callable[[str, str], None] = lambda namespace, job_id: None,
    ) -> None:
        self._jobs = jobs
        self._session_store = sessions
        self._holders = holders
        self._clock = clock
        self._config = config
        self._arrived = arrived
        self._cancelled = cancelled
        self._windows: dict[Pair, Window] = {}
        self._passed: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._own_deletes: dict[tuple[str, Rank, str], int] = {}
        self._listed: set[str] = set()
        self._fresh: dict[str, bool] = {}
        self._spec_bytes = 0
        self._counted_at = float("-inf")
        self._hungry: set[Pair] = set()
        self._wake = asyncio.Event()
        self._doubted: set[tuple[Pair, str, int]] = set()
        self.repaired = 0

    # -- asked by dispatch

    def window(self, pair: Pair) -> Window | None:
        """The window of a (namespace, queue, type), if it ever had a job."""
        return self._windows.get(pair)

    def windows(self) -> dict[Pair, Window]:
        """All windows."""
        return dict(self._windows)

    def hungry(self, pair: Pair) -> bool:
        """Somebody found nothing here; answers whether a refill may bring something."""
        window = self._windows.get(pair)
        if window is None or not window.wants_refill:
            return False
        self._hungry.add(pair)
        self._wake.set()
        return True

    def ready(self, namespace: str) -> bool:
        """Whether the namespace is listed and its watch is alive."""
        return namespace in self._listed and self._fresh.get(namespace, False)

    # -- CommitObserver

    def applied(self, operation: Operation, commit: Commit) -> None:
        """Take in an own commit."""
        before, after, revision = operation.before, commit.stored, commit.revision
        if before is not None and before.job.state is _RUNNING:
            self._own_end(operation, commit)
            if operation.usual is not None:
                return  # the end of a job moves no line
        elif operation.claim is not None and after is not None:
            claim = commit.claim
            if claim is not None and self._passed[after.job.namespace, "claim"] < revision:
                self._holders.claimed(after.job.namespace, after.job.job_id, claim, after)
            elif claim is not None:
                # The watch brought the claim first, without its record; and perhaps its end as well.
                self._holders.recorded(after.job.namespace, after.job.job_id, claim, after)
        if operation.usual is not None and after is not None:
            job = after.job
            terms = job.terms
            pair = (job.namespace, terms.queue, terms.type)
            if self._passed[job.namespace, "ready"] >= revision:
                return
            if before is None:
                self._ready(pair, after, created=True, spec=operation.spec)
            else:
                self._left(pair, before.job.rank, job.job_id, revision)
            return
        for write in operation.writes:
            where = write.where
            if where.slot is not _READY:
                continue
            pair = (where.namespace, where.queue, where.type)
            if self._passed[where.namespace, "ready"] >= revision:
                continue
            if write.put:
                assert after is not None
                same_key = (
                    before is not None
                    and before.job.state is JobState.PENDING
                    and before.job.rank == where.rank
                )
                self._ready(pair, after, created=not same_key, spec=operation.spec)
            else:
                self._left(pair, where.rank, where.job_id, revision)

    def _left(self, pair: Pair, rank: Rank, job_id: str, revision: int) -> None:
        """An own commit has taken a job out of its line."""
        self._own_deletes[pair[1] + "/" + pair[2], rank, job_id] = revision
        self._window(pair).delete(rank, job_id, revision)

    def _own_end(self, operation: Operation, commit: Commit) -> None:
        before, after = operation.before, commit.stored
        assert before is not None
        job = before.job
        if after is not None and after.job.state is _RUNNING:
            self._holders.rewritten(job.namespace, job.job_id, after)
        elif operation.token:
            self._holders.ended(job.namespace, job.job_id, operation.token)

    # -- Changes

    async def relist(self, namespace: str, revision: int) -> None:
        """List types, first stretches, claims and sessions of a namespace."""
        self._listed.discard(namespace)
        if any(self._passed[namespace, kind] > revision for kind in _KINDS):
            # A list shows all that a watch has told before it, so the store was set back. What was known of
            # the history that is gone would hide the restored one, whose revisions are lower.
            for kind in _KINDS:
                self._passed[namespace, kind] = revision
            self._own_deletes.clear()
            self._doubted.clear()
        deadline = self._deadline()
        pairs = [(namespace, q, t) for q, t in await self._jobs.list_types(namespace, deadline=deadline)]
        for pair in pairs:
            window = self._windows.get(pair)
            if window is None:
                window = self._new_window(pair, complete=False)
            else:
                window.reset(complete=False)
            await self._count(pair, window)
        claims = await self._jobs.list_claims(namespace, deadline=self._deadline())
        sessions = await self._session_store.list_sessions(namespace, deadline=self._deadline())
        self._holders.reset(namespace, claims, sessions)
        for kind in _KINDS:
            self._passed[namespace, kind] = max(self._passed[namespace, kind], revision)
        for pair in pairs:
            await self._fill(pair)
        self._listed.add(namespace)

    def ready_put(self, namespace: str, stored: Stored, *, created: bool) -> None:
        """A job waits."""
        terms = stored.job.terms
        pair = (namespace, terms.queue, terms.type)
        if not self._deleted_here(stored):
            self._ready(pair, stored, created=created, spec=None)
        elif created:
            self._window(pair).line.changed(1, stored.revision)  # its end was counted before its beginning

    def _deleted_here(self, stored: Stored) -> bool:
        """Whether an own commit has taken the job out of its line since ``stored``."""
        terms = stored.job.terms
        key = (terms.queue + "/" + terms.type, stored.job.rank, stored.job.job_id)
        return self._own_deletes.get(key, 0) >= stored.revision

    def ready_deleted(
        self, namespace: str, queue: str, type_: str, rank: Rank, job_id: str, revision: int
    ) -> None:
        """It waits no more."""
        self._window((namespace, queue, type_)).delete(rank, job_id, revision)

    def claim_put(self, namespace: str, job_id: str, claim: Claim, revision: int) -> None:
        """A claim stands."""
        self._holders.claimed(namespace, job_id, claim, None)

    def claim_deleted(self, namespace: str, job_id: str, revision: int) -> None:
        """A claim has ended."""
        self._holders.claim_deleted(namespace, job_id, revision)

    def session_put(self, session: Session, revision: int) -> None:
        """A session is open."""
        self._holders.session_seen(session)

    def session_deleted(self, namespace: str, session_id: str, revision: int) -> None:
        """A session has ended."""
        self._holders.session_deleted(namespace, session_id, revision)

    def cancel_put(self, namespace: str, job_id: str, revision: int) -> None:
        """A running job is asked to stop."""
        self._holders.forget(namespace, job_id)
        self._cancelled(namespace, job_id)

    def passed(self, namespace: str, kind: str, revision: int) -> None:
        """The watch of ``kind`` has come to ``revision``."""
        key = (namespace, kind)
        if revision > self._passed[key]:
            self._passed[key] = revision
        if kind == "ready" and len(self._own_deletes) > 4_096:
            self._own_deletes = {k: r for k, r in self._own_deletes.items() if r > revision}

    def freshness(self, namespace: str, fresh: bool) -> None:
        """Whether the watch is alive."""
        self._fresh[namespace] = fresh

    # -- background

    async def run(self) -> None:
        """Refill hungry windows, and compare with the store from time to time, until cancelled."""
        next_compare = self._clock.monotonic() + self._config.compare_interval
        while True:
            try:
                # Not wait_for: before Python 3.12 it loses a cancellation that comes with the event.
                async with asyncio.timeout(1.0):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self.refill_once()
            if self._clock.monotonic() >= next_compare:
                await self.compare_once()
                next_compare = self._clock.monotonic() + self._config.compare_interval

    async def refill_once(self) -> int:
        """Refill every window that somebody found empty, or that is half empty; answers how many jobs came
        in."""
        wanted = self._hungry | {pair for pair, window in self._windows.items() if window.wants_refill}
        self._hungry = set()
        found = 0
        for pair in wanted:
            if pair[0] not in self._listed:
                continue
            try:
                found += await self._fill(pair)
            except LeasekeeperError:
                self._hungry.add(pair)
                await self._clock.sleep(self._config.retry_delay)
        return found

    async def compare_once(self) -> int:
        """Compare each window with its stretch of the store; put right what differs, and answer how much
        did.

        A job that is newer than all that the watch told may be on its way; if it still is at the next
        comparison, its event was lost.
        """
        differences = 0
        doubted, self._doubted = self._doubted, set()
        await self._know_all_types()
        for pair, window in self.windows().items():
            if pair[0] not in self._listed:
                continue
            # A complete window holds all that waits, so that a range to the end is no longer than it is.
            until = window.horizon or _END
            last = window.last_rank
            end = max(until, last) if last is not None else until
            # As of before the list: what comes while it is made stands in the window and not in the list.
            settled = self._passed[pair[0], "ready"] - 1
            try:
                page = await self._jobs.list_ready(
                    *pair,
                    after=None,
                    until=end,
                    limit=max(self._config.window_capacity, window.capacity) * 2,
                    deadline=self._deadline(),
                )
            except LeasekeeperError:
                continue
            if not page.complete:
                continue
            missing, ghosts = window.compare(page.jobs, settled, end)
            unheard, _ = window.compare(page.jobs, _NEWEST, end)
            doubts = {(pair, one.job.job_id, one.revision): one for one in unheard if one.revision > settled}
            missing += [one for doubt, one in doubts.items() if doubt in doubted]
            self._doubted |= doubts.keys() - doubted
            before = differences
            for stored in missing:
                if self._deleted_here(stored):
                    continue  # claimed here since
                if window.horizon is None or stored.job.rank <= window.horizon:
                    self._ready(pair, stored, created=False, spec=None)
                    differences += 1
            for entry in ghosts:
                window.discard(entry.stored.job.rank, entry.stored.job.job_id, entry.stored.revision)
                differences += 1
            if differences > before:
                await self._try_to_count(pair, window)
        self.repaired += differences
        return differences

    async def _know_all_types(self) -> None:
        """The first job of a type makes its window; if that event was lost, nothing else would."""
        for namespace in tuple(self._listed):
            try:
                known = await self._jobs.list_types(namespace, deadline=self._deadline())
            except LeasekeeperError:
                continue
            for queue, type_ in known:
                pair = (namespace, queue, type_)
                if pair not in self._windows:
                    await self._try_to_count(pair, self._new_window(pair, complete=False))

    async def _count(self, pair: Pair, window: Window) -> None:
        window.line.begin()
        window.line.counted(*await self._jobs.count_ready(*pair, deadline=self._deadline()))

    async def _try_to_count(self, pair: Pair, window: Window) -> None:
        """Something was not told, so what was added up is wrong; it stays so if the store does not answer."""
        try:
            await self._count(pair, window)
        except LeasekeeperError:
            pass

    async def _fill(self, pair: Pair) -> int:
        """Ask stretch after stretch until half the places are taken or there is no more; at most 64
        stretches."""
        window, found = self._windows[pair], 0
        for _ in range(64):
            if not window.wants_refill:
                break
            now_ms = self._clock.now_ms()
            until = window.begin_refill(now_ms)
            try:
                page = await self._jobs.list_ready(
                    *pair,
                    after=window.horizon,
                    until=until,
                    limit=self._config.window_capacity,
                    deadline=self._deadline(),
                )
            except BaseException:
                window.abandon_refill()
                raise
            fresh = window.refill(page, until, now_ms, self._clock.monotonic())
            found += len(fresh)
            for stored in fresh:
                self._arrived(pair, stored.job.job_id)
        return found

    def _window(self, pair: Pair) -> Window:
        window = self._windows.get(pair)
        if window is None:
            # A type that was not there at the list has all its jobs reported by the watch.
            window = self._new_window(pair, complete=True)
        return window

    def _new_window(self, pair: Pair, *, complete: bool) -> Window:
        config = self._config
        stretch = config.window_capacity
        window = self._windows[pair] = Window(stretch, complete=complete, stretch=stretch)
        share = min(config.largest_window, config.spare_places // len(self._windows))
        if share >= stretch:
            for each in self._windows.values():
                each.capacity = share
        return window

    def _ready(self, pair: Pair, stored: Stored, *, created: bool, spec: Spec | None) -> None:
        if spec is not None and (
            len(spec.payload) > self._config.kept_spec_limit or not self._room_for(len(spec.payload))
        ):
            spec = None
        entry = Entry(stored, spec, self._clock.monotonic())
        if self._window(pair).put(entry, created=created):
            if spec is not None:
                self._spec_bytes += len(spec.payload)
            self._arrived(pair, stored.job.job_id)

    def _room_for(self, size: int) -> bool:
        """Whether a spec of ``size`` bytes may be kept.

        Kept bytes are added up here, and counted in the windows when the sum reaches the limit, at most once
        a second: an entry leaves a window in many ways, and none of them has to remember to subtract.
        """
        limit = self._config.kept_spec_bytes
        if self._spec_bytes + size > limit:
            now = self._clock.monotonic()
            if now - self._counted_at < 1.0:
                return False
            self._counted_at = now
            self._spec_bytes = sum(window.spec_bytes() for window in self._windows.values())
        return self._spec_bytes + size <= limit

    def _deadline(self) -> float:
        return self._clock.monotonic() + self._config.call_timeout
