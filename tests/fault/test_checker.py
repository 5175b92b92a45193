"""The judge itself: a sound history passes, and each planted violation is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from coordinator.core import commands as c
from coordinator.core.effects import Slot, effects
from coordinator.core.job import Claim, Job, JobState
from coordinator.core.machine import decide
from coordinator.etcd.codec import encode_claim, encode_session, encode_unique
from coordinator.etcd.job_codec import JobCodec
from coordinator.etcd.keys import KeySpace
from coordinator.ports import Session
from leasekeeper.internal.etcd.v1.kv_pb2 import KeyValue
from tests.fault.support.checker import judge
from tests.fault.support.history import History, Step
from tests.fault.support.sink import Effect, SinkReading, Start
from tests.unit.core.jobs import NOW, after, pending

KEYS = KeySpace().namespace("default")
ROOT = KEYS.all_claims().start.removesuffix(b"claim/")
SESSION, OTHER = "00000000000000aa", "00000000000000bb"


@dataclass(slots=True)
class Scribe:
    """Writes a history as etcd would, one call a revision; ``store`` is the present."""

    steps: list[Step] = field(default_factory=list)
    store: dict[bytes, KeyValue] = field(default_factory=dict)
    revision: int = 0
    job: Job | None = None
    claim: Claim | None = None

    def commit(self, puts: dict[bytes, tuple[bytes, int]], deletes: tuple[bytes, ...] = ()) -> None:
        """Put (value, lease) and delete in one revision."""
        self.revision += 1
        gone = tuple(key for key in deletes if self.store.pop(key, None) is not None)
        entries = []
        for key, (value, lease) in puts.items():
            before = self.store.get(key)
            entry = KeyValue(
                key=key,
                value=value,
                lease=lease,
                create_revision=before.create_revision if before else self.revision,
                mod_revision=self.revision,
                version=before.version + 1 if before else 1,
            )
            self.store[key] = entry
            entries.append(entry)
        self.steps.append(Step(revision=self.revision, puts=tuple(entries), deletes=gone))

    def open(self, session: str) -> None:
        """A session's witness."""
        record = Session(
            namespace="default",
            session_id=session,
            identity="",
            sdk="",
            labels={},
            opened_ms=NOW,
            ttl_ms=2000,
        )
        self.commit({KEYS.session(session): (encode_session(record), int(session, 16))})

    def move(self, after_: Job | None, claim: Claim | None = None) -> None:
        """The Txn of a transition, with ``claim`` for one that claims."""
        puts: dict[bytes, tuple[bytes, int]] = {}
        deletes = []
        for write in effects(self.job, after_):
            key = KEYS.where(write.where)
            if not write.put:
                deletes.append(key)
            elif write.where.slot is Slot.CLAIM:
                assert claim is not None
                puts[key] = (encode_claim(claim), int(claim.session, 16))
            elif write.where.slot is Slot.UNIQUE:
                puts[key] = (encode_unique(write.where.job_id), 0)
            else:
                assert after_ is not None
                puts[key] = (JobCodec().encode(after_), 0)
        self.commit(puts, tuple(deletes))
        self.job = after_
        self.claim = replace(claim, token=self.revision) if claim is not None else None

    def submit(self, unique: str = "") -> None:
        """A fresh job ``j``."""
        self.move(pending(unique_key=unique))

    def claimed(self, session: str = SESSION) -> int:
        """Claimed by ``session``; the token."""
        assert self.job is not None
        claim = Claim(session=session, attempt=self.job.attempt + 1, nonce=b"n", start_ms=NOW)
        self.move(after(decide(self.job, None, c.ClaimIt(claim=claim), NOW)), claim)
        return self.revision

    def end(self, command: c.Complete | c.Fail | c.Release) -> None:
        """The holder settles."""
        self.move(after(decide(self.job, self.claim, command, NOW)))

    def complete(self) -> None:
        """It completes."""
        assert self.claim is not None
        self.end(c.Complete(token=self.claim.token, digest=b"d"))

    def history(self) -> History:
        """All of it."""
        return History(namespace="default", root=ROOT, epoch=0, steps=tuple(self.steps))


