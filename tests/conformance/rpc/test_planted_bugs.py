"""Bugs planted in the fake: the lines of random calls that are to find differences do find each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.core import commands as c
from coordinator.core.copying import changed
from tests.conformance.rpc.conftest import fake
from tests.conformance.rpc.test_random_calls import Line
from worker_sdk.testing import _messages, _settlements, _world

SOUND: dict[int, list[object]] = {}
SEEDS = range(8)  # those of test_random_calls


def no_rollback(before: Any, after: Any, revision: int) -> None:
    return None


def forgets_the_unique_key(self: Any, namespace: str, queue: str, unique_key: str) -> str:
    return ""


def one_digest_for_all(*said: object) -> bytes:
    return b"d" * 16


def keeps_no_progress(token: int, how: Any, progress: Any, **more: Any) -> Any:
    return SETTLEMENT(token, how, None, **more)


def retries_never_end(token: int, how: Any, progress: Any, **more: Any) -> Any:
    command = SETTLEMENT(token, how, progress, **more)
    return changed(command, no_retry=False) if isinstance(command, c.Fail) else command


def no_lock_holds(self: Any, job: Any) -> None:
    return None


def any_checkpoint_gives_way(attempt: int, sequence: int, data: bytes, progress: Any) -> Any:
    return CHECKPOINT(attempt, 0, data, progress)


SETTLEMENT = _messages.settlement
CHECKPOINT = _world.Checkpoint
BUGS: list[tuple[Any, str, Callable[..., Any]]] = [
    (_world, "enqueue_rollback", no_rollback),
    (_world.World, "owner_of", forgets_the_unique_key),
    (_world.World, "bar", no_lock_holds),
    (_messages, "digest", one_digest_for_all),
    (_messages, "settlement", keeps_no_progress),
    (_messages, "settlement", retries_never_end),
    (_settlements, "Checkpoint", any_checkpoint_gives_way),
]


async def lines(seed: int) -> list[object]:
    async with fake() as subject:
        return (await Line(subject, seed).run(120)).lines


@pytest.mark.parametrize(("place", "name", "bug"), BUGS, ids=[bug.__name__ for _, _, bug in BUGS])
async def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, bug: Callable[..., Any]
) -> None:
    for seed in SEEDS:
        sound = SOUND[seed] = SOUND.get(seed) or await lines(seed)
        with monkeypatch.context() as patch:
            patch.setattr(place, name, bug)
            broken = await lines(seed)
        if sound != broken:
            return
    pytest.fail("none of the lines shows it")


async def test_a_sound_fake_answers_every_time_alike() -> None:
    assert await lines(0) == await lines(0)
