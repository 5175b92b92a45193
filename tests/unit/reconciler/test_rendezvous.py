"""Who prefers a job: everybody answers alike, evenly, and few keys move when a member goes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.rendezvous import preferred

names = st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=8, unique=True)


@given(st.text(max_size=50), names)
def test_every_member_answers_alike(key: str, members: list[str]) -> None:
    chosen = preferred(key, members)
    assert chosen in members
    assert preferred(key, sorted(members)) == chosen
    assert preferred(key, list(reversed(members))) == chosen


@given(st.text(max_size=50), names)
def test_a_member_that_leaves_moves_only_its_own_keys(key: str, members: list[str]) -> None:
    chosen = preferred(key, members)
    for leaver in members:
        rest = [member for member in members if member != leaver]
        if rest and leaver != chosen:
            assert preferred(key, rest) == chosen


def test_keys_spread_evenly() -> None:
    members = [f"coordinator-with-a-long-name-{n}" for n in range(4)]
    shares = Counter(preferred(f"job-{n}", members) for n in range(4_000))
    assert set(shares) == set(members)
    assert all(850 <= count <= 1_150 for count in shares.values())


def test_without_members_there_is_nobody_to_prefer() -> None:
    with pytest.raises(ValueError, match="nobody"):
        preferred("j", [])
