"""Completions with follow-ups under lost replies, repeats and jobs that others make at the last moment.

The oracle knows no record's fields but state, id and content: it keeps what others were told to make, and
judges what stands in the store by the promise alone: all of a completion or nothing of it, each job once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from coordinator.core.commands import Complete
from coordinator.core.effects import Slot
from coordinator.core.invariants import check_job, check_keys
from coordinator.core.job import Job, JobState
from coordinator.core.machine import Guard
from coordinator.errors import Reason, RequestError
from coordinator.ports import JobStore, Operation
from coordinator.services import commits, follow_ups, settlement
from coordinator.services.api import NewJob, Settle, Settled
from coordinator.services.digests import job_digest
from tests.support import memory_etcd
from tests.support.builders import a_job, a_new_job, store_job
from tests.support.memory_etcd import Fault
from tests.unit.services.conftest import World

IDS = ("a", "b", "c")
KEYS = ("", "", "u", "v")


@dataclass(frozen=True)
class Wish:
    """A follow-up, or a job of somebody else."""

    job_id: str
    unique: str
    content: int

    def job(self) -> NewJob:
        return a_new_job(self.job_id, unique_key=self.unique, payload=b"%d" % self.content)


@dataclass(frozen=True)
class Plan:
    """``others`` exist before; ``late`` are made while the n-th commit is on its way."""

    parents: tuple[str, ...]
    wishes: tuple[tuple[Wish, ...], ...]
    others: tuple[Wish, ...]
    late: tuple[tuple[int, Wish], ...]
    faults: tuple[Fault | None, ...]
    remembered: bool


WISHES = st.builds(Wish, job_id=st.sampled_from(IDS), unique=st.sampled_from(KEYS), content=st.integers(0, 1))


def _distinct(wishes: list[Wish]) -> bool:
    keys = [wish.unique for wish in wishes if wish.unique]
    return len({wish.job_id for wish in wishes}) == len(wishes) and len(set(keys)) == len(keys)


FAMILY = st.lists(WISHES, min_size=1, max_size=3).filter(_distinct).map(tuple)
PLANS = st.builds(
    Plan,
    parents=st.lists(st.sampled_from(["", "u", "v"]), min_size=1, max_size=2)
    .filter(lambda keys: len(keys) < 2 or keys[0] != keys[1] or not keys[0])
    .map(tuple),
    wishes=st.tuples(FAMILY, FAMILY),
    others=st.lists(WISHES, max_size=2).filter(_distinct).map(tuple),
    late=st.lists(st.tuples(st.integers(0, 2), WISHES), max_size=2).map(tuple),
    faults=st.lists(st.sampled_from([None, *Fault]), max_size=4).map(tuple),
    remembered=st.booleans(),
)


class History:
    """One plan carried out, and what is held against it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World()
        self.foreign: dict[str, bytes] = {}

    def stored(self, job_id: str) -> Job | None:
        found = self.world.etcd.stored("default", job_id)
        return found.job if found is not None else None

    def revision(self, job_id: str) -> int:
        return self.world.stored(job_id).revision

    def _free(self, wish: Wish) -> bool:
        owned = any(
            where.unique_key == wish.unique for where, _ in self.world.etcd.of_slot(Slot.UNIQUE, "default")
        )
        return self.stored(wish.job_id) is None and not (wish.unique and owned)

    def _interfere(self) -> None:
        rounds = iter(range(1_000))

        def hook(operation: Operation) -> None:
            if operation.after is None or operation.after.state is not JobState.SUCCEEDED:
                return
            turn = next(rounds)
            for when, wish in self.plan.late:
                if when == turn and self._free(wish):
                    self._make(wish)

        self.world.etcd.interfere.append(hook)

    def _make(self, wish: Wish) -> None:
        """As another coordinator's commit: at once, whatever is queued here."""
        job = a_job(wish.job_id, unique_key=wish.unique, digest=job_digest(wish.job()))
        operation = Operation(guard=Guard.ABSENT, before=None, after=job, deadline=1e9)
        values = {Slot.STATE: job, Slot.READY: job, Slot.UNIQUE: job.job_id, Slot.SPEC: b""}
        self.world.etcd.write([(w.where, values[w.where.slot], None) for w in operation.writes])
        self.foreign[wish.job_id] = job.terms.digest

    async def run(self) -> None:
        world, plan = self.world, self.plan
        claims = []
        for number, unique in enumerate(plan.parents):
            claims.append(await world.running(f"p{number}", unique_key=unique))
        for wish in plan.others:
            if self._free(wish):
                job = a_job(wish.job_id, unique_key=wish.unique, digest=job_digest(wish.job()))
                await store_job(world.store, job)
                self.foreign[wish.job_id] = job.terms.digest
        if plan.remembered:
            for claim in claims:
                world.holders.remember(claim)
        self._interfere()
        world.etcd.faults.extend(plan.faults)
        items = [
            Settle(f"p{n}", Complete(token=claim.token, digest=b""), tuple(w.job() for w in plan.wishes[n]))
            for n, claim in enumerate(claims)
        ]
        told: dict[int, Settled] = {}
        for _ in range(6):
            answers = await world.settlement.settle("default", items, world.deadline)
            for n, answer in enumerate(answers):
                self.judge(n, answer)
                if isinstance(answer, Settled):
                    assert told.setdefault(n, answer) == answer, "a repeat answers as the first time"
                elif n in told:
                    raise AssertionError(f"acknowledged, then refused: {answer}")
            self.check()
        for n in range(len(claims)):
            parent = self.stored(f"p{n}")
            assert parent is not None
            assert (parent.state is JobState.SUCCEEDED) == (n in told), (
                "an end that its worker is never told of"
            )

    def judge(self, n: int, answer: Settled | RequestError) -> None:
        """Whether this answer may be given to the completion of parent ``n``."""
        parent = self.stored(f"p{n}")
        assert parent is not None
        if isinstance(answer, Settled):
            assert parent.state is JobState.SUCCEEDED
            return
        assert answer.reason is not Reason.CLAIM_LOST, "nobody else held it"
        if answer.reason in (Reason.JOB_EXISTS, Reason.DUPLICATE_JOB):
            assert parent.state is JobState.RUNNING, "refused, so nothing was done"
            wish = self.plan.wishes[n][int(answer.metadata["follow_up"])]
            digest = job_digest(wish.job())
            there = self.stored(wish.job_id)
            if answer.reason is Reason.JOB_EXISTS:
                assert there is not None
                assert there.terms.digest != digest
            else:
                owner = self.stored(answer.metadata["job_id"])
                assert owner is not None
                assert owner.terms.unique_key == wish.unique

    def check(self) -> None:
        """What must hold of the store between any two calls."""
        made: dict[str, set[int]] = {}
        owners: dict[str, str] = {}
        for where, entry in self.world.etcd.of_slot(Slot.STATE, "default"):
            job = entry.value
            assert [] == check_job(job, self.world.etcd.claim("default", where.job_id))
            if where.job_id not in self.foreign:
                assert [] == check_keys(job, self.world.etcd.keys_of("default", where.job_id))
            if job.terms.unique_key and not job.terminal:
                assert owners.setdefault(job.terms.unique_key, where.job_id) == where.job_id, "two owners"
            if where.job_id in IDS:
                made[where.job_id] = set()
        ended = [n for n in range(len(self.plan.parents)) if self._ended(n)]
        for n in ended:
            for wish in self.plan.wishes[n]:
                there = self.stored(wish.job_id)
                assert there is not None, "completed, and a follow-up is not there"
                assert there.terms.digest == job_digest(wish.job()), "completed over another job of that id"
                made[wish.job_id].add(self.revision(f"p{n}"))
        for job_id, revisions in made.items():
            if job_id in self.foreign:
                assert self.stored(job_id).terms.digest == self.foreign[job_id], "written over"  # type: ignore[union-attr]
            else:
                assert self.revision(job_id) in revisions, "it stands without the completion that made it"

    def _ended(self, n: int) -> bool:
        job = self.stored(f"p{n}")
        return job is not None and job.state is JobState.SUCCEEDED


