"""Every transition of a job: one table, one function.

``TRANSITIONS`` maps (state, command) to the rule that computes the next record, the states that it may lead
to, and the guard under which the Txn may be committed. A pair that is not in the table changes nothing and is
refused; ``_refuse`` says how. docs/states.md is drawn from the table.

Two rules hold the whole together:

* A settlement acts only through the token. The token of the present claim settles; the token of a remembered
  attempt is answered as it was answered then, if the content is the same; every other token is CLAIM_LOST. It
  matters nowhere who calls.
* A guard compares what the decision was based on. A decision is void if the guard fails: read again, decide
  again.

``decide`` never sees etcd. What a transition writes besides the record follows from ``effects.effects(before,
after)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from coordinator.core import commands as c
from coordinator.core import rules
from coordinator.core.copying import quick
from coordinator.core.job import FAILED, TERMINAL, Attempt, AttemptOutcome, Claim, Job, JobState
from coordinator.errors import Reason

__all__ = ["TRANSITIONS", "Decision", "Guard", "Outcome", "Refusal", "Replay", "Row", "Unchanged", "decide"]


class Guard(Enum):
    """What the Txn of a decision compares (docs/keys.md)."""

    ABSENT = "state and unique key absent"
    READY = "ready and state as indexed, claim absent, session's witness on its lease"
    HELD = "claim created at the token, state as read"
    UNHELD = "claim absent, state as read"
    STATE = "state as read"
    REVIVE = "state as read, unique key absent"
    SEEN = "state and claim as read"


@quick
@dataclass(frozen=True, slots=True)
class Decision:
    """Commit ``job`` (None: delete it) under ``guard``."""

    job: Job | None
    guard: Guard
    big_result: bytes = b""


@dataclass(frozen=True, slots=True)
class Replay:
    """The same settlement was made before; answer as then, write nothing."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The command asks for what already is; write nothing."""

    job: Job


@dataclass(frozen=True, slots=True)
class Refusal:
    """The command is not allowed; write nothing."""

    reason: Reason
    message: str
    metadata: Mapping[str, str]


Outcome = Decision | Replay | Unchanged | Refusal

_S = JobState
# Looked up once: a member of an enum costs thirty times what a global costs.
_RUNNING: Final = JobState.RUNNING
_ABSENT: Final = Guard.ABSENT
_ALIVE: Final = frozenset({_S.SCHEDULED, _S.PENDING})


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    rule: Callable[[Job, Any, int], Job | None]
    targets: frozenset[JobState | None]
    guard: Guard


def _row(rule: Callable[[Job, Any, int], Job | None], guard: Guard, *targets: JobState | None) -> Row:
    return Row(rule, frozenset(targets), guard)


def _table() -> dict[tuple[JobState, type], Row]:
    table: dict[tuple[JobState, type], Row] = {
        (_S.PENDING, c.ClaimIt): _row(rules.claim, Guard.READY, _S.RUNNING),
        (_S.RUNNING, c.Complete): _row(rules.complete, Guard.HELD, _S.SUCCEEDED),
        (_S.RUNNING, c.Fail): _row(rules.fail, Guard.HELD, _S.SCHEDULED, _S.PENDING, _S.DEAD, _S.CANCELLED),
        (_S.RUNNING, c.Release): _row(
            rules.release, Guard.HELD, _S.SCHEDULED, _S.PENDING, _S.CANCELLED, _S.QUARANTINED
        ),
        (_S.RUNNING, c.Cancel): _row(rules.request_cancel, Guard.STATE, _S.RUNNING),
        (_S.RUNNING, c.Lose): _row(
            rules.lose, Guard.UNHELD, _S.SCHEDULED, _S.PENDING, _S.CANCELLED, _S.QUARANTINED
        ),
        (_S.RUNNING, c.TakeAway): _row(
            rules.take_away, Guard.HELD, _S.SCHEDULED, _S.DEAD, _S.CANCELLED, _S.QUARANTINED
        ),
        (_S.SCHEDULED, c.FallDue): _row(rules.fall_due, Guard.STATE, _S.PENDING, _S.DEAD),
        (_S.PENDING, c.FallDue): _row(rules.fall_due, Guard.STATE, _S.DEAD),
        (_S.RUNNING, c.Repair): _row(rules.repair, Guard.SEEN, _S.RUNNING),
    }
    for state in _ALIVE:
        table[state, c.Cancel] = _row(rules.cancel, Guard.STATE, _S.CANCELLED)
        table[state, c.Update] = _row(rules.update, Guard.STATE, _S.SCHEDULED, _S.PENDING)
        table[state, c.Repair] = _row(rules.repair, Guard.SEEN, state)
    for state in FAILED:
        table[state, c.Retry] = _row(rules.retry, Guard.REVIVE, _S.SCHEDULED, _S.PENDING)
    for state in TERMINAL:
        table[state, c.Delete] = _row(rules.delete, Guard.STATE, None)
    return table


