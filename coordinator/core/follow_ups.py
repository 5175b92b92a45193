"""Follow-up jobs: jobs that are submitted in the very Txn that completes another one. Pure.

All of them or none, and the completion with them. A follow-up's id, if its parent named none, is a hash of
the parent, its token and the item, so that a settlement that is said twice names the same jobs.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from coordinator.core.commands import Submit
from coordinator.core.job import Job
from coordinator.core.machine import Decision, Refusal, decide
from coordinator.errors import Reason

__all__ = ["NOTHING", "Standing", "admit", "follow_up_job_id"]

_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What stands where a follow-up wants to be: ``job`` under its id, ``unique_owner`` at its unique key.

    The owner does not count if the follow-up's parent gives that key up in the same Txn.
    """

    job: Job | None = None
    unique_owner: str = ""


NOTHING: Final = Standing()
"""Nothing stands there, as far as is known; the Txn compares."""


def follow_up_job_id(namespace: str, parent: str, token: int, item: int) -> str:
    """The id of follow-up number ``item`` of a settlement, for one that came without: 26 characters."""
    tag, parts = b"lk-follow-up-id-1", (namespace.encode(), parent.encode(), struct.pack(">qI", token, item))
    lengths = struct.pack(f">{len(parts)}I", *map(len, parts))
    digest = sha256(tag + lengths + b"".join(parts)).digest()
    return base64.b32encode(digest[:_DIGEST_BYTES]).decode()[:26].lower()


def admit(
    parent: Job, wanted: Sequence[Submit], found: Sequence[Standing], now_ms: int
) -> dict[int, Decision] | Refusal:
    """Which of ``wanted`` are to be created, by their place; a refusal says why none is.

    Args:
        parent: the record of the job that completes, as read.
        wanted: the follow-ups.
        found: what stands where each of them wants to be, in their order.
        now_ms: Unix milliseconds.

    One that stands already with the same content counts as submitted and is not created again.
    """
    created: dict[int, Decision] = {}
    for place, (command, standing) in enumerate(zip(wanted, found, strict=True)):
        outcome = decide(standing.job, None, command, now_ms)
        if isinstance(outcome, Refusal):
            return Refusal(
                outcome.reason,
                f"follow-up {place}: {outcome.message}",
                {**outcome.metadata, "follow_up": str(place)},
            )
        if not isinstance(outcome, Decision):
            continue
        owner = standing.unique_owner
        if owner and owner != parent.job_id:
            return Refusal(
                Reason.DUPLICATE_JOB,
                f"follow-up {place}: its unique key belongs to job {owner}",
                {"job_id": owner, "unique_key": command.terms.unique_key, "follow_up": str(place)},
            )
        created[place] = outcome
    return created
