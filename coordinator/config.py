"""Settings of the coordinator: where they come from, and whether they can work together.

A flag counts before the environment, the environment before the file, the file before the defaults. A
variable is named LEASEKEEPER_<GROUP>__<SETTING> (``LEASEKEEPER_ETCD__ENDPOINTS``); the file is TOML with
one table per group. Unknown keys are refused. Variables without ``__`` are not settings: orchestrators make
such names themselves (Kubernetes puts LEASEKEEPER_PORT into every pod beside a service called leasekeeper).

Names end in their unit: ``_s`` seconds, ``_bytes``; shares are fractions of the quota.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import ConfigDict, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from coordinator.core.notice import NoticeKind
from coordinator.errors import ConfigError

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
    "check_settings",
    "load_settings",
]

_PREFIX: Final = "LEASEKEEPER_"
_LOOPBACK: Final = ("127.", "localhost", "[::1]", "unix:")
_STRICT: Final = ConfigDict(extra="forbid")
_SHORTEST_SECRET: Final = 16
"""Characters of the webhook's secret."""


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
        max_streams: streams under way at once.
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


class _Sources(BaseSettings):
    """Reads and types the groups; what comes out is plain dataclasses."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid")
    toml_path: ClassVar[Path | None] = None

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

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, environment, file: no dotenv, no secrets folder."""
        sources = [init_settings, env_settings]
        if cls.toml_path is not None:
            sources.append(TomlConfigSettingsSource(settings_cls, cls.toml_path))
        return tuple(sources)