TRANSITIONS: Final[Mapping[tuple[JobState, type], Row]] = MappingProxyType(_table())
"""Every transition of an existing job. Submission, the only one from nothing, stands in ``decide``."""

_SETTLEMENTS: Final = (c.Complete, c.Fail, c.Release, c.TakeAway)

_ENDS_AS: Final[Mapping[type, AttemptOutcome]] = MappingProxyType(
    {c.Complete: AttemptOutcome.SUCCEEDED, c.Fail: AttemptOutcome.FAILED, c.Release: AttemptOutcome.RELEASED}
)
"""How a worker's own settlement ends an attempt; an attempt that ended otherwise has nothing to replay."""


def decide(job: Job | None, claim: Claim | None, command: c.Command, now_ms: int) -> Outcome:
    """What becomes of ``command``.

    Args:
        job: the record as read, None if there is none.
        claim: the claim as read (its token on the wire scale), None if there is none.
        command: what is asked.
        now_ms: Unix milliseconds.
    """
    if isinstance(command, c.Submit):
        if job is None:
            return Decision(rules.submit(command, now_ms), _ABSENT)
        return _submit_again(job, command)
    if job is None:
        return Refusal(Reason.JOB_NOT_FOUND, "there is no such job", {})
    if isinstance(command, _SETTLEMENTS):
        refused = _check_token(job, claim, command)
        if refused is not None:
            return refused
    if isinstance(command, c.Lose) and claim is not None:
        return Unchanged(job)  # held: whoever reported the loss was wrong, or late
    row = TRANSITIONS.get((job.state, type(command)))
    if row is None:
        return _refuse(job, command)
    after = row.rule(job, command, now_ms)
    if after is job:
        return Unchanged(job)
    target = after.state if after is not None else None
    assert target in row.targets, f"{job.state.name} may not become {target} by {type(command).__name__}"
    big = (
        command.result if isinstance(command, c.Complete) and after is not None and not after.result else b""
    )
    return Decision(after, row.guard, big)


def _submit_again(job: Job, command: c.Submit) -> Outcome:
    if job.terms.digest == command.terms.digest:
        return Unchanged(job)
    if command.terms.request_digest and job.terms.request_digest == command.terms.request_digest:
        return Refusal(
            Reason.REQUEST_ID_REUSED, "this request_id came with other content before", {"job_id": job.job_id}
        )
    return Refusal(
        Reason.JOB_EXISTS,
        "a job with this id and other content exists",
        {"job_id": job.job_id, "state": job.state.name},
    )


def _check_token(
    job: Job, claim: Claim | None, command: c.Complete | c.Fail | c.Release | c.TakeAway
) -> Replay | Refusal | None:
    if job.state is _RUNNING and claim is not None and claim.token == command.token > 0:
        return None
    before = job.attempt_with(command.token)
    if (
        before is not None
        and not isinstance(command, c.TakeAway)
        and before.outcome is _ENDS_AS[type(command)]
        and before.digest == command.digest
    ):
        return Replay(before)
    current = claim.token if claim is not None else 0
    return Refusal(
        Reason.CLAIM_LOST,
        "the claim that this token stood for has ended",
        {
            "job_id": job.job_id,
            "held": str(command.token),
            "current": str(current),
            "state": job.state.name,
            "ended_as": before.outcome.name if before is not None else "",
        },
    )


def _refuse(job: Job, command: c.Command) -> Outcome:
    facts = {"job_id": job.job_id, "state": job.state.name}
    if isinstance(command, c.Cancel) and job.state is JobState.CANCELLED:
        return Unchanged(job)
    if isinstance(command, (c.Lose, c.FallDue, c.Repair)):
        return Unchanged(job)
    if isinstance(command, c.Retry) and (not job.terminal or rules.is_repeat(job, command)):
        return Unchanged(job)  # it waits or runs already, or has ended since
    if isinstance(command, (c.Cancel, c.Update, c.ClaimIt, c.Retry)) and job.terminal:
        return Refusal(Reason.JOB_TERMINAL, f"the job is {job.state.name}", facts)
    if isinstance(command, c.ClaimIt) and job.state is JobState.RUNNING:
        holder = job.current.session if job.current is not None else ""
        return Refusal(Reason.CLAIM_HELD, "the job is held", {**facts, "holder": holder})
    return Refusal(Reason.NOT_CLAIMABLE, f"not possible while the job is {job.state.name}", facts)
