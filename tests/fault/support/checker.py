"""The judge: replays what etcd held and what the sink took, and says in sentences what must not be.

It reads the two stores alone, never a counter or a log of ours. Oracles: O1 exclusivity, O2 conservation at
every revision and at the end, O3 history.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from coordinator.core.effects import Slot, Where, keys_of
from coordinator.core.invariants import check_history, check_job
from coordinator.core.job import TERMINAL, Attempt, AttemptOutcome, Claim, Job, JobState
from coordinator.errors import LeasekeeperError
from coordinator.etcd.codec import decode_claim, decode_unique
from coordinator.etcd.job_codec import JobCodec
from coordinator.etcd.key_parts import parse_text
from coordinator.etcd.keys import KeySpace
from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue
from tests.fault.support.history import History, Step
from tests.fault.support.sink import Effect, SinkReading

__all__ = ["Judgement", "judge"]

_MOST = 30
_OF_A_JOB = (b"job", b"state", b"ready", b"due", b"claim", b"cancel", b"checkpoint", b"result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What was found.

    Args:
        violations: sentences; empty if all is well.
        jobs: the last record of each job, deleted ones too.
        states: how many jobs ended in which state.
        claims: how many claims were ever made.
        outcomes: how many attempts ended how, over all records.
    """

    violations: tuple[str, ...]
    jobs: Mapping[str, Job]
    states: Counter[str]
    claims: int
    outcomes: Counter[str]

    def clean(self) -> Judgement:
        """Itself. Raises AssertionError with what was violated."""
        assert not self.violations, "\n".join(self.violations[:_MOST])
        return self


def judge(
    history: History,
    sink: SinkReading | None = None,
    *,
    submitted: Iterable[str] | None = None,
    by_hand: Iterable[str] = (),
    raw: Iterable[str] = (),
    quiet: bool = True,
) -> Judgement:
    """Replay and judge.

    Args:
        history: of one namespace.
        sink: what handlers wrote, if they did.
        submitted: ids that must all be there at the end, in exactly one state.
        by_hand: jobs whose keys the test itself edited: their keys are judged at the end alone.
        raw: jobs that the test itself completed, without an effect in the sink.
        quiet: nothing is under way, so RUNNING needs its claim.
    """
    replay = _Replay(history, frozenset(by_hand))
    for step in history.steps:
        replay.apply(step)
    replay.finish(quiet=quiet)
    bad = replay.bad
    ended = {job_id: versions[-1] for job_id, versions in replay.versions.items()}
    if submitted is not None:
        bad += [f"{job_id}: submitted and nowhere" for job_id in submitted if job_id not in replay.jobs]
    if sink is not None:
        own = frozenset(raw)
        bad += _check_effects({job_id: job for job_id, job in ended.items() if job_id not in own}, sink)
    return Judgement(
        violations=tuple(bad),
        jobs=ended,
        states=Counter(job.state.name for job in replay.jobs.values()),
        claims=sum(len(tokens) for tokens in replay.tokens.values()),
        outcomes=Counter(
            attempt.outcome.name for attempts in replay.attempts.values() for attempt in attempts.values()
        ),
    )


