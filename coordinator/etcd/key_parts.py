"""The parts that etcd keys are made of: users' text, names, numbers.

Users' text (job ids, lock names, unique keys) is percent-encoded: the safe characters are ASCII letters,
digits and ``-._~``, everything else is ``%XX`` of its UTF-8. A slash therefore only ever ends a part, and no
key is a prefix of another one's range: ``a`` never matches ``ab``. Numbers are zero-padded, so byte order is
numeric order.

Everything here raises ``KeyFormatError`` on what cannot be a part; what parses accepts only what builds.
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from coordinator.core.rank import Rank
from coordinator.errors import KeyFormatError

__all__ = [
    "LEASE_HEX",
    "KeyRange",
    "identifier",
    "job_shard",
    "name",
    "padded",
    "parse_name",
    "parse_number",
    "parse_rank",
    "parse_text",
    "prefix_end",
    "rank_part",
    "segment",
    "sharded",
]

_MS_DIGITS: Final = 14
_MAX_PADDED: Final = 10**_MS_DIGITS - 1
_SAFE: Final = re.compile(r"[A-Za-z0-9._~-]+", re.ASCII)
_SAFE_BYTES: Final = re.compile(rb"[A-Za-z0-9._~-]+")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_MAX_TEXT: Final = 256

LEASE_HEX: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)
"""A lease id, and so a session id, in a key."""


class KeyRange(NamedTuple):
    """``[start, end)``."""

    start: bytes
    end: bytes


def prefix_end(prefix: bytes) -> bytes:
    """End of the range of all keys that begin with ``prefix``, which ends in a slash."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


_CACHED_IDS: Final = 1 << 14
"""More than a full window's. What is cached beyond the jobs under way only drives these out of the caches of
the processor."""


@lru_cache(maxsize=_CACHED_IDS)
def segment(text: str) -> bytes:
    """``text`` as one part of a key.

    Raises:
        KeyFormatError: empty, longer than 256 bytes, not UTF-8, or with control characters.
    """
    if _SAFE.fullmatch(text) and len(text) <= _MAX_TEXT:
        return text.encode()
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise KeyFormatError("text with lone surrogates cannot be a part of a key") from error
    if not 1 <= len(raw) <= _MAX_TEXT:
        raise KeyFormatError(f"a part of a key has 1-{_MAX_TEXT} bytes, not {len(raw)}")
    if any(ord(character) < 0x20 or 0x7F <= ord(character) <= 0x9F for character in text):
        raise KeyFormatError("a part of a key has no control characters")
    return quote_from_bytes(raw, safe="").encode()


@lru_cache(maxsize=1 << 14)
def name(text: str) -> bytes:
    """A namespace, queue or type name, which needs no encoding."""
    if not _NAME.fullmatch(text):
        raise KeyFormatError(f"{text!r} is no name: [a-z0-9][a-z0-9._-]{{0,62}}")
    return text.encode()


def parse_text(part: bytes) -> str:
    """Undo ``segment``; refuses what ``segment`` would not have written."""
    if _SAFE_BYTES.fullmatch(part) and len(part) <= _MAX_TEXT:
        return part.decode()
    try:
        text = unquote_to_bytes(part).decode()
    except UnicodeDecodeError as error:
        raise KeyFormatError(f"{part!r} is not UTF-8") from error
    if segment(text) != part:
        raise KeyFormatError(f"{part!r} is not in canonical form")
    return text


def padded(number: int) -> bytes:
    """A number of 14 digits."""
    if not 0 <= number <= _MAX_PADDED:
        raise KeyFormatError(f"{number} does not fit {_MS_DIGITS} digits")
    return b"%014d" % number


def parse_number(part: bytes) -> int:
    """Undo ``padded``."""
    if len(part) != _MS_DIGITS or not part.isdigit():
        raise KeyFormatError(f"{part!r} is not a number of {_MS_DIGITS} digits")
    return int(part)


def rank_part(rank: Rank) -> bytes:
    """``<ms>-<counter>``."""
    ms, counter = rank
    if 0 <= ms <= _MAX_PADDED and 0 <= counter <= _MAX_PADDED:
        return b"%014d-%014d" % rank
    return b"%b-%b" % (padded(ms), padded(counter))  # which says what is wrong


def parse_rank(part: bytes) -> Rank:
    """Undo ``rank_part``."""
    ms, dash, counter = part.partition(b"-")
    if not dash:
        raise KeyFormatError(f"{part!r} is no rank")
    return Rank(parse_number(ms), parse_number(counter))


def identifier(text: str) -> bytes:
    """An id that we made ourselves."""
    if not _IDENTIFIER.fullmatch(text):
        raise KeyFormatError(f"{text!r} is no identifier")
    return text.encode()


@lru_cache(maxsize=_CACHED_IDS)
def sharded(job_id: str) -> bytes:
    """``<hh>/<job>``."""
    part = segment(job_id)
    return b"%02x/%b" % (zlib.crc32(part) & 0xFF, part)


def job_shard(job_id: str) -> int:
    """The range, 0-255, that a job is listed in: the low byte of the CRC-32 of its encoded id."""
    return zlib.crc32(segment(job_id)) & 0xFF


def parse_name(part: bytes) -> str:
    """Undo ``name``."""
    try:
        text = part.decode("ascii")
    except UnicodeDecodeError as error:
        raise KeyFormatError(f"{part!r} is no name") from error
    if name(text) != part:
        raise KeyFormatError(f"{part!r} is no name")
    return text
