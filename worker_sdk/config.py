"""Settings of the SDK.

How to reach coordinators, how long to wait, how a worker behaves. Checked when made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from worker_sdk.errors import ConfigError

__all__ = ["ConnectionConfig", "Keepalive", "RetryConfig", "Timeouts", "TlsConfig", "WorkerConfig"]

_MAX_POLL_SECONDS = 30.0
_MAX_BATCH = 100
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MIN_TTL_SECONDS, _MAX_TTL_SECONDS = 2.0, 3600.0


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files for TLS. ``None`` roots: the system's. Certificate and key come together, for mutual TLS."""

    root_certificates: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    # The name in the coordinator's certificate, where it is not the endpoint's host.
    server_name: str = ""

    def __post_init__(self) -> None:
        _require(
            (self.certificate is None) == (self.private_key is None),
            f"certificate {self.certificate} and private_key {self.private_key}: give both or neither",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds.

    ``call`` bounds a call of the user's with all its retries, ``attempt`` one try at one coordinator.
    """

    call: float = 20.0
    attempt: float = 5.0
    # One stream of `watch` lives this long before the SDK resumes it on a new one.
    stream: float = 300.0
    close: float = 3.0

    def __post_init__(self) -> None:
        for name in ("call", "attempt", "stream", "close"):
            value = getattr(self, name)
            _require(0 < value < float("inf"), f"timeout {name} is {value} s: must be finite and above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """HTTP/2 pings, seconds. Coordinators accept a ping every 5 s, so ``time`` must not be shorter."""

    time: float = 10.0
    timeout: float = 5.0

    def __post_init__(self) -> None:
        _require(self.time >= 5.0, f"keepalive time is {self.time} s: coordinators refuse pings below 5 s")
        _require(self.timeout > 0, f"keepalive timeout is {self.timeout} s: must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """Backoff between tries of one call, seconds; `jitter` is the share of the delay that is random (0-1)."""

    initial: float = 0.05
    maximum: float = 2.0
    multiplier: float = 2.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        _require(
            0 < self.initial <= self.maximum < float("inf"),
            f"retry initial {self.initial} s must be above 0 and at most maximum {self.maximum} s",
        )
        _require(self.multiplier >= 1, f"retry multiplier {self.multiplier} must be at least 1")
        _require(0 <= self.jitter <= 1, f"retry jitter {self.jitter} must lie in 0-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Where the coordinators are and how to talk to them.

    Args:
        endpoints: ``host:port``, several separated by commas; each is tried in turn.
        namespace: namespace of every call.
        token: bearer token. Without `tls` it travels in the clear and needs `allow_plaintext_token`.
    """

    endpoints: str
    namespace: str = "default"
    tls: TlsConfig | None = None
    token: str = field(default="", repr=False)
    allow_plaintext_token: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)
    keepalive: Keepalive = field(default_factory=Keepalive)
    retry: RetryConfig = field(default_factory=RetryConfig)

    def __post_init__(self) -> None:
        for address in self.addresses():
            host, _, port = address.rpartition(":")
            _require(
                bool(host) and port.isdecimal() and 0 < int(port) < 65536,
                f"endpoint {address!r} is not host:port",
            )
        _require(bool(self.addresses()), "endpoints is empty: give host:port[,host:port]")
        _require(bool(self.namespace), "namespace is empty")
        _require(
            not self.token or self.tls is not None or self.allow_plaintext_token,
            "a token without TLS travels in the clear: set tls, or allow_plaintext_token",
        )
        # It travels as a header. The message does not repeat it: it is a secret.
        _require(
            all("!" <= character <= "~" for character in self.token),
            "token has a character that no header can carry: give printable ASCII without spaces",
        )

    def addresses(self) -> tuple[str, ...]:
        """Return the endpoints one by one."""
        return tuple(part.strip() for part in self.endpoints.split(",") if part.strip())

    @classmethod
    def of(cls, endpoints: str | Self, namespace: str | None = None) -> Self:
        """Return a whole configuration as it is, or one for ``host:port[,host:port]`` and *namespace*.

        Raises:
            ConfigError: settings that cannot work, or a namespace beside a whole configuration.
        """
        if isinstance(endpoints, str):
            return cls(endpoints=endpoints, namespace="default" if namespace is None else namespace)
        _require(namespace is None, "give the namespace in the ConnectionConfig")
        return endpoints

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read ``LEASEKEEPER_ENDPOINTS``, ``_NAMESPACE``, ``_TOKEN``, ``_TLS_CA``, ``_TLS_CERT``,
        ``_TLS_KEY``.

        Raises:
            ConfigError: no endpoints, or settings that cannot work.
        """
        env = os.environ if environment is None else environment
        paths = {name: env.get(f"LEASEKEEPER_TLS_{name}", "") for name in ("CA", "CERT", "KEY")}
        tls = None
        if any(paths.values()):
            ca, cert, key = (Path(path) if path else None for path in paths.values())
            tls = TlsConfig(root_certificates=ca, certificate=cert, private_key=key)
        _require(
            "LEASEKEEPER_ENDPOINTS" in env, "LEASEKEEPER_ENDPOINTS is not set: give host:port[,host:port]"
        )
        return cls(
            endpoints=env["LEASEKEEPER_ENDPOINTS"],
            namespace=env.get("LEASEKEEPER_NAMESPACE", "default"),
            token=env.get("LEASEKEEPER_TOKEN", ""),
            tls=tls,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a worker behaves; all times in seconds.

    Args:
        session_ttl: wanted TTL of the session; a dead worker's jobs run elsewhere after about this time.
        identity: who this is, for people; empty: host and pid.
        labels: facts about this worker, stored with its session.
        transport: ``stream``: jobs are pushed on one stream, and polled for where none can be kept open;
            ``poll``: polled for.
        poll_wait: how long one claim call waits for a job, at most 30.
        claim_batch: most jobs in one claim call, 1-100.
        claim_loops: claim calls under way at a time for each pool; 0: as many as its concurrency calls for.
        threads: threads for handlers that are plain functions; 0: as many as there are slots.
        drain_timeout: how long running handlers may go on after a stop was asked for.
        cancel_grace: how long a cancelled handler may take to end at shutdown, before it is given up.
        settle_give_up: how long after its claim's safe deadline a settlement is still repeated.
        handle_signals: SIGTERM and SIGINT stop the worker, where it runs in the main thread.
        stall_warning: a loop that did not turn, or a process that stood still, for so long is reported, with
            the jobs on it.
        stall_limit: a loop that did not turn for so long is stuck: health is red, and `on_stall` follows.
        on_stall: ``keep``: the jobs on a stuck loop stay claimed, and beats go on. ``release``: they go back
            uncharged and run elsewhere; what still runs here has a stale token.
        health_listen: ``host:port`` of an HTTP server with ``/livez`` and ``/readyz``; empty: none.
        health_file: a file that is written anew each second while the worker is live; None: none.
        exit_when_stuck_after: a worker that is not live for so long ends its process with exit code 70, so
            that somebody starts it again; 0: never.
    """

    session_ttl: float = 10.0
    identity: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    transport: Literal["stream", "poll"] = "stream"
    poll_wait: float = 20.0
    claim_batch: int = _MAX_BATCH
    claim_loops: int = 0
    threads: int = 0
    drain_timeout: float = 25.0
    cancel_grace: float = 1.0
    settle_give_up: float = 60.0
    handle_signals: bool = True
    stall_warning: float = 5.0
    stall_limit: float = 30.0
    on_stall: Literal["keep", "release"] = "keep"
    health_listen: str = ""
    health_file: Path | None = None
    exit_when_stuck_after: float = 0.0

    def __post_init__(self) -> None:
        _require(
            _MIN_TTL_SECONDS <= self.session_ttl <= _MAX_TTL_SECONDS,
            f"session_ttl is {self.session_ttl} s: must lie in {_MIN_TTL_SECONDS:g}-{_MAX_TTL_SECONDS:g} s",
        )
        _require(
            self.transport in ("stream", "poll"),
            f"transport is {self.transport!r}: must be 'stream' or 'poll'",
        )
        _require(
            0 < self.poll_wait <= _MAX_POLL_SECONDS,
            f"poll_wait is {self.poll_wait} s: must be above 0 and at most {_MAX_POLL_SECONDS:g} s",
        )
        _require(
            1 <= self.claim_batch <= _MAX_BATCH,
            f"claim_batch is {self.claim_batch}: must lie in 1-{_MAX_BATCH}",
        )
        _require(
            not _CONTROL.search(self.identity), f"identity is {self.identity!r}: has a control character"
        )
        _require(0 <= self.claim_loops <= 16, f"claim_loops is {self.claim_loops}: must lie in 0-16")
        _require(self.threads >= 0, f"threads is {self.threads}: must not be negative")
        for name in ("drain_timeout", "cancel_grace", "settle_give_up"):
            value = getattr(self, name)
            _require(0 <= value < float("inf"), f"{name} is {value} s: must be finite and not negative")
        _require(self.stall_warning > 0, f"stall_warning is {self.stall_warning} s: must be above 0")
        _require(self.stall_limit > 0, f"stall_limit is {self.stall_limit} s: must be above 0")
        _require(
            self.on_stall in ("keep", "release"),
            f"on_stall is {self.on_stall!r}: must be 'keep' or 'release'",
        )
        _require(
            self.exit_when_stuck_after >= 0,
            f"exit_when_stuck_after is {self.exit_when_stuck_after} s: must not be negative",
        )
        host, _, port = self.health_listen.rpartition(":")
        _require(
            not self.health_listen or (bool(host) and port.isdecimal() and int(port) < 65536),
            f"health_listen {self.health_listen!r} is not host:port",
        )
