"""Count what cannot be decoded, and say so without flooding the log."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from coordinator.errors import CodecError, KeyFormatError

__all__ = ["SetAside"]

_log = logging.getLogger(__name__)

_LOGGED: Final = 20
"""Records of one kind that are named in the log; the count goes on."""


class SetAside:
    """Undecodable records and keys, by kind. They stay in etcd for an operator to look at."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, key: bytes, error: CodecError | KeyFormatError) -> None:
        """Note one sight of an undecodable record; the same one is counted each time it is met."""
        self.counts[kind] += 1
        if self.counts[kind] <= _LOGGED:
            _log.warning("set aside an undecodable %s record at %r: %s", kind, key, error)
