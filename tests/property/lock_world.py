"""Random callers of two coordinators' locks, with lagging watches, ends of sessions and lost answers.

A judge hears all that they are told. One seed, one history.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace

from coordinator.core.lock_order import LockEntry, LockMode, session_waiter
from coordinator.errors import OutcomeUnknown, Reason, RequestError
from coordinator.services.digests import request_digest
from tests.support.clock import SteppingClock
from tests.support.lock_bench import LockCoordinator, settle
from tests.support.memory_locks import MemoryLocks, Watch

__all__ = ["LockWorld", "play"]

_NAMES = (("x",), ("y",), ("x", "y"), ("y", "x"))
_MODES = (
    (LockMode.EXCLUSIVE, 1),
    (LockMode.EXCLUSIVE, 1),
    (LockMode.SHARED, 1),
    (LockMode.SEMAPHORE, 2),
    (LockMode.SEMAPHORE, 3),
)
_SESSIONS = 5
_STEPS = 60


def owns(line: list[LockEntry], entry: LockEntry) -> bool:
    """The sentence of the design, read word by word: all earlier entries are alike, and leave a place."""
    earlier = [one for one in line if (one.revision, one.waiter) < (entry.revision, entry.waiter)]
    most = {LockMode.EXCLUSIVE: 1, LockMode.SHARED: 10**9, LockMode.SEMAPHORE: entry.permits}[entry.mode]
    alike = all((one.mode, one.permits) == (entry.mode, entry.permits) for one in earlier)
    return alike and len(earlier) < most


@dataclass(eq=False)
class Call:
    """One AcquireLock."""

    side: int
    session: str
    request: str
    names: tuple[str, ...]
    mode: LockMode
    permits: int
    wait_ms: int
    repeats: int = 0
    task: asyncio.Task[list[LockEntry]] | None = None

    @property
    def waiter(self) -> str:
        """The last part of its entries' keys."""
        return session_waiter(self.session, request_digest(self.request))