@dataclass(slots=True)
class _Replay:
    """The namespace as of one revision after the other."""

    history: History
    by_hand: frozenset[str]
    bad: list[str] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    versions: dict[str, list[Job]] = field(default_factory=lambda: defaultdict(list))
    claims: dict[str, Claim] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    attempts: dict[str, dict[tuple[int, int], Attempt]] = field(default_factory=lambda: defaultdict(dict))
    held: dict[str, dict[bytes, KeyValue]] = field(default_factory=lambda: defaultdict(dict))
    uniques: dict[bytes, str] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    _codec: JobCodec = field(default_factory=JobCodec)

    def apply(self, step: Step) -> None:
        """One revision: change the picture, then judge every job that it touched."""
        touched: dict[str, bool] = {}
        for key in step.deletes:
            self._delete(key, touched)
        for entry in step.puts:
            self._put(entry, touched)
        for job_id in touched:
            claim = self.claims.get(job_id)
            job = self.jobs.get(job_id)
            if job is None:
                if claim is not None:
                    self._say(step, f"{job_id}: a claim without a job")
            else:
                self.bad += [f"revision {step.revision}: {line}" for line in check_job(job, claim)]
            if job_id not in self.by_hand:
                self._check_keys(step.revision, job_id)
                self._check_unique(step, job_id)

    def finish(self, *, quiet: bool) -> None:
        """Judge the end: what may be so for a moment only."""
        for job_id, job in self.jobs.items():
            self._check_keys(0, job_id)
            if quiet and job.state is JobState.RUNNING and job_id not in self.claims:
                self.bad.append(f"{job_id}: RUNNING for ever, its claim is gone")
        for job_id, versions in self.versions.items():
            for earlier, later in pairwise(versions):
                if earlier.terms.submit_ms == later.terms.submit_ms:
                    self.bad += check_history((earlier, later))
                    if _left_its_end(earlier, later):
                        self.bad.append(f"{job_id}: left {earlier.state.name} for {later.state.name}")
            tokens = self.tokens[job_id]
            if any(later <= earlier for earlier, later in pairwise(tokens)):
                self.bad.append(f"{job_id}: tokens did not grow: {tokens}")

    def _put(self, entry: KeyValue, touched: dict[str, bool]) -> None:
        kind, *parts = entry.key.removeprefix(self.history.root).split(b"/")
        if kind == b"session":
            self.sessions.add(parts[0].decode())
        elif kind == b"unique":
            job_id = decode_unique(entry.value)
            former = self.uniques.get(entry.key, job_id)
            if former != job_id:
                self.held[former].pop(entry.key, None)
                touched[former] = True
            self.uniques[entry.key] = job_id
            self.held[job_id][entry.key] = entry
            touched[job_id] = True
        elif kind in _OF_A_JOB:
            job_id = parse_text(parts[-1])
            self.held[job_id][entry.key] = entry
            touched[job_id] = True
            try:
                self._read(kind, job_id, entry)
            except LeasekeeperError as error:
                self.bad.append(f"revision {entry.mod_revision}: {entry.key!r} cannot be read: {error}")

    def _read(self, kind: bytes, job_id: str, entry: KeyValue) -> None:
        if kind == b"state":
            job = self._codec.decode(self.history.namespace, job_id, entry.value)
            self.jobs[job_id] = job
            self.versions[job_id].append(job)
            for attempt in job.attempts:
                if attempt.outcome is not AttemptOutcome.RUNNING:
                    self._settled(job_id, job, attempt)
        elif kind == b"claim":
            if entry.version != 1:
                self.bad.append(f"{job_id}: its claim was overwritten at revision {entry.mod_revision}")
            token = self.history.token(entry.create_revision)
            claim = decode_claim(entry.value, token)
            self.claims[job_id] = claim
            self.tokens[job_id].append(token)
            if claim.session not in self.sessions:
                # One that closes deletes its witness first, and then gives back what it still holds.
                self.bad.append(f"{job_id}: claimed by session {claim.session}, which has ended")
            if f"{entry.lease:016x}" != claim.session:
                self.bad.append(
                    f"{job_id}: the claim of session {claim.session} lies on lease {entry.lease:x}"
                )

    def _settled(self, job_id: str, job: Job, attempt: Attempt) -> None:
        key = (job.terms.submit_ms, attempt.number)
        known = self.attempts[job_id].setdefault(key, attempt)
        if attempt.token and attempt.token not in self.tokens[job_id]:
            self.bad.append(f"{job_id}: settled under token {attempt.token}, which nobody held")
        if known != attempt:
            self.bad.append(f"{job_id}: attempt {attempt.number} ended twice: {known} and {attempt}")

    def _delete(self, key: bytes, touched: dict[str, bool]) -> None:
        kind, *parts = key.removeprefix(self.history.root).split(b"/")
        if kind == b"session":
            self.sessions.discard(parts[0].decode())
        elif kind == b"unique":
            job_id = self.uniques.pop(key, "")
            self.held[job_id].pop(key, None)
            touched[job_id] = True
        elif kind in _OF_A_JOB:
            job_id = parse_text(parts[-1])
            self.held[job_id].pop(key, None)
            touched[job_id] = True
            if kind == b"state":
                self.jobs.pop(job_id, None)
            elif kind == b"claim":
                self.claims.pop(job_id, None)

    def _check_keys(self, revision: int, job_id: str) -> None:
        """Every key that the record wants is there, and no other; copies share the record's revision."""
        keys = KeySpace().namespace(self.history.namespace)
        job = self.jobs.get(job_id)
        held = self.held[job_id]
        free = {keys.checkpoint(job_id), keys.result(job_id)} if job is not None else set()
        wanted: dict[bytes, Where] = {}
        if job is not None:
            wanted = {keys.where(where): where for where in keys_of(job)}
            state = held[keys.state(job_id)]
            for key, where in wanted.items():
                if key not in held and where.slot is not Slot.CLAIM:
                    self.bad.append(f"revision {revision}: {job_id} {job.state.name} without {key!r}")
                elif where.slot is Slot.READY and held[key].mod_revision != state.mod_revision:
                    self.bad.append(f"revision {revision}: {job_id} lies in the queue as it was before")
        name = job.state.name if job is not None else "deleted"
        self.bad += [
            f"revision {revision}: {job_id} {name} with {key!r}"
            for key in held
            if key not in wanted and key not in free
        ]

    def _check_unique(self, step: Step, job_id: str) -> None:
        """A job that lives has its unique key, and no other has one; said without asking the core."""
        job = self.jobs.get(job_id)
        wanted = 1 if job is not None and job.terms.unique_key and job.state not in TERMINAL else 0
        if (owned := sum(owner == job_id for owner in self.uniques.values())) != wanted:
            name = job.state.name if job is not None else "deleted"
            self._say(step, f"{job_id}: {name} and owns {owned} unique keys instead of {wanted}")

    def _say(self, step: Step, sentence: str) -> None:
        self.bad.append(f"revision {step.revision}: {sentence}")


