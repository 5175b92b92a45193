"""``leasekeeper reconciler``: what repairs, as a process of its own.

Exit codes: see ``coordinator.cli.service_process``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from coordinator.app import RECONCILER
from coordinator.cli.service_process import run_process
from coordinator.cli.settings_flags import (
    AllowFailpoints,
    AllowUnsafeEtcd,
    ConfigFile,
    EtcdEndpoints,
    LogFormat,
    LogLevel,
    SetFlags,
    StateDir,
    TlsCert,
    TlsClientCa,
    TlsKey,
    TokensFile,
)
from coordinator.config import Settings

__all__ = ["reconciler"]


def reconciler(
    config: ConfigFile = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Address of health and AdminService, host:port.", show_default="127.0.0.1:7421"),
    ] = None,
    etcd: EtcdEndpoints = None,
    state_dir: StateDir = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    tokens_file: TokensFile = None,
    allow_unsafe_etcd: AllowUnsafeEtcd = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    set_: SetFlags = None,
    allow_failpoints: AllowFailpoints = False,
) -> None:
    """Run the reconciler alone until SIGTERM or SIGINT: it repairs, and hands out no jobs.

    It takes the settings of `serve`, but listens at reconciler.listen. Several may run, beside coordinators
    that sweep or do not (reconciler.enabled): one at a time leads.
    """
    named = {
        "reconciler.listen": listen,
        "server.tls_cert": tls_cert,
        "server.tls_key": tls_key,
        "server.tls_client_ca": tls_client_ca,
        "etcd.endpoints": etcd,
        "etcd.allow_unsafe": allow_unsafe_etcd,
        "storage.state_dir": state_dir,
        "auth.tokens_file": tokens_file,
        "log.level": log_level,
        "log.format": log_format,
    }
    run_process(
        RECONCILER,
        "reconciler",
        config,
        named,
        set_,
        adapt=_at_its_own_address,
        allow_failpoints=allow_failpoints,
    )


def _at_its_own_address(settings: Settings) -> Settings:
    # A port that coordinators share by SO_REUSEPORT is none that a reconciler may join.
    server = replace(settings.server, listen=settings.reconciler.listen, reuse_port=False)
    admin = replace(settings.admin, listen=settings.reconciler.admin_listen)
    return replace(settings, server=server, admin=admin)
