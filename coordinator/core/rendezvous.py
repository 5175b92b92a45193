"""Which member prefers a key: highest random weight, so that every member answers alike without talking.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (IEEE/ACM Transactions on
Networking 6(1), 1998). A member that leaves moves only the keys that it had. The preference saves work
twice done; nothing relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

__all__ = ["preferred"]


def preferred(key: str, members: Sequence[str]) -> str:
    """The member with the highest weight for ``key``; the order of ``members`` does not matter.

    Raises:
        ValueError: there are no members.
    """
    if len(members) == 1:
        return members[0]
    if not members:
        raise ValueError("nobody to prefer")
    encoded = key.encode()
    return max(members, key=lambda member: (_weight(member, encoded), member))


def _weight(member: str, key: bytes) -> bytes:
    # The member keys the hash: no pair of member and key shares its input with another pair.
    salt = member.encode() if len(member) <= 16 else blake2b(member.encode(), digest_size=16).digest()
    return blake2b(key, digest_size=8, key=salt).digest()