def _left_its_end(earlier: Job, later: Job) -> bool:
    """Whether a job that had ended lives on, and not by a retry by hand of one that failed."""
    retried = later.retry_ms > earlier.retry_ms and earlier.state not in (
        JobState.SUCCEEDED,
        JobState.CANCELLED,
    )
    return earlier.state in TERMINAL and later.state is not earlier.state and not retried


def _check_effects(jobs: Mapping[str, Job], sink: SinkReading) -> list[str]:
    bad: list[str] = []
    by_job: dict[str, list[Effect]] = defaultdict(list)
    for effect in sink.effects:
        if effect.accepted:
            by_job[effect.job].append(effect)
    for job_id, effects in by_job.items():
        bad += _check_accepted(job_id, effects)
    for job_id, job in jobs.items():
        if job.state is not JobState.SUCCEEDED:
            continue
        token = next((one.token for one in job.attempts if one.outcome is AttemptOutcome.SUCCEEDED), 0)
        if sink.rows.get(job_id) != token:
            bad.append(f"{job_id}: settled under {token}, the row says {sink.rows.get(job_id)}")
        if sum(effect.token == token for effect in by_job[job_id]) != 1:
            bad.append(f"{job_id}: not exactly one effect under the token that settled it")
    begun = Counter((start.job, start.token) for start in sink.starts)
    bad += [
        f"{job}: its handler ran {n} times under token {token}" for (job, token), n in begun.items() if n > 1
    ]
    return bad


def _check_accepted(job_id: str, effects: Sequence[Effect]) -> list[str]:
    bad = []
    if any(later.token < earlier.token for earlier, later in pairwise(effects)):
        bad.append(f"{job_id}: an effect was taken after one with a higher token")
    spans = sorted(effects, key=lambda effect: effect.t_start)
    for earlier, later in pairwise(spans):
        if later.t_start < earlier.t_end:
            bad.append(f"{job_id}: effects under {earlier.token} and {later.token} overlap")
    return bad