def sound(unique: str = "") -> Scribe:
    """Released once, then completed."""
    scribe = Scribe()
    scribe.open(SESSION)
    scribe.open(OTHER)
    scribe.submit(unique)
    scribe.claimed()
    assert scribe.claim is not None
    scribe.end(c.Release(token=scribe.claim.token, digest=b"d"))
    scribe.claimed(OTHER)
    scribe.complete()
    return scribe


def reading(*effects_: Effect, starts: tuple[Start, ...] = ()) -> SinkReading:
    """A sink with these accepted effects."""
    rows: dict[str, int] = {}
    for effect in effects_:
        rows[effect.job] = max(effect.token, rows.get(effect.job, 0))
    return SinkReading(rows=rows, starts=starts, effects=effects_, notes=())


def effect(token: int, begin: float, end: float) -> Effect:
    """An effect of ``j`` that was taken."""
    return Effect(job="j", token=token, worker="w", t_start=begin, t_end=end, accepted=True)


def test_a_sound_history_passes() -> None:
    scribe = sound("u")

    found = judge(scribe.history(), reading(effect(scribe.steps[-2].revision, 0, 1)), submitted=["j"])

    assert found.violations == ()
    assert found.states == {"SUCCEEDED": 1}
    assert found.claims == 2
    assert found.outcomes == {"RELEASED": 1, "SUCCEEDED": 1}


def overwritten_claim(s: Scribe) -> None:
    claim = Claim(session=OTHER, attempt=s.job.attempt if s.job else 0, nonce=b"m", start_ms=NOW)
    s.commit({KEYS.claim("j"): (encode_claim(claim), int(OTHER, 16))})


def two_states_at_once(s: Scribe) -> None:
    assert s.job is not None
    job = replace(pending(), attempt=s.job.attempt, attempts=s.job.attempts[:-1])
    s.commit({KEYS.state("j"): (JobCodec().encode(job), 0)})


def session_ended(s: Scribe) -> None:
    s.commit({}, (KEYS.session(SESSION),))
    claim = Claim(session=SESSION, attempt=1, nonce=b"m", start_ms=NOW)
    s.commit({KEYS.claim("other"): (encode_claim(claim), int(SESSION, 16))})


def claim_gone(s: Scribe) -> None:
    s.commit({}, (KEYS.claim("j"),))


def queued_beside(s: Scribe) -> None:
    assert s.job is not None
    key = KEYS.ready("q", "t", s.job.rank, "j")
    s.commit({key: (JobCodec().encode(pending()), 0)})


def foreign_unique_key(s: Scribe) -> None:
    s.commit({KEYS.unique("q", "another"): (encode_unique("j"), 0)})


def without_its_unique_key(s: Scribe) -> None:
    s.commit({}, (KEYS.unique("q", "u"),))


def claim_without_job(s: Scribe) -> None:
    claim = Claim(session=SESSION, attempt=1, nonce=b"m", start_ms=NOW)
    s.commit({KEYS.claim("nobody"): (encode_claim(claim), int(SESSION, 16))})


def claim_on_a_foreign_lease(s: Scribe) -> None:
    claim = Claim(session=SESSION, attempt=1, nonce=b"m", start_ms=NOW)
    s.commit({KEYS.claim("nobody"): (encode_claim(claim), int(OTHER, 16))})


def unreadable(s: Scribe) -> None:
    s.commit({KEYS.state("broken"): (b"\xff", 0)})


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (overwritten_claim, "overwritten"),
        (overwritten_claim, "RUNNING for session"),
        (two_states_at_once, "PENDING beside a claim"),
        (session_ended, "which has ended"),
        (claim_gone, "RUNNING for ever"),
        (queued_beside, "RUNNING with"),
        (foreign_unique_key, "RUNNING with"),
        (without_its_unique_key, "owns 0 unique keys instead of 1"),
        (claim_without_job, "a claim without a job"),
        (claim_on_a_foreign_lease, "lies on lease"),
        (unreadable, "cannot be read"),
    ],
)
def test_the_judge_names_what_is_wrong_beside_a_running_job(
    plant: Callable[[Scribe], None], words: str
) -> None:
    scribe = Scribe()
    scribe.open(SESSION)
    scribe.open(OTHER)
    scribe.submit("u")
    scribe.claimed()
    assert judge(scribe.history()).violations == ()

    plant(scribe)

    assert any(words in line for line in judge(scribe.history()).violations)


