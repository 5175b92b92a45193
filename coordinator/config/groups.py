"""The settings, group by group."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import ConfigDict

from coordinator.core.notice import NoticeKind

__all__ = [
    "AdminSettings",
    "AuthSettings",
    "CircuitSettings",
    "EtcdSettings",
    "LogSettings",
    "NoticeSettings",
    "ReconcilerSettings",
    "ServerSettings",
    "SessionSettings",
    "Settings",
    "StorageSettings",
]

_STRICT: Final = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The gRPC server.

    Args:
        listen: ``host:port``; port 0 takes a free one.
        tls_cert: PEM certificate chain; with ``tls_key`` it turns TLS on.
        tls_key: PEM private key.
        tls_client_ca: callers must present a certificate that this authority signed.
        reuse_port: several processes share the port.
        reflection: the API describes itself.
        grace_s: what a stop may take, from the first signal to the exit.
        unary_timeout_s: what a unary call without a deadline gets, on top of the wait that it asks for.
        wait_max_s: longest long poll.
        max_calls: unary calls under way at once.
        max_streams: streams under way at once, those of workers apart.
        max_work_streams: streams of workers under way at once.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    listen: str = "127.0.0.1:7420"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    reuse_port: bool = False
    reflection: bool = True
    grace_s: float = 10.0
    unary_timeout_s: float = 10.0
    wait_max_s: float = 30.0
    max_calls: int = 20_000
    max_streams: int = 2_000
    max_work_streams: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSettings:
    """The store.

    Args:
        endpoints: ``host:port``, several separated by commas.
        root: first part of every key; deployments that share an etcd need different ones.
        tls_ca: PEM authorities to trust; turns TLS on.
        tls_cert: our PEM certificate chain, if etcd asks for one.
        tls_key: its PEM private key.
        tls_server_name: name to check etcd's certificate against, instead of the endpoint's host.
        user: etcd user; empty: no login.
        password: its password.
        request_timeout_s: longest time that one request to etcd may take.
        max_txn_ops: etcd's ``--max-txn-ops``.
        allow_unsafe: start on versions of etcd with known defects, with a warning.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    endpoints: str = "127.0.0.1:2379"
    root: str = "/leasekeeper"
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    request_timeout_s: float = 3.0
    max_txn_ops: int = 128
    allow_unsafe: bool = False

    @property
    def endpoint_list(self) -> tuple[str, ...]:
        """The endpoints one by one."""
        return tuple(part.strip() for part in self.endpoints.split(",") if part.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Sessions of workers.

    Args:
        ttl_min_s: shortest TTL that a worker may ask for; etcd itself grants no less than 2 s.
        ttl_default_s: TTL of a session that asks for none.
        ttl_max_s: longest TTL.
        heartbeat_max_s: a worker beats every third of its TTL, and at least this often.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    ttl_min_s: float = 2.0
    ttl_default_s: float = 10.0
    ttl_max_s: float = 3_600.0
    heartbeat_max_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings:
    """How much of etcd's quota is used, and how long finished jobs stay.

    Args:
        quota_bytes: etcd's ``--quota-backend-bytes``, where etcd does not report it itself.
        compact_in_use: share in use from which history is compacted at once.
        stop_in_use: share in use from which submissions stop.
        notice_allocated: share allocated from which a notice asks for defragmentation.
        stop_allocated: share allocated from which submissions stop.
        history_s: history that compaction keeps.
        retention_s: how long succeeded and cancelled jobs stay.
        retained_max: most of them in a namespace.
        state_dir: where the highest revision seen is kept over restarts; empty: nowhere.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    quota_bytes: int = 8 << 30
    compact_in_use: float = 0.60
    stop_in_use: float = 0.80
    notice_allocated: float = 0.90
    stop_allocated: float = 0.95
    history_s: float = 30.0
    retention_s: float = 3_600.0
    retained_max: int = 200_000
    state_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilerSettings:
    """What is repaired, and where.

    Args:
        enabled: a coordinator stands for the sweeps too; false leaves them to ``leasekeeper reconciler``,
            which does them whatever this says.
        listen: ``host:port`` of ``leasekeeper reconciler``, so that one file serves both on one machine.
        sweep_every_s: pause between two sweeps of the leader.
        cancel_grace_s: how long a handler has to stop after a request, before its claim is taken away.
        stuck_after_s: how long a job may run, or its run timeout if that is longer, until operators are told.
        keep_dead_s: how long DEAD and QUARANTINED jobs are kept after their end.
        orphan_after_s: how long a claim or lock entry is left whose lease may still be about to end.
        admin_listen: as ``admin.listen``, for ``leasekeeper reconciler``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    enabled: bool = True
    listen: str = "127.0.0.1:7421"
    sweep_every_s: float = 30.0
    cancel_grace_s: float = 30.0
    stuck_after_s: float = 600.0
    keep_dead_s: float = 604_800.0
    orphan_after_s: float = 60.0
    admin_listen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitSettings:
    """When jobs of a (queue, type) are held back; ``core.circuit.CircuitPolicy`` has the reasons.

    Args:
        enabled: false: nothing is counted, opened or held here, whatever others have opened.
        window_s: outcomes older than this are forgotten.
        failure_ratio: share of failures among successes and failures from which a circuit opens.
        min_outcomes: successes and failures below which that share says nothing.
        loss_ratio: share of attempts lost again from which a circuit opens.
        min_lost_sessions: sessions that must have ended so.
        first_pause_s: before an open one is probed; doubles with each opening in a row.
        longest_pause_s: where the doubling ends.
        probes_to_close: probes in a row that must succeed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    enabled: bool = True
    window_s: float = 120.0
    failure_ratio: float = 0.8
    min_outcomes: int = 20
    loss_ratio: float = 0.5
    min_lost_sessions: int = 5
    first_pause_s: float = 5.0
    longest_pause_s: float = 300.0
    probes_to_close: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """Access control; off unless there is a file.

    Args:
        tokens_file: static bearer tokens, see ``coordinator.rpc.auth``.
        allow_plaintext: take tokens over connections without TLS that are not local.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    tokens_file: Path | None = None
    allow_plaintext: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """What machines that watch may ask. Off unless ``listen`` is given.

    Args:
        listen: ``host:port`` that serves ``GET /metrics`` over plain HTTP, to everybody who reaches it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    listen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSettings:
    """What operators are told, and where it goes besides log, metrics and WatchNotices.

    Args:
        hung_after_s: a handler that has moved and then does not for so long is said to hang, also without a
            heartbeat timeout; with one it is after half of that.
        webhook_url: where notices are posted; empty: nowhere.
        webhook_secret: what deliveries are signed with.
        webhook_kinds: kinds to post, by name and separated by commas; empty: all.
        webhook_queue: notices that wait at most; the oldest are dropped.
        webhook_timeout_s: for one request.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    hung_after_s: float | None = None
    webhook_url: str = ""
    webhook_secret: str = field(default="", repr=False)
    webhook_kinds: str = ""
    webhook_queue: int = 1_000
    webhook_timeout_s: float = 5.0

    @property
    def kinds(self) -> frozenset[NoticeKind]:
        """The kinds to post; empty: all.

        Raises:
            KeyError: there is no such kind.
        """
        names = (part.strip().upper() for part in self.webhook_kinds.split(","))
        return frozenset(NoticeKind[name] for name in names if name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Logs go to standard error. ``format`` "auto": for people on a terminal, JSON elsewhere."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, in groups."""

    server: ServerSettings = field(default_factory=ServerSettings)
    etcd: EtcdSettings = field(default_factory=EtcdSettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)
    storage: StorageSettings = field(default_factory=StorageSettings)
    reconciler: ReconcilerSettings = field(default_factory=ReconcilerSettings)
    circuits: CircuitSettings = field(default_factory=CircuitSettings)
    auth: AuthSettings = field(default_factory=AuthSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    notices: NoticeSettings = field(default_factory=NoticeSettings)
    log: LogSettings = field(default_factory=LogSettings)
