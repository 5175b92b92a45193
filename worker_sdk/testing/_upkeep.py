"""What time alone does in the fake: jobs fall due, runs and sessions end, old records go."""

from __future__ import annotations

from typing import Final

from coordinator.core.commands import Delete, FallDue, Lose, TakeAway, Taken
from coordinator.core.job import RETAINED
from worker_sdk.testing._world import Place, Record, World

__all__ = ["CANCEL_GRACE_MS", "end_session", "lose", "next_ms", "step"]

CANCEL_GRACE_MS: Final = 30_000
_KEEP_DONE_MS: Final = 3_600_000
_KEEP_FAILED_MS: Final = 7 * 24 * 3_600_000
_AGAIN_MS: Final = 2_000
_MOST_AGAIN_MS: Final = 5_000


def next_ms(world: World) -> int | None:
    """When something is due next, Unix milliseconds; None: nothing is."""
    moments = [moment for record in world.records.values() if (moment := _due_ms(record))]
    moments += [session.beat_ms + session.ttl_ms for session in world.sessions.values()]
    return min(moments, default=None)


def _due_ms(record: Record) -> int:
    job = record.job
    if job.terminal:
        return job.settle_ms + (_KEEP_DONE_MS if job.state in RETAINED else _KEEP_FAILED_MS)
    if record.claim is None:
        return job.due_key_ms
    ends = []
    if record.claim.run_timeout_ms:
        ends.append(record.claim.start_ms + record.claim.run_timeout_ms)
    if record.asked_ms:
        ends.append(record.asked_ms + CANCEL_GRACE_MS)
    return min(ends, default=0)


def step(world: World) -> bool:
    """Do all that is due; says whether anything was."""
    ended = [place for place, one in world.sessions.items() if one.beat_ms + one.ttl_ms <= world.now_ms]
    for place in ended:
        end_session(world, place)
    due = [record for record in world.records.values() if 0 < _due_ms(record) <= world.now_ms]
    for record in due:
        _do(world, record)
    return bool(ended or due)


def _do(world: World, record: Record) -> None:
    claim = record.claim
    if record.job.terminal:
        world.act(record, Delete())
    elif claim is None:
        world.act(record, FallDue())
    else:
        session = world.sessions[record.job.namespace, claim.session]
        stop = bool(record.asked_ms) and record.asked_ms + CANCEL_GRACE_MS <= world.now_ms
        ran_ms = world.now_ms - claim.start_ms
        world.act(
            record,
            TakeAway(
                token=claim.token,
                why=Taken.CANCELLED if stop else Taken.TIMED_OUT,
                hold_ms=session.ttl_ms,
                reason=(
                    f"cancelled by force: its handler did not stop in {world.now_ms - record.asked_ms} ms"
                    if stop
                    else f"run timeout: it ran for {ran_ms} ms"
                ),
            ),
        )


def end_session(world: World, place: Place) -> None:
    """A session's lease ends: all that it holds is lost."""
    session = world.sessions.pop(place)
    for job_id in list(session.claims):
        lose(world, world.records[place[0], job_id])


def lose(world: World, record: Record) -> None:
    """A claim is gone without a settlement; what is lost again comes back later each time, up to 5 s."""
    claim, losses = record.claim, record.job.lease_losses
    assert claim is not None, "only a held job is lost"
    session = world.sessions.get((record.job.namespace, claim.session))
    if session is not None:
        session.claims.pop(record.job.job_id, None)
    record.claim = None
    delay_ms = min(_AGAIN_MS << min(losses - 1, 10), _MOST_AGAIN_MS) if losses else 0
    world.act(record, Lose(token=claim.token, delay_ms=delay_ms))