def back_to_pending(s: Scribe) -> None:
    assert s.job is not None
    again = replace(s.job, state=JobState.PENDING, settle_ms=0)
    s.commit(
        {
            KEYS.state("j"): (JobCodec().encode(again), 0),
            KEYS.spec("j"): (b"", 0),
            KEYS.ready("q", "t", again.rank, "j"): (JobCodec().encode(again), 0),
        }
    )


def attempts_fall(s: Scribe) -> None:
    assert s.job is not None
    s.commit({KEYS.state("j"): (JobCodec().encode(replace(s.job, attempt=s.job.attempt - 1)), 0)})


def another_end(s: Scribe) -> None:
    assert s.job is not None
    *first, last = s.job.attempts
    changed = replace(s.job, attempts=(*first, replace(last, failure_type="Another")))
    s.commit({KEYS.state("j"): (JobCodec().encode(changed), 0)})


def token_of_nobody(s: Scribe) -> None:
    assert s.job is not None
    *first, last = s.job.attempts
    changed = replace(s.job, attempts=(*first, replace(last, token=last.token + 1)))
    s.commit({KEYS.state("j"): (JobCodec().encode(changed), 0)})


def key_left_behind(s: Scribe) -> None:
    s.commit({KEYS.unique("q", "u"): (encode_unique("j"), 0)})


def key_of_an_ended_job(s: Scribe) -> None:
    s.commit({KEYS.unique("q", "another"): (encode_unique("j"), 0)})


def retried_after_success(s: Scribe) -> None:
    assert s.job is not None
    s.move(replace(s.job, state=JobState.PENDING, settle_ms=0, end_reason="", retry_ms=NOW + 1))


def lost_without_trace(s: Scribe) -> None:
    s.commit({}, (KEYS.state("j"),))


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (back_to_pending, "left SUCCEEDED"),
        (attempts_fall, "attempt fell"),
        (another_end, "ended twice"),
        (token_of_nobody, "which nobody held"),
        (key_left_behind, "SUCCEEDED with"),
        (lost_without_trace, "submitted and nowhere"),
        (key_of_an_ended_job, "owns 1 unique keys instead of 0"),
        (retried_after_success, "left SUCCEEDED"),
    ],
)
def test_the_judge_names_what_is_wrong_after_the_end(plant: Callable[[Scribe], None], words: str) -> None:
    scribe = sound("u")

    plant(scribe)

    assert any(words in line for line in judge(scribe.history(), submitted=["j"]).violations)


def test_a_queued_copy_that_is_older_than_the_record_is_named() -> None:
    scribe = Scribe()
    scribe.submit()
    assert scribe.job is not None

    scribe.commit({KEYS.state("j"): (JobCodec().encode(scribe.job), 0)})

    assert any("as it was before" in line for line in judge(scribe.history()).violations)


def test_the_judge_names_what_the_sink_must_not_show() -> None:
    scribe = sound()
    first, second = (step.revision for step in scribe.steps if any(b"claim/" in e.key for e in step.puts))
    history = scribe.history()

    def violations(*effects_: Effect, starts: tuple[Start, ...] = ()) -> str:
        return "\n".join(judge(history, reading(*effects_, starts=starts)).violations)

    assert violations(effect(first, 0, 1), effect(second, 2, 3)) == ""
    assert "overlap" in violations(effect(first, 0, 2), effect(second, 1, 3))
    assert "a higher token" in violations(effect(second, 2, 3), effect(first, 0, 1))
    assert "the row says None" in violations()
    assert "the row says" in violations(effect(first, 0, 1))
    assert "not exactly one effect" in violations(effect(second, 0, 1), effect(second, 2, 3))
    begun = Start(job="j", token=second, worker="w", at=0.0)
    assert "ran 2 times" in violations(effect(second, 0, 1), starts=(begun, begun))
