"""``leasekeeper serve``: run a coordinator. Exit codes: see ``coordinator.cli.service_process``."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.app import COORDINATOR
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

__all__ = ["serve"]


def serve(
    config: ConfigFile = None,
    listen: Annotated[
        str | None, typer.Option(help="Address to listen on, host:port.", show_default="127.0.0.1:7420")
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
    """Run a coordinator until SIGTERM or SIGINT. A second signal ends it at once.

    Settings come from flags, then from the environment (LEASEKEEPER_<GROUP>__<NAME>), then from the file.
    """
    named = {
        "server.listen": listen,
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
    run_process(COORDINATOR, "serve", config, named, set_, allow_failpoints=allow_failpoints)
