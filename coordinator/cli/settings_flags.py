"""Command line flags into settings: named ones for what is set often, ``--set`` for the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.config import Settings, load_settings
from coordinator.errors import ConfigError, KeyFormatError
from coordinator.etcd.keys import KeySpace

__all__ = [
    "AllowFailpoints",
    "AllowUnsafeEtcd",
    "ConfigFile",
    "EtcdEndpoints",
    "LogFormat",
    "LogLevel",
    "SetFlags",
    "StateDir",
    "TlsCert",
    "TlsClientCa",
    "TlsKey",
    "TokensFile",
    "check_state_dir",
    "read_settings",
]

_HIGHEST_PORT = 65_535

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="LEASEKEEPER_CONFIG", help="TOML file of settings.", show_default=False
    ),
]
EtcdEndpoints = Annotated[
    str | None,
    typer.Option("--etcd", help="etcd endpoints, host:port[,host:port].", show_default="127.0.0.1:2379"),
]
StateDir = Annotated[
    Path | None, typer.Option(help="Folder that keeps the highest revision seen over restarts.")
]
TlsCert = Annotated[Path | None, typer.Option(help="PEM certificate chain of the server.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM key of the certificate.")]
TlsClientCa = Annotated[
    Path | None, typer.Option(help="PEM authority that callers' certificates must be signed by.")
]
TokensFile = Annotated[Path | None, typer.Option(help="TOML file of bearer tokens.")]
AllowFailpoints = Annotated[
    bool,
    typer.Option("--allow-failpoints", help="For tests: LEASEKEEPER_FAILPOINTS may hurt us.", hidden=True),
]
AllowUnsafeEtcd = Annotated[
    bool | None,
    typer.Option(
        "--allow-unsafe-etcd", help="Start on versions of etcd with known defects.", show_default=False
    ),
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
LogFormat = Annotated[str | None, typer.Option(help="auto, json or console.")]
SetFlags = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="GROUP.NAME=VALUE", help="Any other setting; may be given several times."),
]


def read_settings(
    path: Path | None, named: Mapping[str, object | None], extra: Sequence[str] | None
) -> Settings:
    """Read all settings, with flags before everything else.

    Args:
        path: the settings file.
        named: "group.name" to value; None: not given.
        extra: texts "group.name=value".

    Raises:
        ConfigError: what is wrong, by the names of the settings.
    """
    flags: dict[str, dict[str, Any]] = {}
    for text in extra or ():
        name, equals, value = text.partition("=")
        if not equals or name.count(".") != 1:
            raise ConfigError(f"--set {text}: must have the form GROUP.NAME=VALUE")
        group, _, key = name.partition(".")
        flags.setdefault(group, {})[key] = value
    for name, given in named.items():
        if given is not None:
            group, _, key = name.partition(".")
            flags.setdefault(group, {})[key] = given
    settings = load_settings(path, flags)
    _check_forms(settings)
    return settings


def check_state_dir(folder: Path | None) -> None:
    """Make the folder: what a coordinator remembers there guards its tokens, so it must not fail later.

    Raises:
        ConfigError: it cannot be made or written.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"storage.state_dir: {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"storage.state_dir: {folder} cannot be written")


def _check_forms(settings: Settings) -> None:
    """What the libraries would take and turn into something else: gRPC makes port 34463 of 99999."""
    wrong = []
    for name, listen in (
        ("server.listen", settings.server.listen),
        ("reconciler.listen", settings.reconciler.listen),
        ("admin.listen", settings.admin.listen),
        ("reconciler.admin_listen", settings.reconciler.admin_listen),
    ):
        host, _, port = listen.rpartition(":")
        if listen.startswith("unix:") and "admin" not in name:
            continue
        if not listen and "admin" in name:
            continue
        if not host or not (port.isascii() and port.isdigit()):
            wrong.append(f"{name} ({listen}) must be host:port")
        elif int(port) > _HIGHEST_PORT:
            wrong.append(f"{name}: port {port} must be at most {_HIGHEST_PORT}")
    try:
        KeySpace(settings.etcd.root)
    except KeyFormatError:
        wrong.append(f"etcd.root ({settings.etcd.root}) must begin with a slash and not end in one")
    if wrong:
        raise ConfigError("; ".join(wrong))