def carry_out(*phases: Phase) -> None:
    @settings(max_examples=250, deadline=None, derandomize=True, database=None, phases=phases or tuple(Phase))
    @given(PLANS)
    def run(plan: Plan) -> None:
        asyncio.run(History(plan).run())

    run()


def test_a_completion_and_its_follow_ups_are_one() -> None:
    carry_out()


def _unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = commits.operation_of

    def wrong(*args: object, **kwargs: object) -> Operation:
        operation = made(*args, **kwargs)  # type: ignore[arg-type]
        operation.guards_also = False
        return operation

    monkeypatch.setattr(settlement, "operation_of", wrong)


def _without_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    right = memory_etcd._lanes

    def wrong(operation: Operation) -> object:
        alone = Operation(
            guard=operation.guard,
            before=operation.before,
            after=operation.after,
            deadline=operation.deadline,
            token=operation.token,
            claim=operation.claim,
        )
        return right(alone)

    monkeypatch.setattr(memory_etcd, "_lanes", wrong)


def _one_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = follow_ups.FollowUps.operations

    def wrong(self: follow_ups.FollowUps, *args: object) -> object:
        made = right(self, *args)  # type: ignore[arg-type]
        return made[:1] if isinstance(made, tuple) else made

    monkeypatch.setattr(follow_ups.FollowUps, "operations", wrong)


def _committed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    right = commits.commit_each

    async def wrong(store: JobStore, operations: Sequence[Operation]) -> object:
        await right(store, [child for operation in operations for child in operation.also])
        for operation in operations:
            operation.also, operation.guards_also = (), False
        return await right(store, operations)

    monkeypatch.setattr(settlement, "commit_each", wrong)


@pytest.mark.parametrize(
    "bug",
    [_unguarded, _without_lanes, _one_left_out, _committed_apart],
    ids=lambda bug: bug.__name__.strip("_"),
)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, ExceptionGroup)):
        carry_out(Phase.generate)  # that it is found is enough
