"""Command line flags into settings: named ones for what is set often, ``--set`` for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.config import Settings, load_settings
from coordinator.errors import ConfigError

__all__ = ["ConfigFile", "EtcdEndpoints", "SetFlags", "read_settings"]

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
    return load_settings(path, flags)
