"""P3: one number that grows over revisions and over epochs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.fencing import MAX_EPOCH, MAX_TOKEN, REVISION_BITS, Position, make_token, split_token

EPOCHS = st.integers(0, MAX_EPOCH)
REVISIONS = st.integers(1, 2**REVISION_BITS - 1)


@given(st.tuples(EPOCHS, REVISIONS), st.tuples(EPOCHS, REVISIONS))
def test_tokens_compare_as_epoch_then_revision(a: tuple[int, int], b: tuple[int, int]) -> None:
    assert (make_token(*a) < make_token(*b)) == (a < b)
    assert split_token(make_token(*a)) == Position(*a)


@given(EPOCHS, REVISIONS)
def test_a_token_is_a_positive_int64(epoch: int, revision: int) -> None:
    assert 0 < make_token(epoch, revision) <= MAX_TOKEN == 2**63 - 1


def test_the_first_token_after_a_bump_is_above_the_last_before_it() -> None:
    assert make_token(8, 1) > make_token(7, 2**REVISION_BITS - 1)


@pytest.mark.parametrize(
    ("epoch", "revision"), [(-1, 1), (MAX_EPOCH + 1, 1), (0, 0), (0, -1), (0, 2**REVISION_BITS)]
)
def test_what_does_not_fit_is_refused_and_not_wrapped(epoch: int, revision: int) -> None:
    with pytest.raises(ValueError, match="no token"):
        make_token(epoch, revision)