def load_settings(path: Path | None = None, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """Read, type and check all settings.

    Args:
        path: the TOML file, None for none.
        flags: group to settings that were given on the command line.

    Raises:
        ConfigError: what is wrong, by the names of the settings.
    """
    _refuse_unknown_variables()
    if path is not None and not path.is_file():
        raise ConfigError(f"the settings file {path} does not exist")
    sources = type("_Sources", (_Sources,), {"toml_path": path})
    try:
        read = sources(**{group: dict(values) for group, values in (flags or {}).items()})
    except ValidationError as error:
        lines = [f"{_place(line['loc'])}: {_words(line)}" for line in error.errors()]
        raise ConfigError("; ".join(lines)) from error
    except (SettingsError, ValueError) as error:
        raise ConfigError(f"the settings cannot be read: {error}") from error
    settings = Settings(**{part.name: getattr(read, part.name) for part in fields(Settings)})
    check_settings(settings)
    return settings


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


def _words(line: Any) -> str:
    if line["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        return "there is no such setting"
    return f"{line['msg']} (is {line['input']!r})"


def _refuse_unknown_variables() -> None:
    groups = {part.name for part in fields(Settings)}
    for name in os.environ:
        if name.startswith(_PREFIX) and "__" in name:
            group = name.removeprefix(_PREFIX).partition("__")[0].lower()
            if group not in groups:
                raise ConfigError(f"{name}: there is no group {group!r}; groups are {sorted(groups)}")


def check_settings(settings: Settings) -> None:
    """Whether the settings can work together.

    Raises:
        ConfigError: every relation that does not hold, with both numbers.
    """
    wrong = [*_numbers(settings), *_relations(settings), *_files(settings), *_notices(settings.notices)]
    if wrong:
        raise ConfigError("; ".join(wrong))


def _numbers(settings: Settings) -> list[str]:
    wrong = []
    for part in fields(Settings):
        group = getattr(settings, part.name)
        for setting in fields(group):
            value = getattr(group, setting.name)
            if type(value) in (int, float) and not 0 < value < 1e15:
                wrong.append(f"{part.name}.{setting.name} ({value:g}) must be greater than 0 and finite")
    return wrong


_Bound = str | tuple[str, float]
_AT_MOST: Final[tuple[tuple[_Bound, _Bound], ...]] = (
    (("the 2 s that etcd grants at least", 2), "sessions.ttl_min_s"),
    ("sessions.ttl_min_s", "sessions.ttl_default_s"),
    ("sessions.ttl_default_s", "sessions.ttl_max_s"),
    ("sessions.ttl_max_s", ("a day", 86_400)),
    ("sessions.heartbeat_max_s", ("a third of an hour", 1_200)),
    ("etcd.request_timeout_s", "server.unary_timeout_s"),
    ("etcd.request_timeout_s", "sessions.ttl_default_s"),
    ("etcd.request_timeout_s", "server.grace_s"),
    (("the least that a Txn needs", 16), "etcd.max_txn_ops"),
    ("server.wait_max_s", ("the 30 s of the contract", 30)),
    ("storage.compact_in_use", "storage.stop_in_use"),
    ("storage.notice_allocated", "storage.stop_allocated"),
    ("storage.stop_in_use", ("the whole quota", 1)),
    ("storage.stop_allocated", ("the whole quota", 1)),
    (("the 30 s that watches need", 30), "storage.history_s"),
    (("the 60 s that a retention bucket is open", 60), "storage.retention_s"),
    ("sessions.ttl_default_s", "reconciler.orphan_after_s"),
    ("reconciler.cancel_grace_s", "reconciler.stuck_after_s"),
    (("a second", 1), "circuits.window_s"),
    ("circuits.failure_ratio", ("all", 1)),
    ("circuits.loss_ratio", ("all", 1)),
    ("circuits.first_pause_s", "circuits.longest_pause_s"),
    ("circuits.min_lost_sessions", ("the sessions that are remembered", 64)),
)
"""What must be at most what: settings by name, or fixed numbers with a name."""


def _relations(settings: Settings) -> list[str]:
    def number(bound: _Bound) -> tuple[str, float]:
        if not isinstance(bound, str):
            return bound
        group, name = bound.split(".")
        return bound, getattr(getattr(settings, group), name)

    pairs = [(number(low), number(high)) for low, high in _AT_MOST]
    return [
        f"{left} ({low:g}) must be at most {right} ({high:g})"
        for (left, low), (right, high) in pairs
        if low > high
    ]


def _files(settings: Settings) -> list[str]:
    server, etcd, auth = settings.server, settings.etcd, settings.auth
    wrong = []
    if (server.tls_cert is None) != (server.tls_key is None):
        wrong.append("server.tls_cert and server.tls_key must be given together")
    if server.tls_client_ca is not None and server.tls_cert is None:
        wrong.append("server.tls_client_ca needs server.tls_cert and server.tls_key")
    if (etcd.tls_cert is None) != (etcd.tls_key is None):
        wrong.append("etcd.tls_cert and etcd.tls_key must be given together")
    if etcd.tls_cert is not None and etcd.tls_ca is None:
        wrong.append("etcd.tls_cert needs etcd.tls_ca")
    if bool(etcd.user) != bool(etcd.password):
        wrong.append("etcd.user and etcd.password must be given together")
    if not etcd.endpoint_list:
        wrong.append("etcd.endpoints must name at least one host:port")
    for name, path in (
        ("server.tls_cert", server.tls_cert),
        ("server.tls_key", server.tls_key),
        ("server.tls_client_ca", server.tls_client_ca),
        ("etcd.tls_ca", etcd.tls_ca),
        ("etcd.tls_cert", etcd.tls_cert),
        ("etcd.tls_key", etcd.tls_key),
        ("auth.tokens_file", auth.tokens_file),
    ):
        if path is not None and not path.is_file():
            wrong.append(f"{name}: there is no file {path}")
    in_the_clear = auth.tokens_file is not None and server.tls_cert is None and not auth.allow_plaintext
    for name, listen in (("server.listen", server.listen), ("reconciler.listen", settings.reconciler.listen)):
        if in_the_clear and not listen.startswith(_LOOPBACK):
            wrong.append(
                f"auth.tokens_file needs TLS, because {name} ({listen}) is not local:"
                " set server.tls_cert, or auth.allow_plaintext where something else encrypts"
            )
    return wrong


def _notices(notices: NoticeSettings) -> list[str]:
    wrong = []
    try:
        _ = notices.kinds
    except KeyError as error:
        names = ", ".join(kind.name for kind in NoticeKind)
        wrong.append(f"notices.webhook_kinds: there is no kind {error.args[0]}; there are {names}")
    if not notices.webhook_url:
        return wrong
    if len(notices.webhook_secret) < _SHORTEST_SECRET:
        wrong.append(f"notices.webhook_url needs a notices.webhook_secret of {_SHORTEST_SECRET} or more")
    return wrong
