"""Checkpoints on a real etcd: the holder's alone, the later sequence stays."""

from __future__ import annotations

import pytest

from coordinator.core import commands as c
from coordinator.core.job import Claim, Progress
from coordinator.errors import Reason, RequestError
from coordinator.ports import Checkpoint
from tests.integration.store.conftest import Harness


def checkpoint(sequence: int, *, attempt: int = 1, data: bytes = b"") -> Checkpoint:
    return Checkpoint(attempt=attempt, sequence=sequence, data=data or b"%d" % sequence, saved_ms=5)


async def save(harness: Harness, token: int, what: Checkpoint) -> bool:
    return await harness.store.jobs.save_checkpoint(
        harness.namespace, "j1", token, what, deadline=harness.deadline()
    )


async def lying(harness: Harness) -> Checkpoint | None:
    found = await harness.store.jobs.read(
        harness.namespace, "j1", deadline=harness.deadline(), checkpoint=True
    )
    return found.checkpoint


async def test_the_later_sequence_stays(harness: Harness) -> None:
    _, token = await harness.claimed("j1")
    assert await save(harness, token, checkpoint(2))
    assert await save(harness, token, checkpoint(3))
    assert not await save(harness, token, checkpoint(1))
    assert await save(harness, token, checkpoint(3))
    found = await lying(harness)
    assert found is not None
    assert (found.sequence, found.data) == (3, b"3")


async def test_progress_travels_with_it(harness: Harness) -> None:
    _, token = await harness.claimed("j1")
    what = Checkpoint(attempt=1, sequence=1, data=b"x", progress=Progress(ratio=0.5, note="half"), saved_ms=5)
    assert await save(harness, token, what)
    found = await lying(harness)
    assert found is not None
    assert found.progress == Progress(ratio=0.5, note="half")
    assert found.revision


async def test_only_the_present_holder_saves(harness: Harness) -> None:
    stored, token = await harness.claimed("j1")
    with pytest.raises(RequestError) as stale:
        await save(harness, token - 1, checkpoint(1))
    assert stale.value.reason is Reason.CLAIM_LOST
    assert stale.value.metadata["current"] == str(token)
    assert await lying(harness) is None
    assert (await harness.complete(stored, token)).won
    with pytest.raises(RequestError) as late:
        await save(harness, token, checkpoint(1))
    assert late.value.reason is Reason.CLAIM_LOST
    assert late.value.metadata["state"] == "SUCCEEDED"


async def test_a_job_that_is_unknown_has_none(harness: Harness) -> None:
    token = harness.store.present.token()
    with pytest.raises(RequestError) as unknown:
        await save(harness, token, checkpoint(1))
    assert unknown.value.reason is Reason.JOB_NOT_FOUND


async def test_it_goes_to_the_next_attempt_which_overwrites_it(harness: Harness) -> None:
    stored, token = await harness.claimed("j1")
    assert await save(harness, token, checkpoint(7))
    held = Claim(session="", attempt=1, nonce=b"", start_ms=0, token=token)
    back = await harness.store.jobs.commit(
        harness.operation(stored, c.Release(token=token, digest=b"r"), held=held, token=token)
    )
    assert back.won
    assert back.stored is not None
    second = await harness.claim(back.stored)
    assert second.checkpoint is not None
    assert second.checkpoint.sequence == 7
    with pytest.raises(RequestError):
        await save(harness, token, checkpoint(8))
    assert await save(harness, second.token, checkpoint(1, attempt=2))
    assert second.stored is not None
    assert (await harness.complete(second.stored, second.token)).won
    assert await lying(harness) is None