@dataclass
class LockWorld:
    """Two coordinators and their callers."""

    seed: int
    store: MemoryLocks = field(default_factory=MemoryLocks)
    clock: SteppingClock = field(default_factory=SteppingClock)
    calls: list[Call] = field(default_factory=list)
    owned: set[tuple[str, str, int]] = field(default_factory=set)
    given: set[tuple[str, int]] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.sides = [LockCoordinator(self.store, self.clock) for _ in range(2)]
        self.watches: list[Watch] = []

    # -- the judge

    def own_put(self, namespace: str, name: str, waiter: str, revision: int) -> LockEntry | None:
        """As of `lock_put`."""
        return None

    def lock_put(self, namespace: str, entry: LockEntry) -> None:
        """The judge hears every change at once."""

    def lock_deleted(self, namespace: str, name: str, waiter: str, revision: int) -> None:
        """As of `lock_put`."""

    async def relist(self, namespace: str, revision: int) -> None:
        """As of `lock_put`."""

    def locks_passed(self, namespace: str, revision: int) -> None:
        """Note who owns now; an owner that is still there stays one."""
        now = set()
        for name in ("x", "y"):
            line = self.store.line(name)
            now |= {(name, one.waiter, one.revision) for one in line if owns(line, one)}
        standing = {(one.name, one.waiter, one.revision) for one in self.store.entries.values()}
        displaced = (self.owned & standing) - now
        if displaced:
            self.faults.append(f"displaced: {displaced}")
        self.owned |= now

    def judge(self, call: Call) -> None:
        """What a call was told that is over."""
        assert call.task is not None
        if call.task.cancelled():
            return
        error = call.task.exception()
        if error is None:
            for entry in call.task.result():
                if (entry.name, entry.waiter, entry.revision) not in self.owned:
                    self.faults.append(f"told to own what it never owned: {entry}")
        elif not isinstance(error, RequestError):
            raise error
        elif error.reason is Reason.LOCK_LOST:
            # An older call of a request may find that a later one gave up, or has given back.
            same = [one for one in self.calls if one.waiter == call.waiter]
            if same[-1] is call and call.waiter not in {waiter for waiter, _ in self.given}:
                self.faults.append(f"lost, and nobody revokes here: {call}")
        elif error.reason is Reason.SESSION_NOT_FOUND and call.session in self.store.sessions:
            self.faults.append("told that an open session has ended")

    # -- the callers

    async def start(self) -> None:
        """Open sessions, listen."""
        self.store.sessions |= {f"{number:016x}" for number in range(1, _SESSIONS + 1)}
        await self.store.watch(self)
        self.watches = [await side.start() for side in self.sides]

    def take(self) -> None:
        """A new call."""
        mode, permits = self.random.choice(_MODES)
        call = Call(
            side=self.random.randrange(2),
            session=f"{self.random.randint(1, _SESSIONS):016x}",
            request=f"r{len(self.calls)}",
            names=self.random.choice(_NAMES),
            mode=mode,
            permits=permits,
            wait_ms=self.random.choice((0, 10_000_000, 10_000_000)),
        )
        self.begin(call)

    def begin(self, call: Call) -> None:
        """Send it."""
        call.task = asyncio.ensure_future(
            self.sides[call.side].take(
                *call.names,
                session=call.session,
                request=call.request,
                mode=call.mode,
                permits=call.permits,
                wait_ms=call.wait_ms,
                repeats=call.repeats,
            )
        )
        self.calls.append(call)

    def repeat(self) -> None:
        """A call whose channel broke is sent again, at once, to any coordinator."""
        under_way = self.under_way()
        if not under_way:
            return
        call = self.random.choice(under_way)
        same = [one.repeats for one in self.calls if one.waiter == call.waiter]
        twin = self.random.random() < 0.25  # nobody has counted, or the net has doubled it
        number = max(same) + (0 if twin else 1)
        again = replace(call, side=self.random.randrange(2), task=None, repeats=number)
        if self.random.random() < 0.5:
            assert call.task is not None
            call.task.cancel()
        self.begin(again)

    async def give(self, call: Call) -> None:
        """Give back what a call got; a repeat's locks are the first one's."""
        assert call.task is not None
        entries = call.task.result()
        self.given |= {(entry.waiter, entry.revision) for entry in entries}
        try:
            await self.sides[self.random.randrange(2)].give(*entries, repeat=True)
        except RequestError as error:
            if error.reason is not Reason.OUTCOME_UNKNOWN and call.session in self.store.sessions:
                raise

    def holding(self) -> list[Call]:
        """Calls that own and have not given back."""
        return [
            call
            for call in self.calls
            if call.task is not None
            and call.task.done()
            and not call.task.cancelled()
            and call.task.exception() is None
            and not {(one.waiter, one.revision) for one in call.task.result()} <= self.given
        ]

    def robbed(self) -> list[str]:
        """Holders whose session is open, and whose entries are gone all the same. Of a request that was sent
        again, only the last sends' answers count for the caller."""
        last = {call.waiter: 0 for call in self.calls}
        for call in self.calls:
            last[call.waiter] = max(last[call.waiter], call.repeats)
        standing = {(entry.name, entry.waiter, entry.revision) for entry in self.store.entries.values()}
        return [
            f"taken from its holder: {entry}"
            for call in self.holding()
            if call.repeats == last[call.waiter] and call.session in self.store.sessions
            for entry in (call.task.result() if call.task is not None else ())
            if (entry.waiter, entry.revision) not in self.given
            and (entry.name, entry.waiter, entry.revision) not in standing
        ]

    async def step(self) -> None:
        """Something happens."""
        self.faults += self.robbed()
        what = self.random.random()
        if what < 0.35:
            self.take()
        elif what < 0.6:
            holding = self.holding()
            if holding:
                await self.give(self.random.choice(holding))
        elif what < 0.66:
            self.repeat()
        elif what < 0.72:
            waiting = self.under_way()
            if waiting:
                task = self.random.choice(waiting).task
                assert task is not None
                task.cancel()
        elif what < 0.74:
            self.store.end(f"{self.random.randint(1, _SESSIONS):016x}")
        elif what < 0.82:
            self.random.choice(self.watches).held = True
        elif what < 0.92:
            self.random.choice(self.watches).deliver(self.random.randint(1, 3))
        elif what < 0.95:
            self.store.failures.append(OutcomeUnknown("lost"))
        else:
            watch = self.random.choice(self.watches)
            watch.pending.clear()
            await watch.listener.relist("default", self.store.revision)
        await settle(self.random.choice((0, 1, 3, 30)))

    async def finish(self) -> None:
        """Everybody who owns gives back until nobody waits; then nothing is left."""
        self.store.failures.clear()
        for watch in self.watches:
            watch.release()
        for _ in range(len(self.calls) * 2):
            await self.clock.advance(1.1)
            await settle()
            self._beats()
            for call in self.holding():
                await self.give(call)
        for call in self.calls:
            assert call.task is not None
            if not call.task.done():
                self.faults.append(f"waits for ever: {call}")
                call.task.cancel()
            else:
                self.judge(call)
        if self.store.entries:
            self.faults.append(f"left behind: {list(self.store.entries.values())}")

    def _beats(self) -> None:
        """What an unknown outcome has left, and no call asks for, the sessions' beats leave out."""
        wanted = {call.waiter for call in [*self.under_way(), *self.holding()]}
        for entry in list(self.store.entries.values()):
            if entry.waiter in self.store.unknown - wanted:
                self.store.remove(entry)

    def under_way(self) -> list[Call]:
        """Calls without an answer."""
        return [call for call in self.calls if call.task is not None and not call.task.done()]


async def play(seed: int) -> list[str]:
    """One history; what was wrong with it."""
    world = LockWorld(seed)
    await world.start()
    try:
        for _ in range(_STEPS):
            await world.step()
        await world.finish()
    finally:
        for side in world.sides:
            await side.stop()
    return world.faults
