"""The limits that callers meet, in one place; docs and error texts quote them from here.

Sizes are bytes, spans milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = [
    "CHECKPOINT_BYTES",
    "CONTENT_TYPE_BYTES",
    "DEFAULT_NAMESPACE",
    "DEFAULT_PAGE_SIZE",
    "DEFAULT_RECONCILE_ACTIONS",
    "DEFAULT_REDRIVEN_JOBS",
    "FAILURE_TYPE_BYTES",
    "FOLLOW_UPS",
    "FOLLOW_UP_BYTES",
    "HELD_CLAIMS",
    "IDENTITY_BYTES",
    "ID_BYTES",
    "ITEMS_PER_CALL",
    "LABELS",
    "LABEL_KEY_BYTES",
    "LABEL_VALUE_BYTES",
    "LARGEST_TIMESTAMP_MS",
    "LOCKS_PER_ACQUIRE",
    "LOCKS_PER_RELEASE",
    "LOCK_VALUE_BYTES",
    "LONGEST_DELAY_MS",
    "LONGEST_TIMEOUT_MS",
    "NON_RETRYABLE_TYPES",
    "PAGE_SIZE",
    "PAGE_TOKEN_BYTES",
    "PAYLOAD_BYTES",
    "PROGRESS_NOTE_BYTES",
    "QUEUES_PER_CLAIM",
    "REASON_BYTES",
    "RECONCILE_ACTIONS",
    "REDRIVEN_JOBS",
    "REDRIVES_PER_SECOND",
    "REQUEST_BYTES",
    "REQUEST_ID_BYTES",
    "RESULT_BYTES",
    "ROLLBACK_PAYLOAD_BYTES",
    "TYPES_PER_CLAIM",
    "WATCHED_IDS",
    "CallLimits",
]

DEFAULT_NAMESPACE: Final = "default"

ITEMS_PER_CALL: Final = 100
REQUEST_BYTES: Final = 3 << 20
"""Whole request of a batch call, so that etcd's 1.5 MiB a Txn and gRPC's 4 MiB a reply stay out of reach."""

PAYLOAD_BYTES: Final = 256 << 10
CHECKPOINT_BYTES: Final = 256 << 10
RESULT_BYTES: Final = 64 << 10
ROLLBACK_PAYLOAD_BYTES: Final = 4 << 10
"""It travels with every record of its parent."""

PROGRESS_NOTE_BYTES: Final = 4096 - 16
"""4 KiB a Progress message, less its ratio and tags."""

FOLLOW_UPS: Final = 20
"""As many as a completion can take along within the 127 compares or writes of one etcd operation."""

FOLLOW_UP_BYTES: Final = 256 << 10
"""All follow-ups of one completion, as encoded `JobSpec`s."""

ID_BYTES: Final = 256
REQUEST_ID_BYTES: Final = 128
IDENTITY_BYTES: Final = 255
CONTENT_TYPE_BYTES: Final = 127
FAILURE_TYPE_BYTES: Final = 127
REASON_BYTES: Final = 512
"""Reasons and failure messages are for people: longer ones are cut, not refused."""

LABELS: Final = 16
LABEL_KEY_BYTES: Final = 63
LABEL_VALUE_BYTES: Final = 255
NON_RETRYABLE_TYPES: Final = 64

LONGEST_DELAY_MS: Final = 30 * 24 * 3_600_000
LONGEST_TIMEOUT_MS: Final = 3650 * 24 * 3_600_000
LARGEST_TIMESTAMP_MS: Final = 32_503_680_000_000
"""The year 3000. Keys hold 14 digits of milliseconds, which end in the year 5138."""

QUEUES_PER_CLAIM: Final = 32
TYPES_PER_CLAIM: Final = 256
HELD_CLAIMS: Final = 2_000
"""Claims in one heartbeat.

A session has at most 500 keys, but claims stay listed until their settlement is answered.
"""

LOCKS_PER_ACQUIRE: Final = 8
"""As many as a job may name: all of them are one operation."""

LOCKS_PER_RELEASE: Final = 100
LOCK_VALUE_BYTES: Final = 1 << 10

PAGE_SIZE: Final = 1_000
DEFAULT_PAGE_SIZE: Final = 100
PAGE_TOKEN_BYTES: Final = 2_048
WATCHED_IDS: Final = 1_000

REDRIVEN_JOBS: Final = 1_000
REDRIVES_PER_SECOND: Final = 1_000
DEFAULT_REDRIVEN_JOBS: Final = 100
"""Jobs of one RedriveJobs, and jobs a second, where the caller names none."""

RECONCILE_ACTIONS: Final = 1_000
"""Listed in one answer: with the longest ids and reasons they stay below a megabyte."""

DEFAULT_RECONCILE_ACTIONS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits that an operator may set. Milliseconds.

    Args:
        ttl_min_ms: shortest session TTL.
        ttl_default_ms: TTL of a session that asks for none.
        ttl_max_ms: longest session TTL.
        wait_max_ms: longest long poll.
    """

    ttl_min_ms: int = 2_000
    ttl_default_ms: int = 10_000
    ttl_max_ms: int = 3_600_000
    wait_max_ms: int = 30_000
