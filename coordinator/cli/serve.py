"""``leasekeeper serve``: run a coordinator.

Exit codes: 0 stopped in order by a signal; 2 the settings, the address or the etcd version cannot be used;
1 a part failed for good, as the log says.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from coordinator import failpoints
from coordinator.app import serve as run_coordinator
from coordinator.cli.settings_flags import ConfigFile, EtcdEndpoints, SetFlags, check_state_dir, read_settings
from coordinator.errors import ConfigError
from coordinator.observability.logging import configure_logging

__all__ = ["serve"]

_FAILED = 1
_CANNOT_RUN = 2
_LOG = logging.getLogger(__name__)


def serve(
    config: ConfigFile = None,
    listen: Annotated[
        str | None, typer.Option(help="Address to listen on, host:port.", show_default="127.0.0.1:7420")
    ] = None,
    etcd: EtcdEndpoints = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder that keeps the highest revision seen over restarts.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain of the server.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM authority that callers' certificates must be signed by.")
    ] = None,
    tokens_file: Annotated[Path | None, typer.Option(help="TOML file of bearer tokens.")] = None,
    allow_unsafe_etcd: Annotated[
        bool | None,
        typer.Option(
            "--allow-unsafe-etcd", help="Start on versions of etcd with known defects.", show_default=False
        ),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, json or console.")] = None,
    allow_failpoints: Annotated[
        bool,
        typer.Option(
            "--allow-failpoints",
            help=f"For tests: let {failpoints.VARIABLE} hold or end this process.",
            hidden=True,
        ),
    ] = False,
    set_: SetFlags = None,
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
    try:
        settings = read_settings(config, named, set_)
        check_state_dir(settings.storage.state_dir)
        configure_logging(settings.log.level, settings.log.format)
        _arm_failpoints(allowed=allow_failpoints)
        run_coordinator(settings, ready=lambda address: _LOG.info("serving", extra={"address": address}))
    except ConfigError as error:
        print(f"leasekeeper serve: {error}", file=sys.stderr)
        raise typer.Exit(_CANNOT_RUN) from error
    except Exception as error:
        _LOG.critical("the coordinator failed", exc_info=error)
        raise typer.Exit(_FAILED) from error


def _arm_failpoints(*, allowed: bool) -> None:
    text = os.environ.get(failpoints.VARIABLE, "")
    if text and not allowed:
        raise ConfigError(f"{failpoints.VARIABLE} is set: it is for tests, and needs --allow-failpoints")
    failpoints.arm(text)
