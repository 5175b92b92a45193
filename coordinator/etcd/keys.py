"""Every etcd key, built and parsed: nothing outside this module and its two parts holds a piece of a key.

``key_parts`` encodes text and numbers, ``namespace_keys`` has the keys of a namespace. ``FORMS`` lists every
form; docs/keys.md is checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from coordinator.core.rank import Rank
from coordinator.errors import KeyFormatError
from coordinator.etcd.key_parts import (
    LEASE_HEX,
    KeyRange,
    identifier,
    job_shard,
    name,
    padded,
    parse_number,
    prefix_end,
)
from coordinator.etcd.namespace_keys import NamespaceKeys, ReadyKey

__all__ = [
    "DEFAULT_ROOT",
    "FORMS",
    "SHARDS",
    "KeyRange",
    "KeySpace",
    "NamespaceKeys",
    "ReadyKey",
    "job_shard",
    "prefix_end",
]

DEFAULT_ROOT: Final = "/leasekeeper"

SHARDS: Final = 256
"""Ranges that lists and sweeps go through, one after the other."""

FORMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "epoch": "_system/epoch",
        "cache_epoch": "_system/cache-epoch",
        "compact": "_system/compact",
        "coordinator": "_system/coordinator/<id>",
        "leader": "_system/leader/<role>",
        "bucket": "_system/bucket/<ms>/<lease>",
        "registered": "_system/namespace/<namespace>",
        "spec": "<namespace>/job/<hh>/<job>",
        "state": "<namespace>/state/<hh>/<job>",
        "ready": "<namespace>/ready/<queue>/<type>/<rank>/<job>",
        "due": "<namespace>/due/<ms>/<job>",
        "claim": "<namespace>/claim/<job>",
        "cancel": "<namespace>/cancel/<job>",
        "checkpoint": "<namespace>/checkpoint/<job>",
        "result": "<namespace>/result/<job>",
        "unique": "<namespace>/unique/<queue>/<key>",
        "session": "<namespace>/session/<session>",
        "lock": "<namespace>/lock/<name>/<waiter>",
        "outbox": "<namespace>/outbox/<change>",
        "queue": "<namespace>/queue/<queue>",
        "type": "<namespace>/type/<queue>/<type>",
        "circuit": "<namespace>/circuit/<queue>/<type>",
    }
)
"""Every form of key below the root."""


class KeySpace:
    """Every key below one root; tests have roots of their own."""

    def __init__(self, root: str = DEFAULT_ROOT) -> None:
        if not root.startswith("/") or root.endswith("/"):
            raise KeyFormatError(f"the root {root!r} begins with a slash and does not end in one")
        self._root = root.encode()
        self._system = self._root + b"/_system/"
        self._namespaces: dict[str, NamespaceKeys] = {}
        self.epoch = self._system + b"epoch"
        self.cache_epoch = self._system + b"cache-epoch"
        self.compact = self._system + b"compact"

    def namespace(self, namespace: str) -> NamespaceKeys:
        """Keys of ``namespace``, built once."""
        keys = self._namespaces.get(namespace)
        if keys is None:
            keys = NamespaceKeys(self._root, namespace)
            if len(self._namespaces) >= 1024:  # names come from callers
                self._namespaces.clear()
            self._namespaces[namespace] = keys
        return keys

    def everything(self) -> KeyRange:
        """The whole root; for tests and backups."""
        prefix = self._root + b"/"
        return KeyRange(prefix, prefix_end(prefix))

    def coordinator(self, coordinator_id: str) -> bytes:
        """``_system/coordinator/<id>``."""
        return self._system + b"coordinator/" + identifier(coordinator_id)

    def all_coordinators(self) -> KeyRange:
        """Every coordinator."""
        return self._below(b"coordinator/")

    def parse_coordinator(self, key: bytes) -> str:
        """Id of a coordinator key."""
        return self._last(key, b"coordinator/", identifier)

    def leader(self, role: str) -> bytes:
        """``_system/leader/<role>``."""
        return self._system + b"leader/" + name(role)

    def bucket(self, ms: int, lease: int) -> bytes:
        """``_system/bucket/<ms>/<lease>``: when it was opened, and its lease in 16 hex digits."""
        return b"%bbucket/%b/%016x" % (self._system, padded(ms), lease)

    def all_buckets(self) -> KeyRange:
        """Every retention bucket, oldest first."""
        return self._below(b"bucket/")

    def parse_bucket(self, key: bytes) -> tuple[int, int]:
        """Opening time and lease of a bucket key."""
        prefix = self._system + b"bucket/"
        ms, slash, lease = key[len(prefix) :].partition(b"/")
        if not key.startswith(prefix) or not slash or not LEASE_HEX.fullmatch(lease.decode("latin-1")):
            raise KeyFormatError(f"{key!r} is no bucket key")
        return parse_number(ms), int(lease, 16)

    def registered(self, namespace: str) -> bytes:
        """``_system/namespace/<namespace>``: tells every coordinator to watch it."""
        return self._system + b"namespace/" + name(namespace)

    def all_registered(self) -> KeyRange:
        """Every registered namespace."""
        return self._below(b"namespace/")

    def parse_registered(self, key: bytes) -> str:
        """Namespace of a registry key."""
        return self._last(key, b"namespace/", name)

    def samples(self) -> Iterator[tuple[str, bytes]]:
        """(name in ``FORMS``, a key of that form), for the check of the documentation."""
        keys = self.namespace("default")
        yield "epoch", self.epoch
        yield "cache_epoch", self.cache_epoch
        yield "compact", self.compact
        yield "coordinator", self.coordinator("c1")
        yield "leader", self.leader("sweep")
        yield "bucket", self.bucket(1, 2)
        yield "registered", self.registered("default")
        yield "spec", keys.spec("j")
        yield "state", keys.state("j")
        yield "ready", keys.ready("q", "t", Rank(1, 2), "j")
        yield "due", keys.due(1, "j")
        yield "claim", keys.claim("j")
        yield "cancel", keys.cancel("j")
        yield "checkpoint", keys.checkpoint("j")
        yield "result", keys.result("j")
        yield "unique", keys.unique("q", "k")
        yield "session", keys.session("00000000000000ff")
        yield "lock", keys.lock("l", "w")
        yield "outbox", keys.outbox("c")
        yield "queue", keys.queue("q")
        yield "type", keys.type("q", "t")
        yield "circuit", keys.circuit("q", "t")

    def _below(self, directory: bytes) -> KeyRange:
        prefix = self._system + directory
        return KeyRange(prefix, prefix_end(prefix))

    def _last(self, key: bytes, directory: bytes, build: Callable[[str], bytes]) -> str:
        prefix = self._system + directory
        if not key.startswith(prefix):
            raise KeyFormatError(f"{key!r} does not begin with {prefix!r}")
        try:
            text = key[len(prefix) :].decode("ascii")
        except UnicodeDecodeError as error:
            raise KeyFormatError(f"{key!r} is not ASCII") from error
        if build(text) != key[len(prefix) :]:
            raise KeyFormatError(f"{key!r} is not in canonical form")
        return text
