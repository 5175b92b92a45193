"""Whether settings can work together."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from coordinator.config.groups import NoticeSettings, Settings
from coordinator.core.notice import NoticeKind
from coordinator.errors import ConfigError

__all__ = ["check_settings"]

_LOOPBACK: Final = ("127.", "localhost", "[::1]", "unix:")
_SHORTEST_SECRET: Final = 16
"""Characters of the webhook's secret."""


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
