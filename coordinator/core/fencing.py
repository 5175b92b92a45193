"""The fencing token: epoch and revision in one positive int64, so that a store need keep only one number.

The revision part is the create revision of the claim (or lock entry), which is the header revision of the Txn
that made it: etcd's own documentation names it as the number to fence with. The epoch part is raised by hand
after a restore, which sets revisions back.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["MAX_EPOCH", "MAX_TOKEN", "REVISION_BITS", "Position", "make_token", "split_token"]

REVISION_BITS: Final = 44
"""2^44 revisions are 55 years at 10,000 a second."""

MAX_EPOCH: Final = 2 ** (63 - REVISION_BITS) - 1
MAX_TOKEN: Final = 2**63 - 1
_END: Final = 2**REVISION_BITS
_MASK: Final = _END - 1


class Position(NamedTuple):
    """A point in the history of the store; compares as its token does."""

    epoch: int
    revision: int


def make_token(epoch: int, revision: int) -> int:
    """The token of ``revision`` in ``epoch``.

    Raises:
        ValueError: a part is out of range.
    """
    if not 0 <= epoch <= MAX_EPOCH or not 0 < revision < _END:
        raise ValueError(f"no token for epoch {epoch}, revision {revision}")
    return (epoch << REVISION_BITS) | revision


def split_token(token: int) -> Position:
    """Epoch and revision of a positive token."""
    return Position(token >> REVISION_BITS, token & _MASK)
