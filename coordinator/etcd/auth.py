"""Log in to etcd with a user name and password, and keep the token fresh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from coordinator.errors import EtcdUnavailable
from coordinator.etcd.channels import Member
from coordinator.etcd.outcome import classify
from leasekeeper.internal.etcd.v1.auth_pb2 import AuthenticateRequest, AuthenticateResponse

__all__ = ["Credentials", "Login", "Metadata"]

Metadata = tuple[tuple[str, str], ...]

_PATH = "/etcdserverpb.Auth/Authenticate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """An etcd user.

    Args:
        user: name.
        password: never logged.
        refresh_seconds: age at which a token is replaced; keep it below etcd's ``--auth-token-ttl``
            (300 s by default) so that no call meets a token that has run out.
    """

    user: str
    password: str = field(repr=False)
    refresh_seconds: float = 240.0


class Login:
    """The current token; logins are single-flight.

    Args:
        credentials: None if etcd runs without authentication.
        monotonic: seconds, never falling.
    """

    def __init__(self, credentials: Credentials | None, monotonic: Callable[[], float]) -> None:
        self._credentials = credentials
        self._monotonic = monotonic
        self._metadata: Metadata | None = None
        self._obtained = 0.0
        self._lock = asyncio.Lock()
        self.logins = 0

    @property
    def enabled(self) -> bool:
        """Whether calls need a token."""
        return self._credentials is not None

    async def metadata(self, member: Member, *, timeout: float) -> Metadata | None:
        """Return the metadata that a call must carry, logging in at *member* if need be.

        Args:
            member: where to log in; any member's token serves all.
            timeout: seconds for the login.

        Raises:
            PermissionDenied: user or password is wrong.
            EtcdUnavailable: no answer; nothing was sent for the caller's own call.
        """
        if self._credentials is None:
            return None
        if self._current():
            return self._metadata
        try:
            async with asyncio.timeout(timeout), self._lock:
                if not self._current():
                    await self._log_in(self._credentials, member, timeout)
                return self._metadata
        except TimeoutError:
            raise EtcdUnavailable(f"{member.endpoint}: no login within {timeout:.1f} s") from None

    def discard(self, refused: Metadata | None) -> None:
        """Forget the token, unless it is a newer one than the *refused* metadata."""
        if self._metadata is refused:
            self._metadata = None

    def _current(self) -> bool:
        if self._metadata is None or self._credentials is None:
            return False
        return self._monotonic() - self._obtained < self._credentials.refresh_seconds

    async def _log_in(self, credentials: Credentials, member: Member, timeout: float) -> None:
        request = AuthenticateRequest(name=credentials.user, password=credentials.password)
        started = self._monotonic()
        try:
            reply = await member.unary(_PATH, AuthenticateResponse.FromString)(
                request.SerializeToString(), timeout=timeout
            )
        except grpc.aio.AioRpcError as error:
            raise classify(error, mutation=False) from error
        assert isinstance(reply, AuthenticateResponse)
        self._metadata = (("token", reply.token),)
        self._obtained = started
        self.logins += 1
