"""Who may call what: static bearer tokens from a file. Off unless a file is given.

The file is TOML, one ``[[token]]`` per caller::

    [[token]]
    name = "billing"                  # for people and logs
    sha256 = "…64 hex digits…"        # of the token; the token itself is never stored
    namespaces = ["billing"]          # or ["*"]
    scopes = ["jobs:read", "jobs:write", "work"]      # and "admin", "reflection"

A lookup goes by the SHA-256 of what was presented, so that its time says nothing about stored tokens.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from coordinator.errors import ConfigError, Reason, RequestError

__all__ = ["Caller", "Scope", "TokenTable"]

_HEADER: Final = "authorization"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_KEYS: Final = frozenset({"name", "sha256", "namespaces", "scopes"})


class Scope(StrEnum):
    """What a token allows."""

    READ = "jobs:read"
    WRITE = "jobs:write"
    WORK = "work"
    ADMIN = "admin"
    REFLECT = "reflection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One entry of the file. ``namespaces`` holding "*" means all."""

    name: str
    namespaces: frozenset[str]
    scopes: frozenset[Scope]


class TokenTable:
    """The callers, by the SHA-256 of their tokens.

    Args:
        callers: digest in hex to caller.
    """

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._callers = dict(callers)

    @classmethod
    def load(cls, path: Path) -> TokenTable:
        """Read the file.

        Raises:
            ConfigError: it cannot be read, or an entry is wrong; the message says which.
        """
        try:
            content = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"auth.tokens_file {path}: {error}") from error
        entries = content.get("token")
        if not isinstance(entries, list) or not entries or set(content) != {"token"}:
            raise ConfigError(f"auth.tokens_file {path}: must hold [[token]] entries and nothing else")
        callers: dict[str, Caller] = {}
        for number, entry in enumerate(entries, start=1):
            digest, caller = _entry(f"auth.tokens_file {path}, token {number}", entry)
            if digest in callers:
                raise ConfigError(
                    f"auth.tokens_file {path}, token {number}: the same token as {callers[digest].name!r}"
                )
            callers[digest] = caller
        return cls(callers)

    def replace(self, other: TokenTable) -> None:
        """Take over the callers of ``other``; calls under way are not asked again."""
        self._callers = other._callers

    def check(
        self, headers: Iterable[tuple[str, str | bytes]], scope: Scope, namespace: str | None
    ) -> Caller:
        """The caller, if it may do this; ``namespace`` None: no namespace is touched.

        Raises:
            RequestError: UNAUTHENTICATED, PERMISSION_DENIED (metadata: scope).
        """
        presented = next((value for key, value in headers if key == _HEADER), "")
        text = presented.decode("latin-1") if isinstance(presented, bytes) else presented
        kind, _, token = text.partition(" ")
        if kind.lower() != "bearer" or not token:
            raise RequestError(
                Reason.UNAUTHENTICATED, "an authorization header with a bearer token is required"
            )
        caller = self._callers.get(hashlib.sha256(token.strip().encode("latin-1", "replace")).hexdigest())
        if caller is None:
            raise RequestError(Reason.UNAUTHENTICATED, "the bearer token is not known here")
        if scope not in caller.scopes:
            raise RequestError(
                Reason.PERMISSION_DENIED,
                f"the token lacks the scope {scope.value}",
                metadata={"scope": scope.value},
            )
        if namespace is not None and namespace not in caller.namespaces and "*" not in caller.namespaces:
            raise RequestError(
                Reason.PERMISSION_DENIED,
                f"the token is not for namespace {namespace!r}",
                metadata={"scope": scope.value, "namespace": namespace},
            )
        return caller


def _entry(place: str, entry: Mapping[str, Any]) -> tuple[str, Caller]:
    unknown = set(entry) - _KEYS
    missing = _KEYS - set(entry)
    if unknown or missing:
        raise ConfigError(f"{place}: unknown keys {sorted(unknown)}, missing keys {sorted(missing)}")
    digest = str(entry["sha256"]).lower()
    if _DIGEST.fullmatch(digest) is None:
        raise ConfigError(f"{place}: sha256 must be 64 hex digits")
    try:
        scopes = frozenset(Scope(scope) for scope in entry["scopes"])
    except ValueError as error:
        raise ConfigError(f"{place}: {error}; scopes are {[scope.value for scope in Scope]}") from error
    return digest, Caller(
        name=str(entry["name"]), namespaces=frozenset(map(str, entry["namespaces"])), scopes=scopes
    )
