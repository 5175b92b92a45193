"""Who may try: buckets of callers, tries of resources, and what is remembered of both."""

from __future__ import annotations

import pytest

from coordinator.core.bucket import BucketPolicy
from coordinator.services.contention import Contention, ContentionConfig, Resource, Throttled, Try
from tests.support.clock import SteppingClock

JOB = Resource("job", "default", "j1")


class World:
    """Contention on a clock that stands still; ``lined`` are resources that somebody waits in line for."""

    def __init__(self, **config: object) -> None:
        self.clock = SteppingClock()
        self.lined: set[Resource] = set()
        self.contention = Contention(
            self.clock,
            ContentionConfig(**config),  # type: ignore[arg-type]
            has_line=lambda one: one in self.lined,
        )

    def fail(self, caller: str, resource: Resource = JOB) -> int:
        """A try that finds it held; what the caller is told, milliseconds."""
        one = self.contention.begin(caller, resource)
        assert isinstance(one, Try), one
        self.contention.end(one, won=False)
        return self.contention.charged(caller, resource)

    def refused(self, caller: str, resource: Resource = JOB) -> Throttled:
        """A try that may not be made."""
        one = self.contention.begin(caller, resource)
        assert isinstance(one, Throttled)
        return one


async def test_a_caller_that_comes_early_is_refused_and_not_punished() -> None:
    world = World()
    assert world.fail("a") == 50
    await world.clock.advance(0.02)
    assert world.refused("a") == Throttled(30, own=True)
    assert world.refused("a") == Throttled(30, own=True)
    await world.clock.advance(0.03)
    assert world.fail("a") == 100


async def test_callers_and_resources_have_buckets_of_their_own() -> None:
    world = World()
    world.fail("a")
    await world.clock.advance(0.05)
    assert world.fail("a") == 100
    assert world.fail("b") == 50
    assert world.fail("a", Resource("lock", "default", "j1")) == 50
    assert world.fail("a", Resource("job", "other", "j1")) == 50


async def test_who_let_go_cleanly_starts_anew() -> None:
    world = World()
    world.fail("a")
    world.contention.settled("a", JOB)
    assert world.fail("a") == 50


async def test_four_failing_tries_a_second_over_all_callers() -> None:
    world = World()
    for caller in "abcd":
        world.fail(caller)
    refused = world.refused("e")
    assert not refused.own
    assert refused.delay_ms == 1_001
    await world.clock.advance(1.0)
    assert world.refused("f").delay_ms == 50, "a place is free in a millisecond, and its own delay is longer"
    await world.clock.advance(0.001)
    assert world.fail("g") == 50


async def test_a_try_that_succeeds_takes_no_place_from_others() -> None:
    world = World()
    for caller in range(100):
        one = world.contention.begin(str(caller), JOB)
        assert isinstance(one, Try)
        world.contention.end(one, won=True)
    assert len(world.contention) == 0


async def test_who_finds_no_place_has_failed_to_get_it() -> None:
    """Else all who are refused come back every second, however many they are."""
    world = World()
    for caller in "abcd":
        world.fail(caller)
    told = []
    for _ in range(8):
        told.append(world.refused("e").delay_ms)
        await world.clock.advance(told[-1] / 1000)
        for _ in range(4):
            one = world.contention.begin_in_line(JOB)
            if isinstance(one, Try):
                world.contention.end(one, won=False)
    assert told[0] == 1_001
    assert told[-1] == 5_000


async def test_two_places_are_kept_for_the_line_while_there_is_one() -> None:
    world = World()
    world.lined.add(JOB)
    world.fail("a")
    world.fail("b")
    assert not world.refused("c").own
    assert isinstance(world.contention.begin_in_line(JOB), Try)
    assert isinstance(world.contention.begin_in_line(JOB), Try)
    assert isinstance(world.contention.begin_in_line(JOB), Throttled)


async def test_what_is_remembered_is_bounded() -> None:
    world = World(callers=100, resources=100)
    for n in range(1_000):
        world.fail("a", Resource("job", "default", f"j{n}"))
        await world.clock.advance(0.3)
    assert len(world.contention) <= 200


async def test_callers_whose_level_has_leaked_are_forgotten_first() -> None:
    world = World(callers=3)
    for _ in range(4):
        told = world.fail("old")
        await world.clock.advance(told / 1000)
    await world.clock.advance(30)
    world.fail("new", Resource("job", "default", "x"))
    world.fail("new", Resource("job", "default", "y"))
    world.fail("new", Resource("job", "default", "z"))
    assert world.refused("new", Resource("job", "default", "x")).own


@pytest.mark.parametrize("won", [True, False])
async def test_a_resource_with_tries_that_count_is_never_forgotten(won: bool) -> None:
    """A full table refuses new resources, so that the limit of those in it holds."""
    world = World(resources=2, policy=BucketPolicy(tries=1))
    first = world.contention.begin("a", JOB)
    assert isinstance(first, Try)
    world.fail("a", Resource("job", "default", "x"))
    assert not world.refused("a", Resource("job", "default", "y")).own
    assert not world.refused("b").own
    await world.clock.advance(1.1)
    world.contention.end(first, won=won)
    await world.clock.advance(1.1)
    assert isinstance(world.contention.begin("c", Resource("job", "default", "y")), Try)
