"""The claim that a session would hold, and how many it may."""

from __future__ import annotations

from typing import Final

from worker_sdk.testing._refusals import Refused
from worker_sdk.testing._world import Session

__all__ = ["room_of"]

_SESSION_KEYS: Final = 500


def room_of(session: Session) -> int:
    """How many more claims the session may have.

    Raises:
        Refused: SESSION_FULL, none.
    """
    room = _SESSION_KEYS - len(session.claims)
    if room <= 0:
        raise Refused(
            "SESSION_FULL",
            f"the session holds {_SESSION_KEYS} keys already; open another",
            metadata={"limit": str(_SESSION_KEYS)},
        )
    return room
